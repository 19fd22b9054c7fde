"""What a stream leaves with those who tell of a run ends with the stream, and not with the run."""

from __future__ import annotations

import gc
from base64 import b64encode
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from uuid import uuid4

import pytest

from executions.doors.e2b import processes
from executions.doors.e2b.filesystem import Told, WatchEvents
from executions.doors.e2b.processes import ProcessEvents, follow_log
from executions.doors.native.deferred import NDJSON, EventStream
from executions.kernel.coroutines import Coroutine
from executions.runs import active_runs, event_log, event_stream
from executions.runs.event_log import Broadcast, EventLog, resolve
from executions.runs.event_stream import Listener
from executions.runs.models import Execution
from executions.sessions.file_events import Watch
from providers.values import Event, RunLimits
from tests.conftest import Caller
from tests.support.held import opened

MANY = 200
LISTENER = Listener("key:1", "wonderland")
Followed = Callable[[EventStream, EventLog], Coroutine[object]]


@pytest.fixture(autouse=True)
def _nothing_comes_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_LOOK_SECONDS", 3600.0)


@pytest.fixture
def log() -> EventLog:
    begun = EventLog(RunLimits())
    begun.begin(uuid4())
    return begun


def by_e2b(events: EventStream, log: EventLog) -> Coroutine[object]:
    assert isinstance(events, ProcessEvents)
    return follow_log(Execution(), events, log)


def by_the_native_api(events: EventStream, log: EventLog) -> Coroutine[object]:
    return event_stream.follow(uuid4(), events, 0, LISTENER)


def held() -> int:
    """How many futures anybody waits with, or is still called by."""
    gc.collect()
    # By its type: a lazy object of another test's request would be made to say what it is.
    return sum(issubclass(type(each), Future) for each in gc.get_objects())


def silent() -> ProcessEvents:
    return ProcessEvents(1, is_terminal=False, after=1)


@pytest.mark.parametrize("follow", [by_e2b, by_the_native_api])
def test_who_has_gone_leaves_nothing_in_the_log_and_who_stays_is_told(
    follow: Followed, log: EventLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(active_runs, "find", lambda _: SimpleNamespace(log=log))
    stays = silent()
    over = follow(stays, log).send(None)
    changed = stays.next_change()
    before = held()
    for _ in range(MANY):
        events = silent()
        follow(events, log).send(None)
        for _ in range(3):
            events.next_change()
        events.leave()
    assert held() < before + MANY // 10
    assert not changed.done()
    log.emit(Event("stdout", b"output"))
    assert changed.done()
    assert b64encode(b"output") in stays.take()[0]
    changed = stays.next_change()
    log.finish()
    assert changed.done()
    assert not over.done()
    resolve([log.closed])
    assert over.done()


def test_who_follows_for_long_holds_no_more_than_at_first(log: EventLog) -> None:
    stays = silent()
    told = follow_log(Execution(), stays, log)
    resolve([told.send(None)])
    before = held()
    for _ in range(MANY):
        # Nothing came in its time, so that it says that it is there, and looks again.
        resolve([told.send(None)])
        changed = stays.next_change()
    assert held() < before + MANY // 10
    assert not changed.done()
    stays.leave()
    assert changed.done()


# The thread that looks for the end sees what is committed.
@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("where", ["elsewhere", "here", "without a thread"])
def test_who_looks_again_and_again_leaves_nothing_for_each_look(
    where: str, alice: Caller, log: EventLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    execution = opened(alice)
    events = silent() if where == "without a thread" else EventStream(NDJSON)
    if where == "here":
        monkeypatch.setattr(event_log, "log_of", lambda _: log)
    told: Coroutine[None]
    if isinstance(events, ProcessEvents):
        told = processes._wait_until_recorded(execution, events, None)
    else:
        told = event_stream.follow(execution.pk, events, 0, LISTENER)
    resolve([told.send(None)])
    before = held()
    for _ in range(MANY):
        resolve([told.send(None)])
    assert held() < before + MANY // 10
    over = told.send(None)
    events.leave()
    assert over.done()
    with pytest.raises(StopIteration):
        told.send(None)


def test_who_watches_a_folder_hears_of_its_end_and_of_leaving_it() -> None:
    for end in (lambda watch, _: resolve([watch.ended]), lambda _, changes: changes.leave()):
        watch, changes = Watch(), WatchEvents(Told(""))
        seen = changes.follow(watch, None)
        over = seen.send(None)
        assert not over.done()
        end(watch, changes)
        assert over.done()
        with pytest.raises(StopIteration):
            seen.send(None)
        assert not watch.is_wanted


def test_what_has_come_is_told_to_who_asks_later_and_to_nobody_twice() -> None:
    moment, early, late, gone = Broadcast(), Future[None](), Future[None](), Future[None]()
    moment.bring(early)
    moment.bring(gone)
    assert gone.cancel()
    resolve([moment])
    moment.bring(late)
    resolve([moment])
    assert early.done()
    assert late.done()
    assert gone.cancelled()
    assert not moment._waiting
