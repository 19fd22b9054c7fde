"""Legal holds: what one stands for is not erased, and no administrator lifts one alone."""

from __future__ import annotations

import uuid
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import User
from django.db import connection
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from executions.capabilities.observability.counters import recount
from executions.capabilities.retention import service as retention
from executions.capabilities.retention.service import apply_retention
from executions.capabilities.spending.models import Budget
from executions.kernel.audit import acting_as
from executions.ledger.erasures import Held, OnHold
from executions.ledger.models import LedgerEntry, LegalHold
from executions.ledger.verification import verify
from executions.runs.models import Execution, LateResult
from executions.runs.record import record_late
from executions.runs.statistics import Statistic
from executions.sessions.models import Workspace
from executions.sessions.storage.carry_over import clean_ended
from executions.tenants.models import Tenant
from providers.models import PendingChange
from providers.services.row_changes import NeedsApproval
from tests.conftest import Caller
from tests.support.running import run
from tests.support.saved_files import asleep
from tests.support.sessions import URL

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.database]

ADD = reverse("admin:executions_legalhold_add")
CODE = (
    "answer = ExecutionResult('out', '', 0, 0.0, artifacts=[ArtifactFile('a', 'text/plain', b'a')])"
)


@pytest.fixture
def a_year_later(monkeypatch: pytest.MonkeyPatch, settings: Any) -> None:
    clock = SimpleNamespace(now=lambda: timezone.now() + timedelta(days=365))
    monkeypatch.setattr(retention, "timezone", clock)
    settings.SANDBOX_KEEP_DAYS = dict.fromkeys(retention.KINDS, 1)


def administrator(name: str) -> Client:
    client = Client()
    client.force_login(User.objects.create_superuser(name))
    return client


def recorded(caller: Caller) -> Execution:
    return Execution.objects.get(pk=run(caller, CODE).json()["id"])


def place(tenant: str = "wonderland", execution: Execution | None = None) -> LegalHold:
    return LegalHold.objects.create(
        tenant_slug=tenant, execution_id=execution and execution.pk, reason="Case 7."
    )


def kinds_of_findings() -> list[str]:
    return [finding.kind for finding in verify().findings]


def test_whole_records_go_after_their_time_and_the_ledger_still_verifies(
    scripted: object, alice: Caller, charlie: Caller, a_year_later: None, settings: Any
) -> None:
    recorded(alice)
    recorded(charlie)
    settings.SANDBOX_KEEP_DAYS = {**settings.SANDBOX_KEEP_DAYS, "records": 0}
    alice.tenant.keep_records_days = 200
    alice.tenant.save()
    counted = set(Statistic.objects.values_list())

    erased = {(each.tenant, each.data) for each in apply_retention()}

    assert ("wonderland", "records") in erased
    assert ("elsewhere", "records") not in erased
    assert [each.tenant_slug for each in Execution.objects.all()] == ["elsewhere"]
    assert verify().is_intact, verify().findings
    assert apply_retention() == []
    recount()
    assert counted == set(Statistic.objects.values_list())


def test_records_stay_for_the_least_time_whatever_is_said(
    scripted: object, alice: Caller, a_year_later: None, settings: Any
) -> None:
    recorded(alice)
    settings.SANDBOX_RECORDS_FLOOR_DAYS = 366
    assert "records" not in {each.data for each in apply_retention()}
    assert Execution.objects.exists()


def test_what_is_put_on_hold_while_others_are_erased_stays(
    scripted: object, alice: Caller, a_year_later: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "AT_ONCE", 1)
    first, second, third = sorted((recorded(alice) for _ in range(3)), key=lambda each: each.pk)
    forget = retention.forget_code

    def hold_the_next(*said: Any, **more: Any) -> None:
        if not LegalHold.objects.exists():
            place(execution=second)
        forget(*said, **more)

    monkeypatch.setattr(retention, "forget_code", hold_the_next)
    apply_retention()
    assert list(Execution.objects.values_list("pk", flat=True)) == [second.pk]
    assert first.pk != third.pk


