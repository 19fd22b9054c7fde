"""Following an execution from its first event to its end, wherever it runs.

One of this process is read from its log. Of one elsewhere its process is asked to keep the events
where they are found (`kept_events`), which takes it up to a second; one poll finds them for all who
follow (`polling`). One that ended without, is told from its record.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol
from uuid import UUID

from executions.kernel.background import wait_for
from executions.runs import active_runs, event_log, extensions, output_collector, polling
from executions.runs.event_log import STREAMS, Broadcast, EventLog, EventSource, RunEvent, resolve
from executions.runs.models import Execution, RunSignal
from executions.runs.results import bundles_of
from executions.tenants.models import ApiKey
from providers import draining
from providers.errors import RateLimited
from providers.waiting import within

logger = logging.getLogger(__name__)

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

    def changed(self, after: int) -> Future[None]:
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
    def counted(self, execution_id: UUID | None = None) -> Iterator[None]:
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


async def following(execution_id: UUID, follower: Follower, after: int, listener: Listener) -> None:
    """Hand what follows the event `after` to the follower, until the execution has ended or he has
    left, or the service is about to stop.

    Raises RateLimited where too many follow already, before anything is handed over.
    """
    with listener.counted(execution_id):
        run = active_runs.find(execution_id)
        if run is not None and run.log is not None and run.log.has_begun:
            follower.begin(run.log)
            await wait_for(first_of(run.log.closed, follower.left))
            return
        if (log := output_collector.log_of(execution_id)) is not None:
            follower.begin(log)
            await _until_recorded(execution_id, log, follower)
            return
        relay = EventBuffer()
        follower.begin(relay)
        await _relaying(execution_id, relay, follower, after)
        relay.end()


async def _until_recorded(execution_id: UUID, log: EventLog, follower: Follower) -> None:
    """A process in the background may outlive ours, which does not wait for it."""
    record = polling.Waiter(execution_id)
    with polling.poll.joined(record):
        while not (follower.left.done() or draining.is_draining()):
            if not record.ended.done():
                await wait_for(first_of(record.ended, follower.left))
                continue
            record.ended.result()
            if log.closed.done():
                return
            # Its log is closed at any moment. This asks the database nothing.
            await wait_for(first_of(log.closed, follower.left, seconds=polling.SLOW_LOOK_SECONDS))


async def _relaying(execution_id: UUID, relay: EventBuffer, follower: Follower, after: int) -> None:
    is_open = Execution.objects.filter(pk=execution_id, finished_at=None).exists()
    reader = polling.Reader(
        execution_id, after, relay, lambda: follower.is_waited_for, _may_be_told
    )
    has_all = polling.poll.read_all(reader)
    if is_open or not has_all:
        with polling.poll.joined(reader):
            if is_open and not polling.poll.has_asked_for(execution_id):
                active_runs.post_request(execution_id, RunSignal.Kind.FOLLOW, "whoever follows")
                reader.has_asked = True
            while not (follower.left.done() or reader.ended.done()):
                await wait_for(first_of(reader.ended, follower.left))
            if follower.left.done() or draining.is_draining():
                return
            reader.ended.result()
    if not event_log.are_kept(execution_id):
        relay.push([entry for entry in recorded(execution_id) if entry.seq > reader.after])


def _may_be_told(execution_id: UUID, entry: RunEvent) -> bool:
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


def recorded(execution_id: UUID) -> Iterator[RunEvent]:
    """The events of an ended execution, as far as its record tells them."""
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
