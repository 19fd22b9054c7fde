"""Every process has one lease, which what it runs names; it looks again before code is run."""

from __future__ import annotations

import logging
import math
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from django.db import OperationalError, connection, connections
from django.db.models.functions import Now

from executions.runs import active_runs, heartbeat
from executions.runs.heartbeat import Heartbeat, PeriodicStep
from executions.runs.models import Execution, Process
from executions.runs.orphaned_runs import UnattendedRuns
from executions.runs.queue import claim_next
from executions.runs.requests import Caller as By
from executions.runs.requests import ExecutionRequest
from executions.runs.service import Attempt, execute_sync
from providers import draining
from providers.manager import Lease, manager
from tests.conftest import Caller
from tests.support.held import ended, opened
from tests.support.running import run
from tests.support.waiting import wait_until

pytestmark = pytest.mark.database


def taken(process_id: Any) -> None:
    """What a watcher does who saw no sign of life."""
    assert Process.objects.filter(pk=process_id, ended_at=None).update(ended_at=Now()) == 1


@pytest.mark.django_db(transaction=True)
def test_what_runs_names_its_process_and_what_has_ended_names_none(
    scripted: object, alice: Caller, settings: Any
) -> None:
    settings.INSTANCE = "web-1"
    code = (
        "from executions.models import Execution\n"
        "answer = ExecutionResult(str(Execution.objects.get().process), '', 0, 0.0)"
    )

    said = run(alice, code).json()["stdout"]

    assert said == f"command, instance web-1, pid {os.getpid()}"
    assert Execution.objects.get().process is None
    run(alice, "pass")
    assert Process.objects.count() == 1


@pytest.mark.django_db(transaction=True)
def test_what_is_queued_is_nobodys_until_it_is_claimed(lease: Heartbeat, alice: Caller) -> None:
    opened(alice, "async")
    assert Execution.objects.get().process is None

    claimed = claim_next()

    assert claimed is not None
    assert claimed.process_id == Execution.objects.get().process_id == lease.mine()


def test_none_is_taken_in_a_transaction_that_may_be_rolled_back(alice: Caller) -> None:
    assert opened(alice).process_id is None
    assert not Process.objects.exists()


@pytest.mark.django_db(transaction=True)
def test_a_process_takes_its_lease_once_whatever_runs_at_the_same_time(lease: Heartbeat) -> None:
    found = []

    def take() -> None:
        found.append(lease.mine())
        connections.close_all()

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(found) == 8
    assert set(found) == {Process.objects.get().pk}