@pytest.mark.parametrize("whole", [True, False], ids=["tenant", "execution"])
def test_what_came_late_and_is_put_on_hold_while_others_are_erased_stays(
    scripted: object,
    alice: Caller,
    a_year_later: None,
    settings: Any,
    monkeypatch: pytest.MonkeyPatch,
    whole: bool,
) -> None:
    settings.SANDBOX_KEEP_DAYS = {**dict.fromkeys(retention.KINDS, 0), "output": 1}
    for execution in (recorded(alice), recorded(alice)):
        values = {"stdout": "late", "finished_at": timezone.now()}
        assert record_late(execution, Execution.Status.SUCCEEDED, values)
    save = LateResult.save

    def hold_the_other(late: LateResult, **how: Any) -> None:
        other = Execution.objects.exclude(pk=late.execution_id).get()
        place(execution=None if whole else other)
        save(late, **how)

    monkeypatch.setattr(LateResult, "save", hold_the_other)
    apply_retention()
    assert sorted(LateResult.objects.values_list("stdout", flat=True)) == ["", "late"]


@pytest.mark.parametrize("whole", [True, False], ids=["tenant", "execution"])
def test_what_is_held_is_not_erased_and_what_is_not_is(
    scripted: object, alice: Caller, charlie: Caller, a_year_later: None, whole: bool
) -> None:
    kept, gone = recorded(alice), recorded(charlie if whole else alice)
    place(execution=None if whole else kept)
    apply_retention()
    assert list(Execution.objects.values_list("pk", flat=True)) == [kept.pk]
    found = Execution.objects.get()
    assert (found.code, found.stdout, bool(found.artifacts.get().file)) == (CODE, "out", True)
    assert verify().is_intact

    # What the ledger says of the erasure excuses nobody who removes what was held.
    Execution.objects.filter(pk=kept.pk).update(code="", stdout="")
    assert kinds_of_findings() == ["altered record"]
    Execution.objects.filter(pk=kept.pk).delete()
    assert kinds_of_findings() == ["missing record"]
    assert gone.pk != kept.pk


def test_a_hold_that_vanished_from_its_table_still_holds(
    scripted: object, alice: Caller, a_year_later: None
) -> None:
    kept = recorded(alice)
    hold = place()
    with connection.cursor() as cursor:
        cursor.execute("DELETE FROM executions_legalhold")
    assert kinds_of_findings() == ["missing record"]
    forged = LedgerEntry.objects.order_by("-sequence").first()
    forged.pk, forged.sequence = None, forged.sequence + 1
    forged.statement = forged.statement.replace('"action":"created"', '"action":"deleted"')
    forged.save()
    apply_retention()
    assert Execution.objects.get().code == kept.code
    assert hold.reason


@pytest.mark.parametrize("how", ["a deletion of something else", "its entry relabelled"])
def test_no_trick_with_the_ledgers_columns_lifts_a_hold(
    scripted: object, alice: Caller, a_year_later: None, how: str
) -> None:
    """What an entry is of is said by what was signed, and not by the column beside it."""
    kept = recorded(alice)
    hold = place()
    entries = LedgerEntry.objects.all()
    entry = entries.get(kind="legal_hold")
    if how == "its entry relabelled":
        entries.filter(pk=entry.pk).update(kind="setting")
    else:
        Budget.objects.create(pk=hold.pk, limit=1)
        Budget.objects.filter(pk=hold.pk).delete()
        entries.filter(kind="setting", statement__contains='"action":"deleted"').update(
            kind="legal_hold"
        )
    with connection.cursor() as cursor:
        cursor.execute("DELETE FROM executions_legalhold")
    apply_retention()
    assert Execution.objects.get().code == kept.code


