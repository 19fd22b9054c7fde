"""Following an execution from its first event to its end, wherever it runs.

One of this process is read from its log. Of one elsewhere its process is asked to keep the events
where they are found, which takes it up to a second. One that ended without events is read from its
record.

One poll of the database finds the events, and the ends, for all who wait in this process. A request
that waits has no thread, and asks the database nothing while it waits. One thread asks for all of
them: which executions have ended, and which events have come. It reads new events once for all
followers who have read equally far, and hands the same objects to each.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Protocol
from uuid import UUID

from django.db import Error as DatabaseFailure

from executions.kernel.coroutines import wait_for
from executions.runs import active_runs, event_log, extensions
from executions.runs.event_log import STREAMS, Broadcast, EventLog, EventSource, RunEvent, resolve
from executions.runs.models import Approval, Execution, RunSignal
from executions.runs.results import bundles_of
from executions.tenants.models import ApiKey
from providers import draining
from providers.errors import RateLimited
from providers.threads import Loop
from providers.waiting import within

logger = logging.getLogger(__name__)

# The pause between two polls: right after something happened, and when nothing happens.
LOOK_SECONDS = 0.1
SLOW_LOOK_SECONDS = 0.5
# Those who wait are told when the database has not answered for so long.
AWAY_SECONDS = 60.0
# Of one statement, and of one poll: others have their turn after that many readings.
_IDS_AT_ONCE = 500
_READINGS_AT_ONCE = 64


class Sink(Protocol):
    """Where a follower's events go."""

    @property
    def is_full(self) -> bool: ...

    def push(self, entries: Sequence[RunEvent]) -> None: ...


class Waiter:
    """One who waits for the end of an execution.

    `ended` is done when the record is closed and all events are handed over, when the service is
    about to stop and nothing is urgent, or with what the database raised for AWAY_SECONDS.
    """

    def __init__(self, execution_id: UUID, *, is_urgent: bool = False) -> None:
        self.execution_id = execution_id
        # Whether a call waits for the end, and for nothing else.
        self.is_urgent = is_urgent
        self.ended = Broadcast()

    @property
    def is_full(self) -> bool:
        """Whether it takes no events now, and so may not hear of the end yet."""
        return False


class Undecided(Waiter):
    """One who waits for a person to decide on an approval, or for the end where that is earlier."""


class Reader(Waiter):
    """One who follows the events from behind the event `after`. They are pushed into the sink
    unless it is full; `is_patient` says that somebody empties it meanwhile, and `may_be_told` of
    an event whether anybody may hear of it."""

    def __init__(
        self,
        execution_id: UUID,
        after: int,
        sink: Sink,
        is_patient: Callable[[], bool],
        may_be_told: Callable[[UUID, RunEvent], bool],
    ) -> None:
        super().__init__(execution_id)
        self.may_be_told = may_be_told
        self.place = event_log.place_of(execution_id, after)
        # The number of the last event that was handed over.
        self.after = after
        # Whether it has asked the process that runs the execution to keep its events.
        self.has_asked = False
        self._sink = sink
        self._is_patient = is_patient

    @property
    def is_full(self) -> bool:
        return self._sink.is_full and self._is_patient()

    def take(self, place: int, entries: Sequence[RunEvent]) -> None:
        self.place = place
        if found := [entry for entry in entries if entry.seq > self.after]:
            self.after = found[-1].seq
            self._sink.push(found)


