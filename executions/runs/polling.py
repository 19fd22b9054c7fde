"""One poll of the database for all who wait in this process for executions that run elsewhere.

A request that waits has no thread, and asks the database nothing while it waits. One thread asks
for all of them: which executions have ended, and which events have come. It reads new events once
for all followers who have read equally far, and hands the same objects to each.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import islice
from typing import Protocol
from uuid import UUID

from django.db import Error as DatabaseFailure

from executions.kernel.background import wait_for
from executions.runs import event_log
from executions.runs.event_log import Broadcast, RunEvent, resolve
from executions.runs.models import Execution
from providers import draining
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
    def joined(self, waiter: Waiter) -> Iterator[None]:
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
        unfinished = _unfinished({each.execution_id for each in waiters})
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
            if each.execution_id not in unfinished and not (each in full or is_behind(each))
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


async def until_ended(execution_id: UUID, seconds: float) -> None:
    """Wait until the record is closed, for so many seconds at most."""
    if not _unfinished({execution_id}):
        return
    record, ended = Waiter(execution_id, is_urgent=True), Future[None]()
    record.ended.bring(ended)
    with poll.joined(record):
        await wait_for(within(seconds, ended))


def fail(waiter: Waiter, error: Exception) -> None:
    if not waiter.ended.done():
        waiter.ended.set_exception(error)


def _unfinished(ids: set[UUID]) -> set[UUID]:
    found: set[UUID] = set()
    wanted = list(ids)
    for start in range(0, len(wanted), _IDS_AT_ONCE):
        some = wanted[start : start + _IDS_AT_ONCE]
        rows = Execution.objects.filter(pk__in=some, finished_at=None)
        found.update(rows.values_list("pk", flat=True))
    return found
