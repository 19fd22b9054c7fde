"""What a process took from the queue and did not hand over goes back there when the process dies."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from django.utils import timezone

from executions.ledger.models import LedgerEntry
from executions.ledger.verification import verify
from executions.runs import heartbeat, journal, payloads
from executions.runs.heartbeat import OwnershipLost
from executions.runs.journal import Ended, write
from executions.runs.models import Execution, Process
from executions.runs.orphaned_runs import end_stale_executions, mark_lost, requeue_or_fail
from executions.runs.queue import MAX_REQUEUES, claim, claim_next, mark_dispatched, move, requeue
from executions.runs.record import error_changes, reject
from providers.errors import ProviderUnavailable
from providers.values import InputFile
from tests.conftest import Caller
from tests.support.held import opened
from tests.support.running import run_queued

pytestmark = pytest.mark.database

FILES = (InputFile("large", bytes(100_000)),)


@pytest.fixture
def folder(tmp_path: Path, settings: Any) -> Path:
    settings.DATA_DIR = tmp_path
    return tmp_path / "queue"


@pytest.fixture
def taken(alice: Caller, folder: Path, lease: heartbeat.Heartbeat) -> Execution:
    """By a process that is dead now, while this one is another."""
    lease.take()
    opened(alice, "async", files=FILES)
    execution = claim_next()
    assert execution is not None
    Process.objects.update(ended_at=timezone.now())
    lease.stop()
    lease.take()
    return execution


def test_it_is_queued_again_and_run_once(
    scripted: Callable[[], list[str]], taken: Execution
) -> None:
    before = taken.created_at
    assert requeue_or_fail(Execution.objects.get(), "lost")
    waiting = Execution.objects.get()
    assert (waiting.status, waiting.process_id, waiting.started_at) == ("queued", None, None)
    assert waiting.created_at == before < waiting.deadline
    assert not LedgerEntry.objects.filter(execution_id=taken.pk).exists()

    outcome = run_queued()

    assert outcome is not None
    assert (outcome.execution.pk, outcome.execution.status) == (taken.pk, "succeeded")
    assert [call.split()[0] for call in scripted()].count("execute") == 1
    assert LedgerEntry.objects.filter(execution_id=taken.pk).count() == 1
    assert run_queued() is None


@pytest.mark.django_db(transaction=True)
def test_who_comes_too_late_to_close_it_leaves_its_request(taken: Execution, folder: Path) -> None:
    late = Execution.objects.defer("pending").select_related("process").get()
    assert requeue(Execution.objects.get())
    assert not mark_lost(late, "lost")
    [kept] = folder.iterdir()
    assert kept.name == taken.pk.hex


def test_who_had_it_before_neither_runs_nor_ends_it(taken: Execution) -> None:
    assert requeue(Execution.objects.get())
    again = claim(taken.pk)
    assert again is not None
    assert again.process_id != taken.process_id

    with pytest.raises(OwnershipLost):
        mark_dispatched(taken)
    reject(taken, ProviderUnavailable("too late"))

    assert Execution.objects.get().is_open
    mark_dispatched(again)
    assert Execution.objects.get().status == "running"


def test_a_claim_is_not_the_next_one_of_the_same_process(alice: Caller) -> None:
    first = claim(opened(alice, "async").pk)
    assert first is not None
    assert requeue(first)
    second = claim(first.pk)
    assert second is not None
    assert second.process_id == first.process_id

    with pytest.raises(OwnershipLost):
        mark_dispatched(first)
    mark_dispatched(second)


def test_what_the_journal_says_late_of_an_attempt_does_not_end_the_next(taken: Execution) -> None:
    values = {
        **error_changes("SB009", "away"),
        "retryable": True,
        "finished_at": timezone.now(),
        "cost": None,
    }
    ended = Ended(taken.pk, Execution.Status.ERROR, values, ran=False, owner=taken.process_id)
    write(ended)
    assert requeue(Execution.objects.get())
    again = claim(taken.pk)
    assert again is not None

    journal.record_waiting()

    assert Execution.objects.get().status == "running"
    mark_dispatched(again)


def test_what_was_handed_over_never_goes_back(taken: Execution) -> None:
    mark_dispatched(taken)

    assert not requeue(Execution.objects.get())
    assert requeue_or_fail(Execution.objects.get(), "lost")

    record = Execution.objects.get()
    assert (record.status, record.error_code, record.retryable) == ("error", "SB009", False)


def test_what_somebody_waited_for_does_not_go_back(alice: Caller) -> None:
    execution = opened(alice)

    assert not requeue(execution)


def test_what_ends_whoever_takes_it_is_ended_itself(alice: Caller) -> None:
    opened(alice, "async")
    for _ in range(MAX_REQUEUES):
        execution = claim_next()
        assert execution is not None
        assert requeue(execution)
    execution = claim_next()
    assert execution is not None

    assert requeue_or_fail(execution, "lost")

    record = Execution.objects.get()
    assert (record.status, record.error_code, record.pending) == ("error", "SB009", None)


def test_one_that_was_cut_off_says_where_it_ran(taken: Execution) -> None:
    mark_dispatched(taken, provider="first", config_version=3, runtime="runc")
    move(taken, provider="second")
    shown = Execution.objects.get()
    assert (shown.provider, shown.config_version, shown.runtime) == ("second", 3, "runc")

    assert requeue_or_fail(shown, "lost")

    record = Execution.objects.get()
    assert (record.status, record.provider, record.runtime) == ("error", "second", "runc")
    assert verify().is_intact


def test_who_read_the_row_before_it_said_where_closes_it_as_the_ledger_has_it(
    taken: Execution,
) -> None:
    shown = Execution.objects.get()
    mark_dispatched(taken, provider="first", isolation="gvisor")
    move(Execution(pk=taken.pk, process_id=None), provider="nobody's")

    assert mark_lost(shown, "lost")

    record = Execution.objects.get()
    assert (record.provider, record.isolation) == ("", "")
    assert verify().is_intact


def test_a_large_request_is_kept_until_it_is_handed_over(taken: Execution, folder: Path) -> None:
    (file,) = folder.iterdir()
    os.utime(file, (0, 0))
    end_stale_executions()
    assert file.exists()
    assert requeue(Execution.objects.get())

    again = claim(taken.pk)
    assert again is not None
    assert payloads.read(again)["files"]
    mark_dispatched(again)

    assert not file.exists()
