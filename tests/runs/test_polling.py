"""One poll serves all who wait in a process for executions that run elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any
from uuid import uuid4

import pytest
from django.db import OperationalError, connection
from django.test.utils import CaptureQueriesContext

from executions.doors.native.deferred import NDJSON, EventStream
from executions.kernel.text import to_json
from executions.runs import event_log, event_stream
from executions.runs.event_stream import EventBuffer, Listener, Poll, Reader, Waiter
from executions.runs.models import Execution, ExecutionEvent, RunSignal
from providers import draining
from providers.errors import RateLimited
from providers.threads import Loop
from tests.conftest import Caller
from tests.support.held import ended, opened
from tests.support.waiting import wait_until

MANY = 250
START = Loop.start

pytestmark = [pytest.mark.django_db, pytest.mark.database]


@pytest.fixture(autouse=True)
def _no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test polls itself, in its own transaction."""
    monkeypatch.setattr(Loop, "start", lambda self: None)


@pytest.fixture
def poll() -> Poll:
    return Poll()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def reader_of(execution: Execution, after: int = 0, *, is_patient: bool = True) -> Reader:
    return Reader(execution.pk, after, EventBuffer(), lambda: is_patient, event_stream._is_genuine)


def say(execution: Execution, first: int, *texts: str) -> None:
    bodies = [{"seq": seq, "type": "stdout", "text": text} for seq, text in enumerate(texts, first)]
    ExecutionEvent.objects.create(
        execution=execution, first=first, last=first + len(texts) - 1, bodies=to_json(bodies)
    )


def numbers(reader: Reader) -> list[int]:
    relay: Any = reader._sink
    return [entry.seq for entry in relay.read(0, 2**62)[0]]


def statements(poll: Poll) -> int:
    with CaptureQueriesContext(
        connection,
    ) as asked:
        poll._tick()
    return len(asked)


def test_many_followers_of_one_execution_cost_as_much_as_one(
    alice: Caller, poll: Poll, stack: ExitStack
) -> None:
    execution = opened(alice)
    readers = [reader_of(execution)]
    stack.enter_context(poll.join(readers[0]))
    of_one = statements(poll)
    for _ in range(MANY - 1):
        readers.append(reader_of(execution))
        stack.enter_context(poll.join(readers[-1]))

    assert of_one == 2
    assert statements(poll) == of_one
    say(execution, 1, "a", "b")
    assert statements(poll) == of_one + 1
    assert all(numbers(each) == [1, 2] for each in readers)


def test_many_executions_are_asked_for_together(
    alice: Caller, poll: Poll, stack: ExitStack
) -> None:
    for _ in range(10):
        stack.enter_context(poll.join(reader_of(opened(alice))))
    assert statements(poll) == 2


def test_followers_share_what_was_read(alice: Caller, poll: Poll, stack: ExitStack) -> None:
    execution = opened(alice)
    readers = [reader_of(execution) for _ in range(3)]
    for each in readers:
        stack.enter_context(poll.join(each))
    say(execution, 1, "x" * 1000)
    poll._tick()

    relays: list[Any] = [each._sink for each in readers]
    assert len({id(relay.read(0, 1)[0][0]) for relay in relays}) == 1


def test_one_who_joins_later_reads_from_where_he_wants(
    alice: Caller, poll: Poll, stack: ExitStack
) -> None:
    execution = opened(alice)
    say(execution, 1, "a", "b", "c")
    say(execution, 4, "d")
    wanted = {0: [1, 2, 3, 4], 2: [3, 4], 3: [4], 4: [], 9: []}
    readers = {after: reader_of(execution, after) for after in wanted}
    for each in readers.values():
        stack.enter_context(poll.join(each))
    while statements(poll) > 2:
        pass
    assert {after: numbers(each) for after, each in readers.items()} == wanted


def test_a_slow_reader_is_not_read_for_and_holds_up_nobody(
    alice: Caller, poll: Poll, stack: ExitStack
) -> None:
    execution = opened(alice)
    slow, quick = reader_of(execution), reader_of(execution)
    for each in (slow, quick):
        stack.enter_context(poll.join(each))
    large = "x" * event_stream.AHEAD_BYTES
    found: list[int] = []
    for first in (1, 2, 3):
        say(execution, first, large)
        poll._tick()
        found += numbers(quick)
    ended(execution)
    poll._tick()

    assert found == [1, 2, 3]
    assert quick.ended.done()
    assert not slow.ended.done()
    slow_found: list[int] = []
    for _ in range(5):
        slow_found += numbers(slow)
        poll._tick()
    assert slow_found == [1, 2, 3]
    assert slow.ended.done()


def test_the_end_is_told_after_all_events_and_once(
    alice: Caller, poll: Poll, stack: ExitStack
) -> None:
    execution, other = opened(alice), opened(alice)
    reader, waiter, stays = reader_of(execution), Waiter(execution.pk), Waiter(other.pk)
    for each in (reader, waiter, stays):
        stack.enter_context(poll.join(each))
    say(execution, 1, "last")
    ended(execution)
    poll._tick()
    assert not reader.ended.done()
    assert waiter.ended.done()
    poll._tick()
    assert numbers(reader) == [1]
    assert reader.ended.done()
    assert not stays.ended.done()


def test_one_that_does_not_exist_any_more_has_ended(poll: Poll, stack: ExitStack) -> None:
    waiter = Waiter(uuid4())
    stack.enter_context(poll.join(waiter))
    poll._tick()
    assert waiter.ended.done()


