"""A dead process is found by those that live, and what it ran is closed; nobody else's is."""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.db import DatabaseError, connection, transaction
from django.db.models import F
from django.db.models.functions import Now
from django.utils import timezone

from executions.ledger.models import LedgerEntry
from executions.runs import journal, orphaned_runs
from executions.runs.heartbeat import Heartbeat, PeriodicStep
from executions.runs.journal import Ended, record_waiting
from executions.runs.models import Execution, Process
from executions.runs.orphaned_runs import KEPT, Watcher, end_stale_executions, forget_ended
from executions.runs.record import close_record
from executions.runs.standby import HELD_SECONDS
from executions.sessions.ending import abort_unfinished
from executions.sessions.models import Session
from providers.process_liveness import birth
from providers.remote.reclaim import process_tag
from tests.conftest import Caller
from tests.support import sessions
from tests.support.held import opened

pytestmark = pytest.mark.database


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def watch(self, watcher: Watcher, seconds: float, meanwhile: Callable[[], object]) -> int:
        """Look once a second, as a process does. How many deaths were recorded."""
        died = 0
        for _ in range(int(seconds)):
            self.now += 1.0
            meanwhile()
            died += watcher.look(None)
        return died


def nothing() -> None: ...


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def watcher(db: None, clock: Clock) -> Watcher:
    return Watcher(now=clock)


@pytest.fixture
def other(db: None) -> Process:
    return Process.objects.create(instance="web-2", kind="web", pid=4711)


def ran_by(process: Process, caller: Caller, **request: Any) -> Execution:
    execution = opened(caller, **request)
    Execution.objects.filter(pk=execution.pk).update(process=process)
    execution.process_id = process.pk
    return execution


def beat(process: Process) -> None:
    assert Process.objects.filter(pk=process.pk, ended_at=None).update(beat=F("beat") + 1) == 1


def test_what_a_silent_process_ran_is_closed_and_says_whose_it_was(
    watcher: Watcher,
    clock: Clock,
    other: Process,
    alice: Caller,
    caplog: pytest.LogCaptureFixture,
) -> None:
    execution = ran_by(other, alice, timeout=300)
    queued = opened(alice, "async")

    with caplog.at_level(logging.WARNING):
        assert clock.watch(watcher, 10, nothing) == 0
        assert clock.watch(watcher, 2, nothing) == 1

    execution.refresh_from_db()
    assert (execution.status, execution.error_code) == ("error", "SB009")
    assert execution.meta["process"] == "web, instance web-2, pid 4711"
    assert "web-2" not in execution.error_message  # which its caller reads
    assert (execution.retryable, execution.process_id) == (False, None)
    assert LedgerEntry.objects.filter(execution_id=execution.pk).count() == 1
    queued.refresh_from_db()
    assert queued.status == "queued"
    (told,) = [r for r in caplog.records if getattr(r, "alert", "") == "process_died"]
    assert (told.instance, told.executions) == ("web-2", 1)  # type: ignore[attr-defined]


def test_of_its_own_host_a_process_that_has_ended_is_dead_at_once(
    watcher: Watcher,
    clock: Clock,
    other: Process,
    alice: Caller,
    settings: Any,
    tmp_path: Path,
) -> None:
    settings.DATA_DIR = tmp_path
    child = subprocess.Popen(["sleep", "60"])
    host, _, _ = process_tag().split("-")
    Process.objects.update(tag=f"{host}-{child.pid}-{birth(child.pid)}")
    execution, waits = ran_by(other, alice), ran_by(other, alice)
    now = timezone.now()
    values = {"stdout": "kept\n", "exit_code": 0, "finished_at": now, "cost": None}
    journal.write(Ended(waits.pk, Execution.Status.SUCCEEDED, values))

    assert clock.watch(watcher, 9, nothing) == 0
    beat(other)
    assert clock.watch(watcher, 1, nothing) == 0
    child.kill()
    child.wait()
    assert clock.watch(watcher, 1, nothing) == 1

    execution.refresh_from_db()
    assert (execution.status, execution.error_code) == ("error", "SB009")
    # Its end waits in this host's journal.
    waits.refresh_from_db()
    assert waits.is_open
    assert record_waiting() == 1
    waits.refresh_from_db()
    assert (waits.status, waits.stdout) == ("succeeded", "kept\n")


def test_a_process_that_beats_lives_however_seldom(
    watcher: Watcher, clock: Clock, other: Process, alice: Caller
) -> None:
    execution = ran_by(other, alice)

    for _ in range(5):
        assert clock.watch(watcher, 9, nothing) == 0
        beat(other)

    execution.refresh_from_db()
    assert execution.is_open


@pytest.mark.parametrize("gap", [5, 3600])
def test_a_watcher_that_did_not_look_for_a_while_begins_anew(
    watcher: Watcher, clock: Clock, other: Process, gap: int
) -> None:
    clock.watch(watcher, 9, nothing)
    clock.now += gap

    assert clock.watch(watcher, 10, nothing) == 0
    assert clock.watch(watcher, 2, nothing) == 1