@pytest.mark.django_db(transaction=True)
def test_a_forked_process_has_no_part_in_its_parents_lease() -> None:
    mine = heartbeat.current_process_id()
    child = os.fork()
    if child == 0:
        # The connection is the parent's: it is put aside unclosed, and the end is at once.
        kept, connection.connection = connection.connection, None
        other = heartbeat._heartbeat._lease is None and heartbeat.current_process_id()
        os._exit(0 if other and other != mine and kept else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

    assert heartbeat.current_process_id() == mine
    assert Process.objects.count() == 2


@pytest.mark.django_db
def test_a_lease_renewed_just_now_is_not_looked_up(
    lease: Heartbeat, alice: Caller, django_assert_num_queries: Any
) -> None:
    lease.take()
    execution = opened(alice)

    with django_assert_num_queries(0):
        lease.confirm(execution)


@pytest.mark.django_db
def test_after_a_while_without_renewal_the_row_is_read_again(
    lease: Heartbeat, alice: Caller, django_assert_num_queries: Any
) -> None:
    lease.take()
    execution, closed, of_a_dead = opened(alice), opened(alice), opened(alice)
    lease._lease.renewed_at -= heartbeat.FRESH_SECONDS  # type: ignore[union-attr]

    with django_assert_num_queries(1):
        lease.confirm(execution)
    ended(closed)
    closed.process_id = lease.mine()
    with pytest.raises(heartbeat.OwnershipLost):
        lease.confirm(closed)
    taken(lease.mine())
    with pytest.raises(heartbeat.OwnershipLost):
        lease.confirm(of_a_dead)


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("is_closed", [False, True])
def test_code_is_not_handed_over_once_the_lease_was_taken(
    lease: Heartbeat, scripted: Callable[[], list[str]], alice: Caller, is_closed: bool
) -> None:
    @contextmanager
    def slow(*, wait: bool = True) -> Iterator[Lease]:
        """As if the process had been stopped while it waited for a sandbox."""
        if lease._lease is None or not active_runs.count():
            # Asked what it can run.
            with manager.lease(wait=wait) as lent:
                yield lent
            return
        lease._lease.renewed_at = -math.inf
        taken(lease.mine())
        if is_closed:
            ended(Execution.objects.get())
        with manager.lease(wait=wait) as lent:
            yield lent

    outcome = execute_sync(ExecutionRequest("pass"), By.of_key(alice.api_key), route=slow)

    assert not any(event.startswith("execute") for event in scripted())
    assert any(event.startswith("destroy") for event in scripted())
    assert outcome.error is not None
    assert (outcome.error.code, outcome.error.started) == ("SB009", False)
    record = Execution.objects.get()
    expected = ("succeeded", False) if is_closed else ("error", True)
    assert (record.status, record.retryable) == expected


@pytest.mark.django_db(transaction=True)
def test_a_process_that_lost_its_lease_ends_its_runs_and_takes_another(
    lease: Heartbeat, local_active: None, alice: Caller, caplog: pytest.LogCaptureFixture
) -> None:
    answers: list[Any] = []

    def call() -> None:
        answers.append(
            run(alice, "import time; print('!', flush=True); time.sleep(60)", timeout=90)
        )
        connections.close_all()

    first = lease.mine()
    caller = threading.Thread(target=call)
    caller.start()
    wait_until(lambda: any(run.handed_over for run in active_runs.runs()), seconds=60)
    taken(first)

    with caplog.at_level(logging.ERROR):
        lease.renew()
    caller.join(60)

    assert answers[0].status_code == 503
    assert "lease" in caplog.text
    record = Execution.objects.get()
    assert (record.status, record.error_code, record.retryable) == ("error", "SB009", False)
    assert lease.mine() not in (None, first)
    assert run(alice, "print('well')").json()["stdout"] == "well\n"


@pytest.mark.django_db(transaction=True)
def test_a_process_that_ends_while_its_lease_is_taken_takes_no_other(
    lease: Heartbeat, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease.take()
    taken(lease.mine())
    # What is ended for it is the last that the process has to do.
    ends = SimpleNamespace(execution_id=None, lose=lease.end)
    monkeypatch.setattr(active_runs, "runs", lambda: [ends])
    lease.renew()
    assert not Process.objects.filter(ended_at=None).exists()


@pytest.mark.django_db(transaction=True)
def test_a_lease_is_given_back_when_the_last_record_is_closed(
    lease: Heartbeat, alice: Caller
) -> None:
    execution = opened(alice)

    assert lease.end() is False
    assert Process.objects.get().ended_at is None
    ended(execution)
    assert lease.end() is True

    assert Process.objects.get().ended_at is not None
    assert lease.end() is True
    opened(alice)
    assert Process.objects.filter(ended_at=None).count() == 1


@pytest.mark.django_db
def test_what_nothing_here_runs_any_more_is_closed_by_its_own_process(
    lease: Heartbeat, alice: Caller
) -> None:
    lease.take()
    lost, running = opened(alice), opened(alice)
    attempt = Attempt(running, ExecutionRequest("pass"), 0.0, 0.0)

    unattended = UnattendedRuns()
    with active_runs.track(attempt):
        assert unattended.close(lease.mine(), seconds=60) == 0
        assert unattended.close(lease.mine(), seconds=0) == 1

    lost.refresh_from_db()
    assert (lost.status, lost.error_code, lost.retryable) == ("error", "SB009", False)
    assert Execution.objects.get(finished_at=None) == running
    assert unattended.close(lease.mine(), seconds=0) == 1


def test_the_service_registers_its_periodic_steps_in_this_order() -> None:
    steps = heartbeat.registered_steps()

    found = [(step.name, step.seconds) for step in steps]
    assert found == [
        ("signals", 0.0),
        ("deaths", 0.0),
        ("unfinished sessions", 0.0),
        ("waking", 0.0),
        ("unattended", 10.0),
        ("forget", 3600.0),
    ]
    # No thread goes on with what another one has seen.
    assert steps[1].run != heartbeat.registered_steps()[1].run


@pytest.mark.django_db
def test_a_turn_renews_the_lease_and_then_does_each_step_that_is_due(lease: Heartbeat) -> None:
    now, done = [1000.0], list[Any]()
    lease._now = lambda: now[0]
    lease.take()
    beat = Process.objects.get().beat

    def note(name: str) -> Callable[[Any], None]:
        return lambda given: done.append((name, given, Process.objects.get().beat))

    steps = [PeriodicStep("often", note("often")), PeriodicStep("seldom", note("seldom"), 10.0)]
    for seconds in (0, 1, 8, 1):
        now[0] += seconds
        lease.turn(steps)

    mine = lease.mine()
    assert done == [
        ("often", mine, beat + 1),
        ("seldom", mine, beat + 1),
        ("often", mine, beat + 1),
        ("often", mine, beat + 2),
        ("often", mine, beat + 2),
        ("seldom", mine, beat + 2),
    ]


@pytest.mark.django_db
def test_a_step_that_fails_ends_the_turn_and_is_not_tried_before_its_time(lease: Heartbeat) -> None:
    now, done = [1000.0], list[Any]()
    lease._now = lambda: now[0]

    def fail(given: Any) -> None:
        done.append("failed")
        raise OperationalError("away")

    steps = [
        PeriodicStep("seldom", fail, 10.0),
        PeriodicStep("behind", lambda given: done.append("behind")),
    ]
    with pytest.raises(OperationalError):
        lease.turn(steps)
    assert done == ["failed"]
    lease.turn(steps)
    assert done == ["failed", "behind"]
    now[0] += 10
    with pytest.raises(OperationalError):
        lease.turn(steps)
    assert done == ["failed", "behind", "failed"]


def test_a_process_gives_its_lease_back_after_its_sandboxes_have_ended(
    lease: Heartbeat, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draining, "_own", draining._own)
    done: list[str] = []

    def note(name: str) -> Callable[[], None]:
        return lambda: done.append(name if draining.is_ending() else f"{name} too early")

    monkeypatch.setattr(active_runs, "wait_for_ends", note("ends"))
    monkeypatch.setattr(manager, "close", note("manager"))
    monkeypatch.setattr(active_runs, "close_all", note("others"))
    monkeypatch.setattr(lease, "end", note("lease"))

    active_runs.shutdown()

    assert done == ["ends", "manager", "others", "lease"]


@pytest.fixture
def kept(transactional_db: None) -> Iterator[Heartbeat]:
    """A lease that is really kept, with short intervals."""
    keeper = Heartbeat(beat_seconds=0.02, look_seconds=0.01)
    keeper.begin(Process.Kind.WORKER)
    yield keeper
    keeper.stop()


def beaten(times: int) -> None:
    beat = Process.objects.get().beat
    wait_until(lambda: Process.objects.get().beat >= beat + times, seconds=60)


def test_a_lease_is_kept_without_being_asked_for(kept: Heartbeat) -> None:
    wait_until(Process.objects.exists, seconds=60)
    beaten(3)
    assert Process.objects.get().kind == "worker"
    assert Process.objects.get().draining is False


def test_a_process_that_stops_is_shown_as_draining(
    kept: Heartbeat, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draining, "_own", draining._own)
    wait_until(Process.objects.exists, seconds=60)

    draining.begin()

    wait_until(lambda: Process.objects.get().draining, seconds=60)


def test_a_database_that_fails_takes_no_lease_and_is_told_of_once(
    kept: Heartbeat, caplog: pytest.LogCaptureFixture
) -> None:
    wait_until(Process.objects.exists, seconds=60)
    mine = kept.mine()
    with caplog.at_level(logging.INFO, "executions.runs.heartbeat"):
        with connection.cursor() as cursor:
            cursor.execute("ALTER TABLE executions_process RENAME TO executions_process_away")
        wait_until(lambda: "cannot be renewed" in caplog.text, seconds=60)
        with connection.cursor() as cursor:
            cursor.execute("ALTER TABLE executions_process_away RENAME TO executions_process")
        wait_until(lambda: "renewed again" in caplog.text, seconds=60)
    beaten(2)

    assert kept.mine() == mine
    assert Process.objects.get().ended_at is None
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
