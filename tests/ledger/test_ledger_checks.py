"""Verifying the ledger from the admin: who may, one at a time, what is shown of it, who is told."""

from __future__ import annotations

import threading
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from django.contrib.admin.models import LogEntry
from django.db import IntegrityError, OperationalError, connection, transaction
from django.test import Client
from django.utils import timezone

from executions.capabilities.alerts.models import Alert
from executions.capabilities.alerts.rules import RULES
from executions.capabilities.alerts.service import watch
from executions.kernel import background
from executions.ledger import marks
from executions.ledger.append import append
from executions.ledger.checkpoints import write_checkpoint
from executions.ledger.models import LedgerCheck, LedgerEntry
from executions.ledger.trust import trusted_keys
from executions.ledger.verification import verify, verify_entries
from executions.runs import heartbeat, ledger_checks
from executions.runs.ledger_checks import ask, carry_out, close_abandoned, start_waiting
from executions.tenants.service import AUDITOR
from tests.conftest import Caller
from tests.support.ended_runs import ended
from tests.support.roles import member
from tests.support.sessions import wait_for

pytestmark = [pytest.mark.django_db, pytest.mark.database]

START, STATE = "/admin/executions/ledgercheck/start/", "/admin/executions/ledgercheck/state/"


@pytest.fixture(autouse=True)
def _has_a_lease(lease: heartbeat.Heartbeat, _django_db_helper: None) -> None:
    """As a worker has. In a transaction none is taken by itself."""
    lease.take()


def changed_entry() -> None:
    with connection.cursor() as cursor:
        table = LedgerEntry._meta.db_table
        cursor.execute(f"UPDATE {table} SET statement = '{{}}' WHERE sequence = 1")


def test_an_auditor_has_it_verified_and_sees_what_came_of_it(alice: Caller) -> None:
    ended(alice)
    auditor = member(AUDITOR)
    assert "Not verified yet." in auditor.get(STATE).content.decode()

    assert auditor.post(START).status_code == 302
    noted = LogEntry.objects.get(content_type__model="ledgercheck")
    assert (noted.user.username, noted.change_message) == (
        "auditor",
        "Started ledger verification.",
    )
    assert LedgerEntry.objects.filter(kind="admin_action").exists()
    waiting = auditor.get(STATE).content.decode()
    assert "Verification queued" in waiting
    assert "every 2s" in waiting
    assert "<button" not in waiting

    check = carry_out()
    assert check is not None
    assert check.state == "intact"
    assert check.executions == 1
    shown = auditor.get(STATE).content.decode()
    assert "Verified: no problems found" in shown
    assert "by auditor" in shown
    assert "every 2s" not in shown
    assert auditor.get("/admin/executions/ledgercheck/").status_code == 200
    assert auditor.get(f"/admin/executions/ledgercheck/{check.pk}/change/").status_code == 200


def test_who_may_not_look_at_the_ledger_neither_sees_nor_starts_one(
    django_user_model: Any, admin_user: Any
) -> None:
    django_user_model.objects.create_user("nobody", is_staff=True)
    client = Client()
    client.force_login(django_user_model.objects.get(username="nobody"))
    assert client.get(STATE).status_code == 403
    assert client.post(START).status_code == 403
    forged = Client(enforce_csrf_checks=True)
    forged.force_login(admin_user)
    assert forged.post(START).status_code == 403
    assert forged.get(START).status_code == 403
    assert not LedgerCheck.objects.exists()


def test_of_two_presses_one_counts_and_of_two_hosts_one_reads(
    monkeypatch: pytest.MonkeyPatch, admin_client: Client
) -> None:
    assert ask("ada") is not None
    assert ask("ben") is None
    again = admin_client.post(START, follow=True).content.decode()
    assert "A verification is already running." in again
    assert LedgerCheck.objects.count() == 1
    assert not LogEntry.objects.filter(content_type__model="ledgercheck").exists()

    seen: list[object] = []
    verify = ledger_checks.verify

    def while_another_host_looks(**options: Any) -> Any:
        seen.append(carry_out())
        return verify(**options)

    monkeypatch.setattr(ledger_checks, "verify", while_another_host_looks)
    assert carry_out() is not None
    assert seen == [None]


def test_a_row_that_is_open_without_its_key_is_refused() -> None:
    with pytest.raises(IntegrityError), transaction.atomic():
        LedgerCheck.objects.create(asked_by="ada", asked_at=timezone.now())


def test_what_a_dead_process_read_is_closed_and_may_be_asked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ask("ada")
    LedgerCheck.objects.update(state="running", process_id=uuid4())
    assert close_abandoned() == 1
    assert "has ended" in LedgerCheck.objects.get().problem
    assert ask("ada") is not None

    # Whoever was taken for dead and lives writes no outcome over it.
    monkeypatch.setattr(ledger_checks, "TELL_SECONDS", 0.0)
    monkeypatch.setattr(
        ledger_checks,
        "verify",
        lambda report, **_: (
            LedgerCheck.objects.filter(state="running").update(
                state="failed", active_key=None, finished_at=timezone.now()
            ),
            report(ledger_checks.Verification(entries=7)),
        ),
    )
    check = carry_out()
    assert check is not None
    assert (check.state, check.entries) == ("failed", 0)


