"""The journal: a result that cannot be recorded now is kept, recorded once, and never made up."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from io import StringIO
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from django.core.checks import run_checks
from django.core.management import call_command
from django.db import OperationalError, connection
from django.test import Client
from django.utils import timezone

from executions.capabilities.retention.service import apply_retention
from executions.capabilities.spending.models import Spending
from executions.kernel.database import DatabaseUnavailable
from executions.kernel.text import uuid7
from executions.ledger.models import LedgerEntry
from executions.ledger.verification import verify
from executions.runs import artifacts, journal, record, worker
from executions.runs.heartbeat import Heartbeat
from executions.runs.journal import Ended, keep, record_waiting, waiting_files, write
from executions.runs.models import Artifact, Execution, LateResult
from executions.runs.orphaned_runs import UnattendedRuns
from executions.runs.queue import claim_next
from executions.runs.record import close_record, error_changes
from providers.models import ProviderPrice
from providers.services import rotate_elsewhere
from providers.values import ArtifactFile
from tests.conftest import Caller
from tests.support.held import opened
from tests.support.own_journal import AFTER, ended
from tests.support.own_journal import own_journal as own_journal
from tests.support.running import run

pytestmark = pytest.mark.database

LOCKED = "The database is locked by another writer."


def closed_as_lost(execution: Execution) -> None:
    """As the sweeper does it, and whoever finds that a process has died."""
    lost = error_changes("SB009", "The process that ran it ended.")
    assert close_record(execution, Execution.Status.ERROR, lost)


def test_what_is_kept_is_recorded_once_with_its_files_its_cost_and_when_it_ended(
    alice: Caller,
) -> None:
    ProviderPrice.objects.create(provider_id="scripted", per_second=Decimal("0.5"))
    execution = opened(alice)
    files = artifacts.store_files(execution.pk, [ArtifactFile("a.txt", "text/plain", b"bytes")])
    away = keep(replace(ended(execution), artifacts=files), LOCKED)
    assert (away.ran, away.record_id, away.kept) == (True, execution.pk, True)
    [kept] = waiting_files()
    copy = kept.read_bytes()

    assert (record_waiting(), waiting_files()) == (1, [])

    recorded = Execution.objects.get(pk=execution.pk)
    assert (recorded.status, recorded.stdout) == ("succeeded", "kept\n")
    assert (recorded.finished_at, recorded.cost) == (AFTER, Decimal("0.25050000"))
    assert recorded.artifacts.get().file.read() == b"bytes"
    assert Spending.objects.get(tenant_slug="wonderland").executions == 1

    # A process that was killed before it removed the file, or a commit that was not answered.
    kept.write_bytes(copy)
    assert record_waiting() == 1
    assert Spending.objects.get(tenant_slug="wonderland").executions == 1
    assert not LateResult.objects.exists()
    assert Artifact.objects.get().file.read() == b"bytes"
    assert LedgerEntry.objects.filter(execution_id=execution.pk).count() == 1
    assert verify().is_intact


def test_a_result_that_comes_after_its_record_was_closed_is_attached_and_changes_nothing(
    alice: Caller, bob: Caller, charlie: Caller, admin_client: Client
) -> None:
    execution = opened(alice)
    files = artifacts.store_files(execution.pk, [ArtifactFile("a.txt", "text/plain", b"bytes")])
    write(replace(ended(execution, stdout="<b>late</b>"), artifacts=files))
    closed_as_lost(execution)
    path = f"/api/v1/executions/{execution.pk}"
    before = alice.client.get(path).json()
    assert before["late_result"] is None

    assert record_waiting() == 1

    after = alice.client.get(path).json()
    late = after.pop("late_result")
    assert after == {name: before[name] for name in before if name != "late_result"}
    assert (late["status"], late["stdout"], late["exit_code"]) == ("succeeded", "<b>late</b>", 0)
    assert late["artifacts"][0]["name"] == "a.txt"
    assert not list((journal.settings.DATA_DIR / "artifacts").rglob("0"))
    assert bob.client.get(path).json()["late_result"] == late
    assert charlie.client.get(path).status_code == 404
    page = admin_client.get(f"/admin/executions/execution/{execution.pk}/change/")
    assert "&lt;b&gt;late&lt;/b&gt;" in page.content.decode()
    assert LedgerEntry.objects.filter(kind="late_result").count() == 1
    assert verify().is_intact
    LateResult.objects.update(stdout="forged")
    assert not verify().is_intact


def test_a_run_that_ends_after_its_record_was_closed_is_attached_too(
    scripted: object, alice: Caller
) -> None:
    closes = (
        "from executions.models import Execution\n"
        "from executions.runs.record import close_record, error_changes\n"
        "close_record(Execution.objects.get(), 'error', error_changes('SB009', 'lost'))\n"
        "answer = ExecutionResult('came late', '', 0, 0.0)"
    )
    answer = run(alice, closes)
    assert answer.status_code == 503
    late = LateResult.objects.get(execution=answer.json()["id"])
    assert (late.status, late.stdout) == ("succeeded", "came late")
    assert Execution.objects.get().status == "error"
    assert verify().is_intact


def test_what_waits_is_not_closed_as_something_that_nobody_runs(
    lease: Heartbeat, alice: Caller
) -> None:
    lease.take()
    kept, left = opened(alice), opened(alice)
    write(ended(kept))
    assert UnattendedRuns().close(lease.mine(), seconds=0) == 1
    assert Execution.objects.get(finished_at=None) == kept
    assert record_waiting() == 1
    assert Execution.objects.get(pk=kept.pk).status == "succeeded"
    assert Execution.objects.get(pk=left.pk).status == "error"


def test_erasing_output_erases_what_came_late(alice: Caller, settings: Any) -> None:
    execution = opened(alice)
    write(ended(execution))
    closed_as_lost(execution)
    record_waiting()
    old = timezone.now() - timedelta(days=3)
    settings.SANDBOX_KEEP_DAYS = {"code": 0, "output": 1, "artifacts": 0, "records": 0}
    apply_retention()
    assert LateResult.objects.get().stdout == "kept\n"
    LateResult.objects.all().delete()
    older = Execution(pk=UUID(int=1), tenant=alice.tenant, tenant_slug="wonderland")
    older.code_hash, older.language, older.timeout = "", "python", 1
    older.status, older.created_at, older.deadline = "running", old, old
    older.save(force_insert=True)
    write(ended(older))
    closed_as_lost(older)
    record_waiting()
    apply_retention()
    assert LateResult.objects.get().stdout == ""
    assert verify().is_intact


def test_what_cannot_be_opened_is_set_aside_with_an_alert_and_kept(
    alice: Caller, settings: Any, own_journal: Path, caplog: pytest.LogCaptureFixture
) -> None:
    changed, exchanged, other = opened(alice), opened(alice), opened(alice)
    for execution in (changed, exchanged, other):
        write(ended(execution))
    file = own_journal / f"{changed.pk.hex}.ended"
    sealed = file.read_bytes()
    file.write_bytes(sealed[:-1] + bytes([sealed[-1] ^ 1]))
    (own_journal / f"{other.pk.hex}.ended").replace(own_journal / f"{exchanged.pk.hex}.ended")

    assert record_waiting() == 0

    assert waiting_files() == []
    assert sorted(path.suffix for path in own_journal.iterdir()) == [".aside", ".aside"]
    alerts = [each for each in caplog.records if getattr(each, "alert", "") == "journal_set_aside"]
    assert len(alerts) == 2
    assert record_waiting() == 0
    told = [each for each in caplog.records if each.name == alerts[0].name]
    assert len(told) == len(alerts)
    assert {each.id for each in run_checks()} >= {"executions.W001"}
    assert not Execution.objects.filter(finished_at__isnull=False).exists()


def test_what_cannot_be_read_for_a_while_waits(
    alice: Caller, own_journal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    execution = opened(alice)
    write(ended(execution))

    def unread(path: Path) -> Ended:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(journal, "read", unread)
        assert record_waiting() == 0
    assert (record_waiting(), waiting_files()) == (1, [])


def test_a_key_that_is_put_back_opens_what_was_set_aside(alice: Caller, settings: Any) -> None:
    execution, keys = opened(alice), settings.FERNET_KEYS
    write(ended(execution))
    settings.FERNET_KEYS = ["another key that is as long as a key should be, or longer"]
    assert record_waiting() == 0
    settings.FERNET_KEYS = keys
    said = StringIO()
    call_command("record_journal", stdout=said)
    assert "0 recorded, 0 waiting, 1 set aside" in said.getvalue()
    call_command("record_journal", "--all", stdout=said)
    assert "1 recorded, 0 waiting, 0 set aside" in said.getvalue()
    assert Execution.objects.get(pk=execution.pk).status == "succeeded"


def test_a_result_of_an_execution_that_the_database_does_not_know_is_set_aside(
    db: None, own_journal: Path
) -> None:
    write(ended(Execution(pk=uuid7())))
    write(replace(ended(Execution(pk=uuid7())), ran=False))
    assert record_waiting() == 1
    assert [path.suffix for path in own_journal.iterdir()] == [".aside"]


def test_a_journal_that_holds_enough_loses_the_result_and_says_so(
    alice: Caller, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    execution = opened(alice)
    monkeypatch.setattr(journal, "MOST_BYTES", 100)
    away = keep(ended(execution), LOCKED)
    assert (away.ran, away.kept, waiting_files()) == (True, False, [])
    assert "its result is lost" in away.message
    assert any(getattr(each, "alert", "") == "result_lost" for each in caplog.records)
    assert record_waiting() == 1
    recorded = Execution.objects.get(pk=execution.pk)
    assert (recorded.status, recorded.error_code, recorded.stdout) == ("error", "SB009", "")
    assert (recorded.retryable, recorded.error_message) == (False, away.message)
    assert recorded.finished_at == AFTER
    assert verify().is_intact
    assert record_waiting() == 0


def test_nothing_is_removed_while_the_database_is_still_away(
    alice: Caller, caplog: pytest.LogCaptureFixture
) -> None:
    write(ended(opened(alice)))
    caplog.set_level(logging.INFO)

    def away(execute: Any, *arguments: Any) -> Any:
        raise OperationalError("the server closed the connection")

    with connection.execute_wrapper(away), pytest.raises(OperationalError):
        record_waiting()
    assert len(waiting_files()) == 1
    assert record_waiting() == 1


@pytest.mark.django_db(transaction=True)
def test_a_commit_that_was_not_answered_runs_nothing_and_frees_the_key(
    scripted: Callable[[], list[str]], alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row is there, and whoever asked for it was told that nothing was run."""
    real = record.tenant_lock

    class Unanswered:
        def __init__(self, slug: str, **options: Any) -> None:
            self.inner = real(slug, **options)

        def __enter__(self) -> None:
            self.inner.__enter__()

        def __exit__(self, *raised: Any) -> None:
            self.inner.__exit__(*raised)
            raise OperationalError("the connection was closed")

    with monkeypatch.context() as patch:
        patch.setattr(record, "tenant_lock", Unanswered)
        told = run(alice, "pass", idempotency_key="once")
    assert (told.status_code, told.json()["error"]["ran"]) == (503, False)
    assert Execution.objects.get(pk=told.json()["id"]).status == "running"
    assert scripted() == []

    assert record_waiting() == 1
    left = Execution.objects.get(pk=told.json()["id"])
    assert (left.status, left.error_code, left.retryable) == ("error", "SB009", True)
    assert run(alice, "pass", idempotency_key="once").status_code == 200
    assert verify().is_intact