class Poll:
    """The waiters of this process, and the thread that polls for them while there are any."""

    def __init__(self) -> None:
        # Reentrant: the garbage collector may end a generator that waits, in any thread.
        self._lock = threading.RLock()
        self._waiters: dict[Waiter, None] = {}
        self._loop = Loop("executions-poll", self._tick)
        self._seconds = LOOK_SECONDS
        self._answered_at = 0.0

    @contextmanager
    def join(self, waiter: Waiter) -> Iterator[None]:
        """Have the waiter hear of what it waits for. Raises RateLimited without a thread."""
        with self._lock:
            if not self._waiters:
                self._answered_at = time.monotonic()
            self._waiters[waiter] = None
            was_slow = self._seconds > LOOK_SECONDS
            self._seconds = LOOK_SECONDS
        try:
            self._loop.start()
            if was_slow:
                self._loop.wake()
            yield
        finally:
            with self._lock:
                self._waiters.pop(waiter, None)
                is_last = not self._waiters
            if is_last:
                self._loop.wake()

    def has_asked_for(self, execution_id: UUID) -> bool:
        """Whether a reader of this process has asked for the execution's events."""
        with self._lock:
            return any(
                each.execution_id == execution_id and isinstance(each, Reader) and each.has_asked
                for each in self._waiters
            )

    def read_all(self, reader: Reader) -> bool:
        """Hand over now what is kept, as far as it is taken. Whether that was all."""
        while not reader.is_full:
            former = reader.place
            self._read_on(reader.execution_id, former, [reader])
            if reader.ended.done():
                reader.ended.result()
            if reader.place == former:
                return True
        return False

    def _tick(self) -> float | None:
        with self._lock:
            waiters = [each for each in self._waiters if not each.ended.done()]
            if not self._waiters:
                return None
        if draining.is_draining():
            resolve([each.ended for each in waiters if not each.is_urgent])
            # A call that ends a run, or has its turn after it, is still answered, and as ever: who
            # takes a run that goes on for ended would close its record without its output.
            waiters = [each for each in waiters if each.is_urgent]
        try:
            has_found, is_all = self._look(waiters)
        except DatabaseFailure as failure:
            self._wait_for_database(waiters, failure)
            return SLOW_LOOK_SECONDS
        self._answered_at = time.monotonic()
        if has_found or any(each.is_urgent for each in waiters):
            self._seconds = LOOK_SECONDS
        else:
            self._seconds = min(SLOW_LOOK_SECONDS, self._seconds * 1.25)
        return self._seconds if is_all else 0.0

    def _wait_for_database(self, waiters: Sequence[Waiter], failure: DatabaseFailure) -> None:
        seconds = time.monotonic() - self._answered_at
        logger.info("streams of executions wait for the database: %s", failure)
        if seconds >= AWAY_SECONDS:
            for each in waiters:
                fail(each, failure)

    def _look(self, waiters: Sequence[Waiter]) -> tuple[bool, bool]:
        """Tell each waiter what is new. Whether there was something, and whether that was all."""
        # In this order: what has ended by now has left all of its events.
        unfinished = _unfinished_ids({each.execution_id for each in waiters})
        asked = {each.execution_id for each in waiters if isinstance(each, Undecided)}
        undecided = unfinished & _undecided_ids(asked)
        full = {each for each in waiters if each.is_full}
        readers = [each for each in waiters if isinstance(each, Reader) and each not in full]
        places: dict[UUID, int] = {}
        for each in readers:
            places[each.execution_id] = min(each.place, places.get(each.execution_id, each.place))
        latest = event_log.latest_places(places)

        def is_behind(each: Waiter) -> bool:
            return isinstance(each, Reader) and each.place < latest.get(each.execution_id, 0)

        groups: dict[tuple[UUID, int], list[Reader]] = {}
        for each in filter(is_behind, readers):
            groups.setdefault((each.execution_id, each.place), []).append(each)
        over = [
            each
            for each in waiters
            if each.execution_id not in (undecided if isinstance(each, Undecided) else unfinished)
            and not (each in full or is_behind(each))
        ]
        for (execution_id, place), group in islice(groups.items(), _READINGS_AT_ONCE):
            self._read_on(execution_id, place, group)
            self._put_last(group)
        resolve([each.ended for each in over])
        is_all = not any(is_behind(each) and not each.is_full for each in readers)
        return bool(groups or over), is_all

    def _put_last(self, readers: Sequence[Reader]) -> None:
        """Have the others go before these at the next poll."""
        with self._lock:
            for each in readers:
                if each in self._waiters:
                    self._waiters[each] = self._waiters.pop(each)

    def _read_on(self, execution_id: UUID, place: int, readers: Sequence[Reader]) -> None:
        try:
            place, found = event_log.read_behind(execution_id, place)
            # The same for all of them.
            may_be_told = readers[0].may_be_told
            told = [entry for entry in found if may_be_told(execution_id, entry)]
        except DatabaseFailure:
            raise
        except Exception as error:
            logger.exception("events of execution %s cannot be sent", execution_id)
            for reader in readers:
                fail(reader, error)
            return
        for reader in readers:
            reader.take(place, told)


poll = Poll()


