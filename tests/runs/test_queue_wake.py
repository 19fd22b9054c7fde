"""A worker that waits is woken by what is queued, and does not wait for its next look."""

from __future__ import annotations

import select
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
from django.db import transaction
from django.utils import timezone

from executions.kernel.file_watch import FileWatch
from executions.runs import queue_wake, worker
from executions.runs.models import Approval, Execution
from executions.runs.queue import claim_next, is_empty_for, requeue
from executions.runs.worker import Runner
from providers import draining
from tests.conftest import Caller
from tests.support.running import run
from tests.support.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

# Longer than a test may take: a look that comes by the clock ends none.
NEVER = 3600.0


@pytest.fixture
def notices(alice: Caller) -> Iterator[Callable[[], bool]]:
    """Whether a worker was notified since this was asked last."""
    watch = FileWatch(queue_wake._file())

    def came() -> bool:
        found = bool(select.select([watch], [], [], 0)[0])
        watch.clear()
        return found

    yield came
    watch.close()


@contextmanager
def idle_runner(monkeypatch: pytest.MonkeyPatch) -> Iterator[Runner]:
    """A runner that has found nothing, and never looks again by itself."""
    monkeypatch.setattr(worker, "LOOK_SECONDS", NEVER)
    monkeypatch.setattr(worker, "IDLE_SECONDS", NEVER)
    waits, has_ended = threading.Event(), threading.Event()
    wait = queue_wake.Waiter.wait

    def noted(self: queue_wake.Waiter, seconds: float) -> None:
        waits.set()
        wait(self, seconds)

    monkeypatch.setattr(queue_wake.Waiter, "wait", noted)
    runner = Runner(1, lambda: not has_ended.is_set())
    runner.start()
    try:
        assert waits.wait(60)
        yield runner
    finally:
        has_ended.set()
        runner.wake()
        for thread in runner._workers:
            thread.join(60)


def is_done(execution_id: str) -> bool:
    return Execution.objects.get(pk=execution_id).status == "succeeded"


@pytest.mark.one_database
def test_an_idle_worker_runs_what_is_queued_without_a_look_by_the_clock(
    scripted: object, alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    with idle_runner(monkeypatch):
        for _ in range(3):
            execution_id = run(alice, "pass", mode="async").json()["id"]
            wait_until(lambda pk=execution_id: is_done(pk), seconds=60)  # type: ignore[misc]


def test_a_run_that_ends_wakes_the_threads_of_its_process(
    scripted: object, alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tenant may have more to run, and nothing else says so."""
    with idle_runner(monkeypatch) as runner:
        execution_id = run(alice, "pass", mode="async").json()["id"]
        runner.wake()
        wait_until(lambda: is_done(execution_id), seconds=60)


def test_the_notice_comes_with_the_commit_and_of_what_is_queued_alone(
    scripted: object, alice: Caller, notices: Callable[[], bool]
) -> None:
    run(alice, "pass")
    assert not notices()
    with transaction.atomic():
        queue_wake.notify_on_commit()
        assert not notices()
    assert notices()
    run(alice, "pass", mode="async")
    assert notices()


def test_what_goes_back_to_the_queue_is_notified(
    scripted: object, alice: Caller, notices: Callable[[], bool]
) -> None:
    run(alice, "pass", mode="async")
    claimed = claim_next()
    assert claimed is not None
    notices()
    assert requeue(claimed)
    assert notices()


@pytest.mark.one_database
def test_the_queue_is_not_empty_while_something_may_be_taken_soon(
    scripted: object, alice: Caller
) -> None:
    assert is_empty_for(60)
    execution_id = run(alice, "pass", mode="async").json()["id"]
    row = Execution.objects.filter(pk=execution_id)
    assert not is_empty_for(0)
    # Who waits for a time or for a person is not looked for many times a second.
    row.update(run_at=timezone.now() + timedelta(minutes=5))
    assert is_empty_for(60)
    assert not is_empty_for(600)
    row.update(run_at=None)
    Approval.objects.create(execution=row.get(), status=Approval.Status.WAITING)
    assert is_empty_for(600)


def test_who_cannot_be_notified_looks_by_the_clock(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(path: object) -> None:
        raise OSError(24, "no watch is left")

    monkeypatch.setattr(queue_wake, "FileWatch", fail)
    waiter = queue_wake.Waiter()
    assert not waiter.is_notified
    assert "no watch is left" in caplog.text
    waiter.wake()
    waiter.wait(NEVER)


def test_stopping_ends_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draining, "_own", draining._own)
    draining.share_with_own_forks()
    try:
        waiter = queue_wake.Waiter()
        draining.begin(for_all=True)
        waiter.wait(NEVER)
        draining.wait_until_begun(NEVER)
        assert draining.are_all_draining()
    finally:
        draining.share_with_own_forks()
    assert not draining.are_all_draining()