def test_a_worker_that_cannot_read_what_to_run_ends_the_row_as_not_run(
    scripted: Callable[[], list[str]], alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened(alice, mode="async")
    execution = claim_next()
    assert execution is not None

    def away(*_: Any) -> Any:
        raise OperationalError("the server closed the connection")

    with monkeypatch.context() as patch:
        patch.setattr(worker, "_steps_of", away)
        patch.setattr(journal, "reject", away)
        outcome = worker.run_claimed(execution)
    assert isinstance(outcome.error, DatabaseUnavailable)
    assert (outcome.error.ran, outcome.error.kept, scripted()) == (False, True, [])
    assert record_waiting() == 1
    assert Execution.objects.get().retryable is True


def test_a_client_of_agent_sandbox_is_told_that_it_ran(
    kept_here: None, alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: Any) -> Any:
        raise OperationalError("the server closed the connection")

    with monkeypatch.context() as patch:
        patch.setattr(journal, "close_record", away)
        answer = alice.client.post("/v1/execute", {"user_id": "u", "code": "pass"})
    assert answer.status_code == 503
    body = answer.json()
    assert set(body) == {"detail", "error", "ran", "id"}
    assert (body["ran"], body["id"]) == (True, answer["X-Execution-ID"])
    assert int(answer["Retry-After"]) >= 1
    assert record_waiting() == 1
    assert Execution.objects.get(pk=body["id"]).status == "succeeded"


def test_a_replay_that_could_not_be_recorded_is_told_by_a_page(
    scripted: object, alice: Caller, admin_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    replayed = run(alice, "pass").json()["id"]

    def away(*_: Any) -> Any:
        raise OperationalError("the server closed the connection")

    with monkeypatch.context() as patch:
        patch.setattr(journal, "close_record", away)
        page = admin_client.post(
            f"/admin/executions/execution/{replayed}/replay", {"provider": "scripted"}
        )
    assert page.status_code == 503
    assert "The code ran and ended as succeeded" in page.content.decode()
    assert record_waiting() == 1
    assert Execution.objects.get(replay_of=replayed).status == "succeeded"


def test_rotating_the_keys_reaches_what_waits(alice: Caller, settings: Any) -> None:
    execution, old = opened(alice), settings.FERNET_KEYS
    write(ended(execution))
    new = ["a new key that is as long as a key should be, or longer"]
    settings.FERNET_KEYS = [*new, *old]
    for expected in (1, 0):
        (result,) = [each for each in rotate_elsewhere() if "journal" in each.column]
        assert (result.rotated, result.failed) == (expected, [])
    settings.FERNET_KEYS = new
    (path,) = waiting_files()
    assert journal.read(path).execution_id == execution.pk
