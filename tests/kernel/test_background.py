"""Work in the background: threads, loops, executors that owners share, and all of it after a fork."""

from __future__ import annotations

import logging
import os
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
from django.db import connection

from executions.kernel.background import Executor, Shares
from providers.errors import RateLimited
from providers.threads import Loop, reset_after_fork, start_thread
from tests.support.waiting import wait_until

pytestmark = pytest.mark.one_database


def in_a_fork(check: Callable[[], bool]) -> bool:
    """Whether `check` holds in a forked child, which ends without the exit of this process."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if check() else 1
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


class Gate:
    """Calls that note their name and end when the gate opens."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self._opens = threading.Event()

    def call(self, name: str) -> Callable[[], str]:
        def work() -> str:
            self.begun.append(name)
            assert self._opens.wait(60)
            return name

        return work

    def open(self) -> None:
        self._opens.set()


@pytest.fixture
def gate() -> Iterator[Gate]:
    found = Gate()
    yield found
    found.open()


@pytest.fixture
def two() -> Executor:
    """Two threads, of which an owner has one, and three calls."""
    return Executor("two", threads=2, of_one=1, most=3, refusal="three at most")


def test_a_thread_logs_its_error_and_gives_back_what_it_held(
    caplog: pytest.LogCaptureFixture,
) -> None:
    gone = threading.Event()

    def fail() -> None:
        raise ValueError("broken")

    start_thread("failing", fail, at_end=gone.set).join(60)
    assert gone.is_set()
    (logged,) = caplog.records
    assert ("failing" in logged.message, "broken" in str(logged.exc_info)) == (True, True)


@pytest.mark.django_db(transaction=True)
def test_a_thread_has_no_connection_when_it_gives_back_what_it_held() -> None:
    seen: list[bool] = []

    def look() -> None:
        seen.append(connection.connection is not None)

    def work() -> None:
        connection.ensure_connection()
        look()

    start_thread("connected", work, at_end=look).join(60)
    assert seen == [True, False]


def test_an_owner_has_its_share_and_the_others_the_rest(two: Executor, gate: Gate) -> None:
    calls = [two.submit("alice", gate.call(name)) for name in ("a1", "a2")]
    calls.append(two.submit("bob", gate.call("b1")))
    wait_until(lambda: sorted(gate.begun) == ["a1", "b1"], seconds=60)
    gate.open()
    assert [each.result(60) for each in calls] == ["a1", "a2", "b1"]


def test_the_owner_that_waited_longest_is_next(gate: Gate) -> None:
    one = Executor("one", threads=1, of_one=1)
    calls = [one.submit("alice", gate.call("a1"))]
    wait_until(lambda: gate.begun == ["a1"], seconds=60)
    for name in ("a2", "a3", "b1", "b2", "c1"):
        calls.append(one.submit(name[0], gate.call(name)))
    calls.append(one.submit("c", gate.call("c0"), key="c0", first=True))
    gate.open()
    assert one.wait_until_idle(60)
    assert gate.begun == ["a1", "c0", "a2", "b1", "c1", "a3", "b2"]
    assert all(each.done() for each in calls)


def test_beyond_its_bound_an_owner_is_refused_and_what_was_cancelled_does_not_count(
    two: Executor, gate: Gate
) -> None:
    running = two.submit("alice", gate.call("a1"))
    wait_until(lambda: gate.begun == ["a1"], seconds=60)
    waiting = [two.submit("alice", gate.call(name)) for name in ("a2", "a3")]
    with pytest.raises(RateLimited, match="three at most"):
        two.submit("alice", gate.call("a4"))
    assert waiting[0].cancel()
    last = two.submit("alice", gate.call("a4"))
    gate.open()
    assert [each.result(60) for each in (running, waiting[1], last)] == ["a1", "a3", "a4"]
    assert gate.begun == ["a1", "a3", "a4"]


def test_under_a_key_one_call_runs_at_a_time_for_all_that_came_before_it(gate: Gate) -> None:
    several = Executor("several", threads=4, of_one=4)
    running = several.submit("alice", gate.call("first"), key="a")
    wait_until(lambda: gate.begun == ["first"], seconds=60)
    late = [several.submit("alice", gate.call("second"), key="a") for _ in range(3)]
    other = several.submit("alice", gate.call("other"), key="b")
    wait_until(lambda: gate.begun == ["first", "other"], seconds=60)
    gate.open()
    done = [each.result(60) for each in (running, *late, other)]
    assert done == ["first", "second", "second", "second", "other"]
    assert gate.begun == ["first", "other", "second"]


def test_delayed_calls_under_a_key_are_one_that_begins_with_the_first_without_a_delay(
    two: Executor, gate: Gate
) -> None:
    gate.open()
    delayed = [
        two.submit("alice", gate.call("delayed"), key="a", delay_seconds=3600) for _ in range(2)
    ]
    assert two.submit("alice", gate.call("plain")).result(60) == "plain"
    assert gate.begun == ["plain"]
    now = two.submit("alice", gate.call("now"), key="a")
    assert [each.result(60) for each in (*delayed, now)] == ["delayed"] * 3
    assert gate.begun == ["plain", "delayed"]


def test_a_delayed_call_begins_by_itself_and_at_once_for_who_waits_until_all_is_idle(
    two: Executor, gate: Gate
) -> None:
    gate.open()
    assert two.submit("alice", gate.call("soon"), key="a", delay_seconds=0.01).result(60) == "soon"
    late = two.submit("alice", gate.call("late"), key="a", delay_seconds=3600)
    assert two.wait_until_idle(60)
    assert late.result(60) == "late"


