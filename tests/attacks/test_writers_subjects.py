"""Whoever can write to the database changes the column by which entries are found.

The column repeats the signed statement. A verification compares both, and whoever acts by an entry
reads its statement.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
from django.test import Client
from django.utils import timezone
from django_otp.plugins.otp_totp.models import TOTPDevice

from executions.capabilities.reports.reading import Scope
from executions.capabilities.reports.service import make
from executions.ledger.append import record_baseline, rows_by_subject
from executions.ledger.bindings import subject_of_user
from executions.ledger.models import LedgerEntry
from executions.runs.models import Approval, Execution
from executions.sessions.queries import key_creators
from executions.tenants.models import ApiKey
from sandbox_site.accounts import was_altered_outside
from tests.attacks.administrators import superuser
from tests.conftest import Caller
from tests.ledger.ledger_entries import verify
from tests.support.approvals import ASKED, RULES, decided, signed_in
from tests.support.policies import in_force
from tests.support.running import run, run_queued

pytestmark = [pytest.mark.one_database, pytest.mark.django_db]


def put(entry: LedgerEntry, subject: str) -> None:
    """Write a subject into the column of an entry, past the service."""
    LedgerEntry.objects.filter(pk=entry.pk).update(subject=subject)


def altered() -> list[int]:
    """The entries whose column `subject` a verification finds changed; it finds nothing else."""
    found = verify().findings
    assert {(each.kind, each.detail) for each in found} <= {
        ("altered", "its column subject was changed")
    }
    return [each.sequence for each in found]


@pytest.fixture
def approver(db: None) -> Client:
    return signed_in("ada", "view_approval", "decide_approval")


def asked(caller: Caller) -> Approval:
    answer = run(caller, ASKED)
    assert answer.status_code == 202, answer.content
    return Approval.objects.get(execution=answer.json()["id"])


def test_a_changed_subject_is_found_in_an_entry_of_every_kind(everything: None) -> None:
    kinds = set(LedgerEntry.objects.order_by().values_list("kind", flat=True).distinct())
    assert {"execution", "api_key", "authenticator", "legal_hold", "baseline"} <= kinds
    for kind in kinds:
        entry = LedgerEntry.objects.filter(kind=kind).order_by("-sequence")[0]
        for subject in ("", f"{entry.subject} "):
            put(entry, subject)
            assert subject == entry.subject or altered() == [entry.sequence], kind
        put(entry, entry.subject)
    assert verify().is_intact


@pytest.mark.usefixtures("policies_forgotten")
def test_an_approval_with_another_subject_counts_and_is_found(
    scripted: Callable[[], list[str]], alice: Caller, approver: Client
) -> None:
    in_force(alice.tenant.slug, **RULES)
    approval = asked(alice)
    decided(approver, approval, "approve")
    entry = LedgerEntry.objects.get(kind="approval")
    put(entry, "another")
    run_queued()
    row = Execution.objects.get(pk=approval.execution_id)
    assert (row.status, row.meta["policy"]["approved"]["by"]) == ("succeeded", "user:ada")
    assert altered() == [entry.sequence]


@pytest.mark.usefixtures("policies_forgotten")
def test_no_subject_makes_one_approval_another_runs(
    scripted: Callable[[], list[str]], alice: Caller, approver: Client
) -> None:
    """Of the same code and request, by the same person, so that nothing but the subject differs."""
    in_force(alice.tenant.slug, **RULES)
    honest, forged = asked(alice), asked(alice)
    assert honest.request_hash == forged.request_hash
    decided(approver, honest, "approve")
    run_queued()
    ran = len(scripted())
    now = timezone.now()
    Approval.objects.filter(pk=forged.pk).update(
        status="approved", decided_by="user:ada", decided_at=now
    )
    Execution.objects.filter(pk=forged.execution_id).update(deadline=now + timedelta(minutes=5))
    entry = LedgerEntry.objects.get(kind="approval")
    put(entry, str(forged.execution_id))
    run_queued()
    row = Execution.objects.get(pk=forged.execution_id)
    assert (row.status, row.error_code, len(scripted())) == ("blocked", "SB007", ran)
    assert altered() == [entry.sequence]


def test_a_removed_run_whose_entry_is_another_tenants_leaves_no_report_intact(
    scripted: object, alice: Caller, charlie: Caller
) -> None:
    hidden = run(alice, "pass").json()
    theirs = run(charlie, "pass").json()
    run(alice, "pass")
    entries = {
        each["id"]: LedgerEntry.objects.get(execution_id=each["id"]) for each in (hidden, theirs)
    }
    for each in (hidden, theirs):
        Execution.objects.filter(pk=each["id"])._raw_delete("default")
    put(entries[hidden["id"]], charlie.tenant.slug)
    put(entries[theirs["id"]], alice.tenant.slug)
    pieces: list[bytes] = []
    made = make("1", Scope(alice.tenant.slug), "x", pieces.extend, list)
    report = b"".join(pieces).decode()
    # Neither is in it, as another tenant's must not be, and it is not intact for both.
    assert theirs["id"] not in report
    assert made.findings >= 2
    for entry in entries.values():
        assert f'{{"detail":"its column subject was changed","entry":{entry.sequence},' in report


def test_nobody_is_locked_out_or_let_in_by_the_subject_of_an_authenticator() -> None:
    record_baseline()
    erin, frank = superuser("erin"), superuser("frank")
    device = TOTPDevice.objects.create(user=frank, name="phone", confirmed=True)
    entry = LedgerEntry.objects.get(kind="authenticator")
    label = TOTPDevice._meta.label_lower
    assert rows_by_subject(label, subject_of_user(frank.pk)) == [str(device.pk)]

    TOTPDevice.objects.filter(pk=device.pk)._raw_delete("default")
    put(entry, subject_of_user(erin.pk))
    assert rows_by_subject(label, subject_of_user(erin.pk)) == []
    assert not was_altered_outside(erin)
    put(entry, entry.subject)
    assert was_altered_outside(frank)


def test_the_subject_of_a_keys_entry_makes_nobody_its_maker(
    scripted: object, alice: Caller, charlie: Caller
) -> None:
    sent = run(alice, "pass").json()["id"]
    before = key_creators(sent)
    entry = LedgerEntry.objects.get(kind="api_key", subject=charlie.api_key.prefix)
    put(entry, ApiKey.objects.get(pk=alice.api_key.pk).prefix)
    assert key_creators(sent) == before
    assert altered() == [entry.sequence]