def test_an_erasure_covers_nothing_that_was_held_when_it_was_entered(
    scripted: object, alice: Caller, a_year_later: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where whoever entered it could not see the hold."""
    recorded(alice)
    place()
    monkeypatch.setattr(retention, "hold_scope", lambda *_: Held())
    monkeypatch.setattr(retention, "hold_scopes_in_ledger", lambda **_: {})
    apply_retention()
    assert not Execution.objects.exists()
    assert kinds_of_findings() == ["missing record"]


def test_one_administrator_places_a_hold_and_two_lift_it(
    scripted: object, alice: Caller, a_year_later: None
) -> None:
    ann, ben = administrator("ann"), administrator("ben")
    execution = recorded(alice)
    body = {"tenant_slug": "wonderland", "execution_id": str(execution.pk), "reason": "Case 7."}
    assert ann.post(ADD, body).status_code == 302
    hold = LegalHold.objects.get()
    entry = LedgerEntry.objects.get(kind="legal_hold").stated
    assert (entry["tenant_slug"], entry["execution"]) == ("wonderland", str(execution.pk))

    delete = reverse("admin:executions_legalhold_delete", args=[hold.pk])
    assert ann.post(delete, {"post": "yes"}).status_code == 302
    assert LegalHold.objects.exists()
    change = PendingChange.objects.get()
    approve = reverse("admin:providers_approve", args=[change.pk])
    ann.post(approve)
    assert LegalHold.objects.exists()
    apply_retention()
    assert Execution.objects.exists()
    ben.post(approve)
    assert not LegalHold.objects.exists()
    apply_retention()
    assert not Execution.objects.exists()
    assert verify().is_intact


def test_no_signed_in_person_lifts_a_hold_past_its_page(alice: Caller) -> None:
    hold = place()
    with acting_as(lambda: "user:ann"), pytest.raises(NeedsApproval):
        hold.delete()
    assert LegalHold.objects.exists()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"tenant_slug": "nowhere"}, "no such tenant"),
        ({"execution_id": str(uuid.uuid4())}, "does not have this execution"),
        ({"reason": ""}, "required"),
    ],
)
def test_a_hold_of_nothing_is_refused(alice: Caller, changed: dict[str, str], said: str) -> None:
    body = {"tenant_slug": "wonderland", "execution_id": "", "reason": "Case 7."} | changed
    answer = administrator("ann").post(ADD, body)
    assert (answer.status_code, said in answer.content.decode()) == (200, True)
    assert not LegalHold.objects.exists()


def test_a_held_tenant_is_not_removed_and_the_refusal_is_noted(alice: Caller) -> None:
    ann = administrator("ann")
    place()
    page = reverse("admin:executions_tenant_delete", args=[alice.tenant.pk])
    answer = ann.post(page, {"post": "yes"}, follow=True)
    assert "legal hold" in answer.content.decode()
    assert Tenant.objects.filter(slug="wonderland").exists()
    assert LogEntry.objects.get(change_message="Refused.").object_repr.startswith("wonderland")
    assert LedgerEntry.objects.filter(kind="admin_action").exists()
    with pytest.raises(OnHold):
        Tenant.objects.all().delete()


@pytest.mark.usefixtures("kept_here")
def test_files_of_a_held_tenants_session_stay_when_it_is_closed(alice: Caller) -> None:
    session = asleep(alice)
    hold = place()
    assert alice.client.delete(f"{URL}/{session['id']}").status_code == 204
    assert clean_ended() == 0
    assert Workspace.objects.get().rows.exists()
    hold.delete()
    assert clean_ended() == 1
    assert not Workspace.objects.exists()


@pytest.mark.usefixtures("kept_here")
def test_a_held_tenant_deletes_no_snapshot(alice: Caller) -> None:
    session = asleep(alice)
    taken = alice.client.post(f"{URL}/{session['id']}/snapshot").json()
    hold = place()
    url = f"/api/v1/snapshots/{taken['id']}"
    refused = alice.client.delete(url)
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "conflict")
    assert "legal hold" in refused.json()["error"]["message"]
    hold.delete()
    assert alice.client.delete(url).status_code == 204