def test_a_watcher_that_closes_slowly_watches_on_meanwhile(
    watcher: Watcher, clock: Clock, other: Process, alice: Caller
) -> None:
    died = Process.objects.create(instance="web-3", kind="web", pid=4712)
    clock.watch(watcher, 3, nothing)
    left = [ran_by(died, alice).pk for _ in range(2)]
    Process.objects.filter(pk=died.pk).update(ended_at=Now())

    seconds = [1.4, 2.5]

    def slowly(execute: Any, sql: str, *rest: Any) -> Any:
        if sql.startswith("UPDATE executions_execution "):
            clock.now += seconds.pop(0)
        return execute(sql, *rest)

    with connection.execute_wrapper(slowly):
        assert clock.watch(watcher, 1, nothing) == 0
    assert (seconds, Execution.objects.filter(pk__in=left, finished_at=None).count()) == ([], 0)
    # Nearly five seconds lie between this look and the last, and what was seen counts on.
    assert clock.watch(watcher, 3, nothing) == 0
    assert clock.watch(watcher, 1, nothing) == 1


def test_who_has_no_time_for_all_says_so_and_another_closes_the_rest(
    watcher: Watcher, clock: Clock, other: Process, alice: Caller
) -> None:
    for _ in range(3):
        ran_by(other, alice)
    Process.objects.update(ended_at=Now())

    def slowly(execute: Any, sql: str, *rest: Any) -> Any:
        clock.now += 2 * sql.startswith("UPDATE executions_execution ")
        return execute(sql, *rest)

    with connection.execute_wrapper(slowly):
        watcher.look(None)
    assert (watcher.is_behind, Execution.objects.filter(finished_at=None).count()) == (True, 2)

    # Without having found the death, and with its first look.
    Watcher(now=clock).look(None)

    assert not Execution.objects.filter(finished_at=None).exists()
    watcher.look(None)
    assert not watcher.is_behind


