"""The web server's threads: no lane takes what the others need, and none is ever lost."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial

import pytest

from sandbox_site.web import threads
from sandbox_site.web.body import STRANGERS, Refused, Share, Spool
from sandbox_site.web.threads import HandlerThreads, LaneFull


class Gate:
    """Jobs that wait until they are let go, and tell when they have begun."""

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)
        self.open = threading.Event()

    def job(self) -> None:
        self.begun.release()
        self.open.wait(60)

    def wait_for(self, count: int) -> None:
        for _ in range(count):
            assert self.begun.acquire(timeout=60)


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.open.set()


def test_a_full_lane_leaves_threads_to_the_other(gate: Gate) -> None:
    handlers = HandlerThreads(4, {"api": 3, "pages": 3})
    for _ in range(10):
        handlers.submit("api", gate.job)
    gate.wait_for(3)
    served = threading.Event()
    handlers.submit("pages", served.set)
    assert served.wait(60)
    assert not gate.begun.acquire(timeout=0.1)


def test_what_has_begun_goes_before_what_is_new(gate: Gate) -> None:
    handlers = HandlerThreads(1, {"api": 1})
    handlers.submit("api", gate.job)
    gate.wait_for(1)
    order: list[str] = []
    done = threading.Event()
    handlers.submit("api", lambda: order.append("new"))
    handlers.submit("api", lambda: order.append("begun"), has_begun=True)
    handlers.submit("api", done.set)
    gate.open.set()
    assert done.wait(60)
    assert order == ["begun", "new"]


def in_order(gate: Gate, *jobs: tuple[str, str]) -> list[str]:
    """In which order one thread does jobs that are all there: each is an owner's that has begun,
    or new where the owner is ""."""
    handlers = HandlerThreads(1, {"api": 1})
    handlers.submit("api", gate.job)
    gate.wait_for(1)
    order: list[str] = []
    done = threading.Semaphore(0)

    def do(name: str) -> None:
        order.append(name)
        done.release()

    for owner, name in jobs:
        handlers.submit("api", partial(do, name), has_begun=bool(owner), owner=owner)
    gate.open.set()
    for _ in jobs:
        assert done.acquire(timeout=60)
    return order


def test_what_is_new_has_its_turn_however_much_has_begun(gate: Gate) -> None:
    begun = [("greedy", f"begun {number}") for number in range(250)]
    order = in_order(gate, *begun, ("", "new 1"), ("", "new 2"))
    row = threads.MOST_BEGUN_IN_A_ROW
    assert (order.index("new 1"), order.index("new 2")) == (row, 2 * row + 1)
    assert len(order) == 252


def test_owners_of_what_has_begun_take_turns(gate: Gate) -> None:
    begun = [("greedy", f"greedy {number}") for number in range(250)]
    order = in_order(gate, *begun, ("other", "other 1"), ("other", "other 2"))
    assert (order.index("other 1"), order.index("other 2")) == (1, 3)
    assert order[4:] == [f"greedy {number}" for number in range(2, 250)]


def test_a_queue_has_an_end_for_what_is_new(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "LONGEST_QUEUE", 2)
    handlers = HandlerThreads(1, {"api": 1})
    handlers.submit("api", gate.job)
    gate.wait_for(1)
    for _ in range(2):
        handlers.submit("api", gate.job)
    with pytest.raises(LaneFull):
        handlers.submit("api", gate.job)
    handlers.submit("api", gate.job, has_begun=True)


def test_no_owner_fills_the_queue(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also not one whose clients leave, so that others have their places while the jobs wait."""
    monkeypatch.setattr(threads, "LONGEST_QUEUE", 4)
    handlers = HandlerThreads(1, {"api": 1})
    handlers.submit("api", gate.job)
    gate.wait_for(1)
    for _ in range(2):
        handlers.submit("api", gate.job, owner="greedy")
    with pytest.raises(LaneFull):
        handlers.submit("api", gate.job, owner="greedy")
    handlers.submit("api", gate.job, owner="greedy", has_begun=True)
    for owner in ("honest", ""):
        handlers.submit("api", gate.job, owner=owner)
    with pytest.raises(LaneFull):
        handlers.submit("api", gate.job, owner="late")


def test_a_thread_survives_whatever_a_job_does() -> None:
    handlers = HandlerThreads(1, {"api": 1})

    def leave() -> None:
        raise SystemExit(3)

    served = threading.Event()
    handlers.submit("api", leave)
    handlers.submit("api", served.set)
    assert served.wait(60)


def test_every_job_is_done_once_however_many_come_at_once() -> None:
    handlers = HandlerThreads(4, {"api": 3, "pages": 3})
    lock, done, counts = threading.Lock(), threading.Event(), {"api": 0, "pages": 0}

    def count(lane: str) -> None:
        with lock:
            counts[lane] += 1
            if sum(counts.values()) == 1200:
                done.set()

    def submit(lane: str) -> None:
        for _ in range(300):
            handlers.submit(lane, lambda: count(lane), has_begun=True)

    submitters = [threading.Thread(target=submit, args=(lane,)) for lane in counts for _ in "ab"]
    for submitter in submitters:
        submitter.start()
    assert done.wait(60)
    for submitter in submitters:
        submitter.join()
    assert counts == {"api": 600, "pages": 600}


def test_the_spool_is_shared_and_given_back() -> None:
    spool = Spool(800)
    first, second, stranger = Share(spool), Share(spool), Share(spool)
    first.hold("alice", 400)
    with pytest.raises(Refused) as refused:
        second.hold("alice", 1)
    assert refused.value.status == 429
    with pytest.raises(Refused) as refused:
        stranger.hold(STRANGERS, 101)
    assert refused.value.status == 503
    second.hold("charlie", 400)
    with pytest.raises(Refused) as refused:
        Share(spool).hold("dora", 1)
    assert refused.value.status == 503
    first.release()
    first.release()
    stranger.hold(STRANGERS, 100)
    Share(spool).hold("dora", 300)