async def wait_for_end(execution_id: UUID, seconds: float) -> None:
    """Wait until the record is closed, for so many seconds at most."""
    if not _unfinished_ids({execution_id}):
        return
    record, ended = Waiter(execution_id, is_urgent=True), Future[None]()
    record.ended.bring(ended)
    with poll.join(record):
        await wait_for(within(seconds, ended))


def fail(waiter: Waiter, error: Exception) -> None:
    if not waiter.ended.done():
        waiter.ended.set_exception(error)


def _unfinished_ids(ids: set[UUID]) -> set[UUID]:
    found: set[UUID] = set()
    wanted = list(ids)
    for start in range(0, len(wanted), _IDS_AT_ONCE):
        some = wanted[start : start + _IDS_AT_ONCE]
        rows = Execution.objects.filter(pk__in=some, finished_at=None)
        found.update(rows.values_list("pk", flat=True))
    return found


def _undecided_ids(ids: set[UUID]) -> set[UUID]:
    found: set[UUID] = set()
    wanted = list(ids)
    for start in range(0, len(wanted), _IDS_AT_ONCE):
        some = wanted[start : start + _IDS_AT_ONCE]
        rows = Approval.objects.filter(execution__in=some, status=Approval.Status.WAITING)
        found.update(rows.values_list("execution_id", flat=True))
    return found


# What is fetched ahead of the client.
AHEAD_BYTES = 256 * 1024
# Streams that follow in one process of the web server: of one execution, for one key or person, and
# for one tenant. Each holds a connection, a task and AHEAD_BYTES; an execution has few readers.
MOST_OF_EXECUTION, MOST_OF_CALLER, MOST_OF_TENANT = 64, 128, 256
RETRY_AFTER_SECONDS = 5.0


class Follower(Protocol):
    """Where the events go."""

    left: Broadcast
    is_waited_for: bool

    def begin(self, source: EventSource) -> None: ...