class _BeforeTheLock(threading.Condition):
    """Its first wait ends without a notice, and `work` is done before the lock is taken again."""

    def __init__(self, work: Callable[[], object]) -> None:
        super().__init__()
        self._work = [work]

    def wait(self, timeout: float | None = None) -> bool:
        if not self._work:
            return super().wait(timeout)
        self._work.pop()()
        return False


def test_a_delayed_call_is_not_left_by_a_thread_that_was_about_to_end(
    two: Executor, gate: Gate
) -> None:
    gate.open()
    late: list[Future[str]] = []

    def submit() -> None:
        late.append(two.submit("alice", gate.call("late"), key="a", delay_seconds=0.01))

    two._changed = _BeforeTheLock(submit)
    assert two.submit("alice", gate.call("first")).result(60) == "first"
    wait_until(lambda: bool(late), seconds=60)
    assert late[0].result(60) == "late"


def test_work_with_a_key_is_done_even_if_nobody_waits_for_it(gate: Gate) -> None:
    one = Executor("one", threads=1, of_one=1, most=3)
    running = one.submit("alice", gate.call("running"))
    wait_until(lambda: gate.begun == ["running"], seconds=60)
    assert one.submit("alice", gate.call("keyed"), key="a").cancel()
    assert one.submit("alice", gate.call("plain")).cancel()
    last = one.submit("alice", gate.call("last"))
    gate.open()
    assert (running.result(60), last.result(60)) == ("running", "last")
    assert one.wait_until_idle(60)
    assert gate.begun == ["running", "keyed", "last"]


def test_shares_end_at_the_whole_and_at_that_of_one() -> None:
    shares = Shares(whole=3, of_one=2)
    assert [shares.take(each) for each in ("a", "a", "a", "b", "c")] == [
        *(True, True, False),
        *(True, False),
    ]
    assert (shares.taken, shares.of("a"), shares.of("c")) == (3, 2, 0)
    shares.give_back("a")
    assert shares.has_room("c")
    assert (shares.take("c"), shares.taken) == (True, 3)


def test_a_loop_is_woken_tries_again_and_ends_when_it_is_not_to_go_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    goes_on, ticks = threading.Event(), []
    goes_on.set()

    def tick() -> float:
        ticks.append(len(ticks))
        if ticks == [0]:
            raise ValueError("broken")
        return 3600.0

    loop = Loop("woken", tick, goes_on=goes_on.is_set)
    with caplog.at_level(logging.ERROR):
        loop.start()
        wait_until(lambda: ticks == [0, 1], seconds=60)
    assert "broken" in caplog.text
    loop.wake()
    wait_until(lambda: ticks == [0, 1, 2], seconds=60)
    goes_on.clear()
    loop.wake()
    wait_until(lambda: not loop.is_running, seconds=60)
    assert ticks == [0, 1, 2]


def test_a_loop_that_has_ended_begins_again_and_may_wait_before_its_first_call() -> None:
    ticks: list[int] = []
    quick = Loop("quick", lambda: ticks.append(1))
    for number in (1, 2):
        quick.start()
        wait_until(lambda: len(ticks) == number and not quick.is_running, seconds=60)  # noqa: B023
    pauses: list[float | None] = []

    class Woken(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            pauses.append(timeout)
            return True

    slow = Loop("slow", lambda: ticks.append(2), first_pause=3600)
    slow._woken = Woken()
    slow.start()
    wait_until(lambda: not slow.is_running, seconds=60)
    assert (pauses, ticks) == ([3600], [1, 1, 2])


def test_a_fork_has_threads_of_its_own_and_all_places(two: Executor, gate: Gate) -> None:
    held = [two.submit("alice", gate.call(name)) for name in ("a1", "a2", "a3")]
    shares, ticks = Shares(whole=1, of_one=1), threading.Event()
    shares.take("alice")
    loop = Loop("forked", lambda: None if ticks.is_set() else 0.01)
    loop.start()
    wait_until(lambda: gate.begun == ["a1"], seconds=60)

    def check() -> bool:
        assert not loop.is_running
        ticked: Future[bool] = Future()
        loop._tick = lambda: ticked.set_result(True)
        loop.start()
        own = two.submit("alice", lambda: "own").result(60)
        # What the parent took is not given back twice.
        shares.give_back("alice")
        taken = [shares.take("alice"), shares.take("alice")]
        return ticked.result(60) and own == "own" and taken == [True, False]

    assert in_a_fork(check)
    assert not shares.take("alice")
    gate.open()
    ticks.set()
    assert [each.result(60) for each in held] == ["a1", "a2", "a3"]
    wait_until(lambda: not loop.is_running, seconds=60)


def test_after_a_fork_one_reset_that_fails_keeps_no_other_from_its_turn() -> None:
    done: list[str] = []

    class Part:
        def __init__(self, name: str) -> None:
            self.name = name
            reset_after_fork(self.reset)

        def reset(self) -> Any:
            done.append(self.name)
            if self.name == "broken":
                raise ValueError("broken")

    gone, first, broken, last = map(Part, ("gone", "first", "broken", "last"))
    del gone
    assert in_a_fork(lambda: done == ["first", "broken", "last"])
    assert done == []
    assert [each.name for each in (first, broken, last)] == ["first", "broken", "last"]