def test_what_cannot_be_closed_is_not_tried_without_a_pause(
    watcher: Watcher, clock: Clock, other: Process, alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        ran_by(other, alice)
    Process.objects.update(ended_at=Now())

    def refuse(*_: object) -> bool:
        clock.now += 2
        return False

    monkeypatch.setattr(orphaned_runs, "requeue_or_fail", refuse)
    watcher.look(None)

    assert not watcher.is_behind


def test_a_beat_at_the_last_moment_counts(
    watcher: Watcher, clock: Clock, other: Process, alice: Caller
) -> None:
    execution = ran_by(other, alice)
    clock.watch(watcher, 10, nothing)
    beats: list[bool] = []

    def beat_first(execute: Any, sql: str, *rest: Any) -> Any:
        if sql.startswith("UPDATE") and not beats:
            beats.append(True)
            beat(other)
        return execute(sql, *rest)

    with connection.execute_wrapper(beat_first):
        assert clock.watch(watcher, 1, nothing) == 0

    assert beats
    execution.refresh_from_db()
    assert execution.is_open


def test_what_the_finder_of_a_death_left_is_closed_by_another(
    clock: Clock, other: Process, alice: Caller
) -> None:
    execution = ran_by(other, alice)
    Process.objects.update(ended_at=Now())

    assert clock.watch(Watcher(now=clock), 1, nothing) == 0

    execution.refresh_from_db()
    assert execution.status == "error"


def test_two_that_find_the_same_death_close_what_it_ran_once(
    clock: Clock, other: Process, alice: Caller
) -> None:
    execution = ran_by(other, alice)
    watchers = [Watcher(now=clock), Watcher(now=clock)]

    died = sum(clock.watch(watcher, 0, nothing) for watcher in watchers)
    for _ in range(13):
        clock.now += 1
        died += sum(watcher.look(None) for watcher in watchers)

    assert died == 1
    assert LedgerEntry.objects.filter(execution_id=execution.pk).count() == 1


def test_a_record_that_cannot_be_closed_keeps_none_of_the_others_open(
    clock: Clock, other: Process, alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken, execution = ran_by(other, alice), ran_by(other, alice)
    # As something else than us may have written it.
    Execution.objects.filter(pk=broken.pk).update(meta=["no object"])
    Process.objects.update(ended_at=Now())

    clock.watch(Watcher(now=clock), 1, nothing)

    assert list(Execution.objects.filter(finished_at=None)) == [broken]
    execution.refresh_from_db()
    assert execution.status == "error"


def test_a_silent_process_of_this_host_that_the_kernel_shows_is_not_dead_for_a_while(
    watcher: Watcher, clock: Clock, alice: Caller
) -> None:
    """A long call holds its threads, and so its beat."""
    held = Process.objects.create(
        instance="web-1", kind="web", pid=os.getpid(), tag=process_tag(), beat=7
    )
    execution = ran_by(held, alice)

    assert clock.watch(watcher, HELD_SECONDS - 1, nothing) == 0
    execution.refresh_from_db()
    assert execution.is_open

    # One that was stopped, or that hangs.
    assert clock.watch(watcher, 3, nothing) == 1
    execution.refresh_from_db()
    assert execution.error_code == "SB009"


def test_a_process_with_the_number_of_a_living_one_and_another_birth_is_dead_at_once(
    watcher: Watcher, clock: Clock
) -> None:
    host, pid, born = process_tag().split("-")
    Process.objects.create(
        instance="web-1", kind="web", pid=pid, tag=f"{host}-{pid}-{int(born) - 1}"
    )
    assert clock.watch(watcher, 1, nothing) == 1


@pytest.mark.parametrize("days", [-365, 365])
def test_no_clock_closes_what_a_living_process_runs(
    days: int, other: Process, alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a row that waits in its provider's queue for longer than its deadline allows."""
    execution = ran_by(other, alice)
    Execution.objects.update(deadline=timezone.now() - timedelta(days=days))
    skewed = timezone.now() + timedelta(days=days)
    monkeypatch.setattr(timezone, "now", lambda: skewed)

    assert end_stale_executions() == 0

    execution.refresh_from_db()
    assert execution.is_open


def test_a_late_result_does_not_change_what_was_closed(
    watcher: Watcher, clock: Clock, other: Process, alice: Caller
) -> None:
    execution = ran_by(other, alice)
    clock.watch(watcher, 12, nothing)

    assert close_record(execution, Execution.Status.SUCCEEDED, {"exit_code": 0}) is False

    assert Execution.objects.get().status == "error"


@pytest.mark.usefixtures("kept_here")
def test_what_a_dead_process_was_opening_is_closed_and_what_it_was_waking_sleeps(
    clock: Clock, other: Process, lease: Heartbeat, alice: Caller
) -> None:
    unopened, opening, waking = (sessions.opened(alice, name=name) for name in "abc")
    rows = Session.objects.filter(pk__in=(unopened["id"], opening["id"]))
    rows.update(ref=None, provider="", process=other)
    Session.objects.filter(pk=opening["id"]).update(process=lease.mine())
    sleeping = {"state": "asleep", "ref": None, "waking_since": timezone.now()}
    Session.objects.filter(pk=waking["id"]).update(process=other, **sleeping)

    clock.watch(Watcher(now=clock), 12, lambda: beat(Process.objects.get(pk=lease.mine())))
    abort_unfinished()

    closed = sessions.row(unopened)
    assert (closed.state, closed.process) == ("closed", None)
    assert closed.closed_because == "it could not be opened: the process that did it ended"
    assert closed.released_at is not None
    assert sessions.row(opening).state == "open"
    freed = sessions.row(waking)
    assert (freed.state, freed.waking_since, freed.process) == ("asleep", None, None)
    sessions.opened(alice, name="a")
    assert sessions.cell(alice, waking, "print(1)").json()["stdout"] == "1\n"


def test_ended_processes_are_forgotten_after_a_while_and_not_while_they_have_open_rows(
    other: Process, alice: Caller
) -> None:
    long_ago = Now() - KEPT - timedelta(minutes=1)
    kept = Process.objects.create(instance="a", kind="web", pid=1, ended_at=Now())
    busy = Process.objects.create(instance="b", kind="web", pid=2, ended_at=long_ago)
    gone = Process.objects.create(instance="c", kind="web", pid=3, ended_at=long_ago)
    ran_by(busy, alice)

    assert forget_ended() == 1

    assert set(Process.objects.all()) == {other, kept, busy}
    assert not Process.objects.filter(pk=gone.pk).exists()


@pytest.mark.only_on("sqlite")  # as the trigger is
def test_while_nobody_can_write_nobody_is_found_dead(
    clock: Clock, other: Process, lease: Heartbeat
) -> None:
    """A full disk lets every process read how silent the others are."""
    watcher = Watcher(now=clock)
    steps = [PeriodicStep("deaths", watcher.look)]
    lease._now = clock
    lease.take()
    with connection.cursor() as cursor:
        cursor.execute(
            "CREATE TRIGGER full BEFORE UPDATE OF beat ON executions_process "
            "BEGIN SELECT RAISE(FAIL, 'database or disk is full'); END"
        )
        for _ in range(30):
            clock.now += 1
            with pytest.raises(DatabaseError, match="full"), transaction.atomic():
                lease.turn(steps)
        cursor.execute("DROP TRIGGER full")

    for _ in range(10):
        clock.now += 1
        lease.turn(steps)
        assert not Process.objects.filter(ended_at__isnull=False).exists()
    clock.watch(watcher, 2, nothing)
    assert Process.objects.filter(pk=other.pk, ended_at__isnull=False).exists()