class EventBuffer:
    """Events on their way from the database to one client."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: list[RunEvent] = []
        self._has_ended = False
        self._changed: Future[None] = Future()

    @property
    def is_full(self) -> bool:
        with self._lock:
            return sum(entry.size for entry in self._entries) >= AHEAD_BYTES

    @property
    def has_some(self) -> bool:
        with self._lock:
            return bool(self._entries)

    def push(self, entries: Sequence[RunEvent]) -> None:
        with self._lock:
            self._entries += entries
            changed = self._changed
        resolve([changed])

    def end(self) -> None:
        with self._lock:
            self._has_ended = True

    def read(self, after: int, most_bytes: int) -> tuple[Sequence[RunEvent], bool]:
        with self._lock:
            count = 0
            for entry in self._entries:
                count += 1
                most_bytes -= entry.size
                if most_bytes <= 0:
                    break
            found, self._entries = self._entries[:count], self._entries[count:]
            return found, self._has_ended and not self._entries

    def next_change(self, after: int) -> Future[None]:
        with self._lock:
            changed = self._changed = Future()
            is_there = bool(self._entries)
        if is_there:
            resolve([changed])
        return changed


@dataclass(frozen=True)
class Listener:
    """For whom somebody follows. `caller` is a key or a person; a person of the admin has no
    tenant, and takes no place of the tenant whose execution it is."""

    caller: str
    tenant_slug: str = ""

    @classmethod
    def of_key(cls, key: ApiKey) -> Listener:
        return cls(f"key:{key.pk}", key.tenant.slug)

    @contextmanager
    def hold_place(self, execution_id: UUID | None = None) -> Iterator[None]:
        """Take a place among the followers of this process, of this execution where there is one
        already. Raises RateLimited beyond a bound."""
        bounds = [
            (("caller", self.caller, ""), MOST_OF_CALLER),
            (("tenant", self.tenant_slug, ""), MOST_OF_TENANT),
        ]
        if execution_id is not None:
            place = ("execution", self.tenant_slug, str(execution_id))
            bounds.insert(0, (place, MOST_OF_EXECUTION))
        taken = [place for place, _ in bounds]
        with _counting:
            for place, most in bounds:
                if _followers[place] >= most:
                    raise RateLimited(
                        f"Too many streams are open: one {place[0]} may have {most}. Close some of "
                        "them.",
                        retry_after=RETRY_AFTER_SECONDS,
                    )
            _followers.update(taken)
        try:
            yield
        finally:
            with _counting:
                _followers.subtract(taken)
                for place in taken:
                    if not _followers[place]:
                        del _followers[place]


# Reentrant: the garbage collector may end a generator that follows, in any thread.
_counting = threading.RLock()
_followers: Counter[tuple[str, str, str]] = Counter()


async def follow(execution_id: UUID, follower: Follower, after: int, listener: Listener) -> None:
    """Hand what follows the event `after` to the follower, until the execution has ended or he has
    left, or the service is about to stop.

    Raises RateLimited where too many follow already, before anything is handed over.
    """
    with listener.hold_place(execution_id):
        run = active_runs.find(execution_id)
        if run is not None and run.log is not None and run.log.has_begun:
            follower.begin(run.log)
            await wait_for(first_of(run.log.closed, follower.left))
            return
        if (log := event_log.log_of(execution_id)) is not None:
            follower.begin(log)
            await _wait_until_recorded(execution_id, log, follower)
            return
        relay = EventBuffer()
        follower.begin(relay)
        await _relay(execution_id, relay, follower, after)
        relay.end()


async def _wait_until_recorded(execution_id: UUID, log: EventLog, follower: Follower) -> None:
    """A process in the background may outlive ours, which does not wait for it."""
    record = Waiter(execution_id)
    with poll.join(record):
        while not (follower.left.done() or draining.is_draining()):
            if not record.ended.done():
                await wait_for(first_of(record.ended, follower.left))
                continue
            record.ended.result()
            if log.closed.done():
                return
            # Its log is closed at any moment. This asks the database nothing.
            await wait_for(first_of(log.closed, follower.left, seconds=SLOW_LOOK_SECONDS))


async def _relay(execution_id: UUID, relay: EventBuffer, follower: Follower, after: int) -> None:
    is_open = Execution.objects.filter(pk=execution_id, finished_at=None).exists()
    reader = Reader(execution_id, after, relay, lambda: follower.is_waited_for, _is_genuine)
    has_all = poll.read_all(reader)
    if is_open or not has_all:
        with poll.join(reader):
            if is_open and not poll.has_asked_for(execution_id):
                active_runs.post_request(execution_id, RunSignal.Kind.FOLLOW, "whoever follows")
                reader.has_asked = True
            while not (follower.left.done() or reader.ended.done()):
                await wait_for(first_of(reader.ended, follower.left))
            if follower.left.done() or draining.is_draining():
                return
            reader.ended.result()
    if not event_log.has_stored_events(execution_id):
        relay.push([entry for entry in recorded_events(execution_id) if entry.seq > reader.after])


def _is_genuine(execution_id: UUID, entry: RunEvent) -> bool:
    """Whoever hears of a call carries it out: of one that the ledger does not know nobody does."""
    said = entry.said or {}
    if entry.type != "tool_call" or any(
        each.vouches_for(execution_id, entry.type, said) for each in extensions.installed()
    ):
        return True
    logger.error(
        "an event of execution %s does not match the ledger",
        execution_id,
        extra={"alert": "tool_call_altered"},
    )
    return False


def recorded_events(execution_id: UUID) -> Iterator[RunEvent]:
    """Return the events of an ended execution, as far as its record tells them."""
    execution = Execution.objects.only(*STREAMS, "outputs", "output_order").get(pk=execution_id)
    yield RunEvent(1, "started", said={"id": str(execution_id)})
    seq = 1
    for stream, data in in_order(execution):
        seq += 1
        yield RunEvent(seq, stream, data)
    for output in bundles_of(execution):
        seq += 1
        yield RunEvent(seq, "output", said={"data": output})


def in_order(execution: Execution) -> Iterator[tuple[str, bytes]]:
    """Both streams in the pieces in which they came; one after the other where that is unknown."""
    texts = {stream: getattr(execution, stream).encode() for stream in STREAMS}
    begin = dict.fromkeys(STREAMS, 0)
    for number, size in execution.output_order or ():
        stream = STREAMS[number - 1]
        piece = texts[stream][begin[stream] : begin[stream] + size]
        begin[stream] += size
        if piece:
            yield stream, piece
    for stream, text in texts.items():
        if rest := text[begin[stream] :]:
            yield stream, rest


def first_of(*moments: Broadcast, seconds: float | None = None) -> Future[None]:
    """Done with the first of them, whatever came of it, or after so many seconds."""
    first: Future[None] = Future()
    for moment in moments:
        moment.bring(first)
    if seconds is not None:
        within(seconds, first).add_done_callback(lambda _: resolve([first]))
    return first