def test_progress_is_stored_while_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        append("export", str(number), {})
    monkeypatch.setattr(ledger_checks, "TELL_SECONDS", 0.0)
    monkeypatch.setattr("executions.ledger.verification.CHUNK", 1)
    seen = []
    telling = ledger_checks._Telling.__call__

    def told(self: Any, found: Any) -> None:
        telling(self, found)
        seen.append(LedgerCheck.objects.values_list("entries", "state").get())

    monkeypatch.setattr(ledger_checks._Telling, "__call__", told)
    ask("ada")
    carry_out()
    assert [entries for entries, _ in seen][:3] == [1, 2, 3]
    assert {state for _, state in seen} == {"running"}


def test_an_altered_entry_is_found_shown_and_opens_an_alert(admin_client: Client) -> None:
    append("export", "<b>x</b>", {})
    changed_entry()
    ask("ada")
    check = carry_out()
    assert check is not None
    assert check.state == "not_intact"
    assert check.findings
    assert "Problems found" in admin_client.get(STATE).content.decode()
    front = admin_client.get("/admin/").content.decode()
    assert "Ledger problems found" in front

    (rule,) = (rule for rule in RULES if rule.name == "ledger_findings")
    assert [each.subject for each in rule.found(timezone.now())] == ["ledger"]


def test_a_broken_reading_says_so_without_the_rows_text(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(**_: Any) -> None:
        raise ValueError("a row says secret")

    monkeypatch.setattr(ledger_checks, "verify", broken)
    ask("ada")
    with pytest.raises(ValueError, match="secret"):
        carry_out()
    check = LedgerCheck.objects.get()
    assert (check.state, check.problem) == (
        "failed",
        "ValueError; see the server's log.",
    )


def begin() -> None:
    """Once the thread of the test before is gone."""
    wait_for(lambda: "ledger check" not in background._going_on)
    start_waiting()


@pytest.mark.django_db(transaction=True)
def test_a_worker_reads_in_a_thread_what_waits() -> None:
    ask("ada")
    begin()
    wait_for(lambda: not LedgerCheck.objects.get().is_open)
    assert LedgerCheck.objects.get().state == "intact"


def test_who_can_only_write_to_the_database_can_have_no_mark_made(
    alice: Caller, settings: Any, tmp_path: Path
) -> None:
    settings.LEDGER_CHECKPOINTS = str(tmp_path / "checkpoints")
    ended(alice)
    write_checkpoint(verify_entries)
    LedgerCheck.objects.create(active_key=LedgerCheck.ONE, asked_by="", asked_at=timezone.now())
    check = carry_out()
    assert check is not None
    assert check.state == "intact"
    assert marks.newest(trusted_keys()) is None


@pytest.mark.django_db(transaction=True)
def test_what_this_process_could_not_close_is_closed_and_may_be_asked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def away(*_: object, **more: object) -> int:
        raise OperationalError("the database is away")

    ask("ada")
    with monkeypatch.context() as patched:
        patched.setattr(ledger_checks, "_end", away)
        with pytest.raises(OperationalError):
            carry_out()
    assert LedgerCheck.objects.get().state == "running"
    assert ask("ben") is None

    begin()
    wait_for(lambda: not LedgerCheck.objects.get().is_open)
    check = LedgerCheck.objects.get()
    assert (check.state, "could not be stored" in check.problem) == ("failed", True)
    assert ask("ben") is not None


@pytest.mark.django_db(transaction=True)
def test_what_this_process_still_reads_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    may_end = threading.Event()
    verify = ledger_checks.verify

    def slow(**options: Any) -> Any:
        may_end.wait(60)
        return verify(**options)

    monkeypatch.setattr(ledger_checks, "verify", slow)
    ask("ada")
    begin()
    wait_for(lambda: LedgerCheck.objects.get().state == "running")
    start_waiting()
    may_end.set()
    wait_for(lambda: not LedgerCheck.objects.get().is_open)
    assert LedgerCheck.objects.get().state == "intact"


def test_an_old_checkpoint_opens_an_alert(settings: Any, tmp_path: Path) -> None:
    settings.LEDGER_CHECKPOINTS = str(tmp_path / "checkpoints")
    append("export", "1", {})
    write_checkpoint(verify_entries)
    watch(timezone.now() + timedelta(hours=4))
    assert not Alert.objects.filter(rule="checkpoint_old").exists()

    append("export", "2", {})
    watch(timezone.now() + timedelta(hours=2))
    assert not Alert.objects.filter(rule="checkpoint_old").exists()
    watch(timezone.now() + timedelta(hours=4))
    assert Alert.objects.filter(rule="checkpoint_old", state="open").exists()


def test_the_page_shows_up_to_where_a_complete_verification_found_nothing(
    alice: Caller, settings: Any, tmp_path: Path, admin_client: Client
) -> None:
    settings.LEDGER_CHECKPOINTS = str(tmp_path / "checkpoints")
    ended(alice)
    # In a transaction of a test no commit writes it.
    write_checkpoint(verify_entries)
    assert verify().is_intact
    newest = LedgerEntry.objects.latest("sequence").sequence
    shown = admin_client.get(STATE).content.decode()
    assert "Not verified here yet." in shown
    assert "Verified by <code>manage.py verify_ledger</code>, no problems found" in shown
    assert f"up to entry {newest}." in shown