def test_who_stays_hears_nothing_of_a_database_that_is_away_for_a_moment(
    alice: Caller, poll: Poll, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiter = Waiter(opened(alice).pk)
    stack.enter_context(poll.join(waiter))

    def away(_: object) -> set[Any]:
        raise OperationalError("away")

    with monkeypatch.context() as patch:
        patch.setattr(event_stream, "_unfinished_ids", away)
        poll._tick()
        assert not waiter.ended.done()
        poll._answered_at = time.monotonic() - event_stream.AWAY_SECONDS
        poll._tick()
    with pytest.raises(OperationalError):
        waiter.ended.result(0)


def test_what_cannot_be_read_ends_its_own_readers_alone(
    alice: Caller, poll: Poll, stack: ExitStack
) -> None:
    broken, whole = opened(alice), opened(alice)
    readers = [reader_of(broken), reader_of(whole)]
    for each in readers:
        stack.enter_context(poll.join(each))
    ExecutionEvent.objects.create(execution=broken, first=1, last=1, bodies="{")
    say(whole, 1, "a")
    poll._tick()
    assert readers[0].ended.exception(0) is not None
    assert numbers(readers[1]) == [1]


def test_who_waits_is_let_go_when_the_service_stops(
    alice: Caller, poll: Poll, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiter = Waiter(opened(alice).pk)
    stack.enter_context(poll.join(waiter))
    monkeypatch.setattr(draining, "is_draining", lambda: True)
    poll._tick()
    assert waiter.ended.done()


def test_a_call_that_waits_for_an_end_waits_for_it_also_when_the_service_stops(
    alice: Caller, poll: Poll, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    execution = opened(alice)
    waiter = Waiter(execution.pk, is_urgent=True)
    stack.enter_context(poll.join(waiter))
    monkeypatch.setattr(draining, "is_draining", lambda: True)
    poll._tick()
    assert not waiter.ended.done()
    ended(execution)
    poll._tick()
    assert waiter.ended.done()


def test_nobody_polls_when_nobody_waits(alice: Caller, poll: Poll) -> None:
    with poll.join(Waiter(opened(alice).pk)):
        assert poll._tick() is not None
    assert poll._tick() is None


def test_one_follower_asks_for_the_events_of_an_execution(
    alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_stream, "poll", Poll())
    execution, listener = opened(alice), Listener("key:1", "wonderland")
    told = [event_stream.follow(execution.pk, EventStream(NDJSON), 0, listener) for _ in range(3)]
    told[0].send(None)
    with CaptureQueriesContext(connection) as asked:
        told[1].send(None)
    assert RunSignal.objects.count() == 1
    assert not [each for each in asked.captured_queries if "runsignal" in each["sql"]]
    told[0].close()
    told[1].close()
    RunSignal.objects.all().delete()
    told[2].send(None)
    assert RunSignal.objects.count() == 1


BOUNDS: list[tuple[int, Callable[[int], tuple[Listener, int]]]] = [
    (event_stream.MOST_OF_EXECUTION, lambda n: (Listener(f"key:{n}", "wonderland"), 0)),
    (event_stream.MOST_OF_CALLER, lambda n: (Listener("key:1", "wonderland"), n)),
    (event_stream.MOST_OF_TENANT, lambda n: (Listener(f"key:{n}", "wonderland"), n)),
]


@pytest.mark.parametrize(("most", "nth"), BOUNDS)
def test_followers_have_bounds_which_others_do_not_share(
    stack: ExitStack, most: int, nth: Callable[[int], tuple[Listener, int]]
) -> None:
    executions = [uuid4() for _ in range(most + 1)]
    for number in range(most):
        listener, execution = nth(number)
        stack.enter_context(listener.hold_place(executions[execution]))
    listener, execution = nth(most)
    with pytest.raises(RateLimited, match=f"may have {most}") as refused:
        stack.enter_context(listener.hold_place(executions[execution]))

    assert refused.value.retry_after
    # Another tenant, and a person of the admin, of the very same execution.
    stack.enter_context(Listener("key:0", "elsewhere").hold_place(executions[0]))
    stack.enter_context(Listener("user:1").hold_place(executions[0]))


def test_places_are_given_back() -> None:
    listener, execution = Listener("key:1", "wonderland"), uuid4()
    for _ in range(2 * event_stream.MOST_OF_EXECUTION):
        with listener.hold_place(execution):
            pass
    assert not event_stream._followers


def test_who_follows_beyond_the_bound_is_told_so(
    alice: Caller, bob: Caller, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    execution = opened(alice)
    ended(execution)
    path = f"/api/v1/executions/{execution.pk}/events"
    monkeypatch.setattr(event_stream, "MOST_OF_CALLER", 1)
    stack.enter_context(Listener.of_key(alice.api_key).hold_place())

    refused = alice.client.get(path)
    assert (refused.status_code, refused["Retry-After"]) == (429, "5")
    assert refused.json()["error"]["code"] == "SB008"
    assert bob.client.get(path).status_code == 200


@pytest.mark.django_db(transaction=True)
def test_the_thread_finds_what_comes_and_goes_when_nobody_waits(
    alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Loop, "start", START)
    poll, execution = Poll(), opened(alice)
    reader = reader_of(execution)
    with poll.join(reader):
        say(execution, 1, "a")
        ended(execution)
        reader.ended.result(60)
    assert numbers(reader) == [1]
    wait_until(lambda: not poll._loop.is_running, 60)
    with poll.join(waiter := Waiter(execution.pk)):
        waiter.ended.result(60)
    wait_until(lambda: not poll._loop.is_running, 60)
    assert event_log.has_stored_events(execution.pk)
