"""Following an execution from its first event to its end, wherever it runs.

One of this process is read from its log. Of one elsewhere its process is asked to keep the events
where they are found (`kept_events`), which takes it up to a second. One that ended without, is told
from its record.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Protocol
from uuid import UUID

from executions.models import Execution, RunSignal
from executions.services import kept_events, ongoing, signals
from executions.services.live import STREAMS, Entry, EventLog, Moment, Source, tell
from executions.services.sessions import followers
from executions.services.tools.calls import was_handed_out
from executions.services.waiting import Waits
from executions.text import from_json
from providers.waiting import within
from sandbox_site import draining

logger = logging.getLogger(__name__)

# How often it is looked for more, from right after there was some to when nothing comes.
LOOK_SECONDS = 0.1
SLOW_LOOK_SECONDS = 0.5
# What is fetched ahead of the client.
AHEAD_BYTES = 256 * 1024


class Follower(Protocol):
    """Where the events go."""

    left: Moment
    is_waited_for: bool

    def begin(self, source: Source) -> None: ...


class Relay:
    """Events on their way from the database to one client."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: list[Entry] = []
        self._has_ended = False
        self._changed: Future[None] = Future()

    @property
    def is_full(self) -> bool:
        with self._lock:
            return sum(entry.size for entry in self._entries) >= AHEAD_BYTES

    def push(self, entries: Sequence[Entry]) -> None:
        with self._lock:
            self._entries += entries
            changed = self._changed
        tell([changed])

    def end(self) -> None:
        with self._lock:
            self._has_ended = True

    def read(self, after: int, most_bytes: int) -> tuple[Sequence[Entry], bool]:
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
            tell([changed])
        return changed


def following(execution_id: UUID, follower: Follower, after: int) -> Waits[None]:
    """Hand what follows the event `after` to the follower, until the execution has ended or he has
    left, or the service is about to stop."""
    run = ongoing.find(execution_id)
    if run is not None and run.log is not None and run.log.has_begun:
        follower.begin(run.log)
        yield first_of(run.log.closed, follower.left)
        return
    if (log := followers.log_of(execution_id)) is not None:
        follower.begin(log)
        yield from _until_recorded(execution_id, log, follower)
        return
    relay = Relay()
    follower.begin(relay)
    yield from _relaying(execution_id, relay, follower, after)
    relay.end()


def _until_recorded(execution_id: UUID, log: EventLog, follower: Follower) -> Waits[None]:
    """A process in the background may outlive ours, which does not wait for it."""
    is_open = Execution.objects.filter(pk=execution_id, finished_at=None)
    while not follower.left.done() and not draining.is_draining():
        if log.closed.done() and not is_open.exists():
            return
        yield first_of(follower.left, seconds=SLOW_LOOK_SECONDS)


def _relaying(execution_id: UUID, relay: Relay, follower: Follower, after: int) -> Waits[None]:
    has_asked = False
    seconds = LOOK_SECONDS
    while not follower.left.done() and not draining.is_draining():
        is_open = Execution.objects.filter(pk=execution_id, finished_at=None).exists()
        if is_open and not has_asked:
            signals.leave(execution_id, RunSignal.Kind.FOLLOW, "whoever follows")
            has_asked = True
        found: Sequence[Entry] = ()
        while not (relay.is_full and follower.is_waited_for):
            if not (found := kept_events.read(execution_id, after)):
                break
            after = found[-1].seq
            relay.push([entry for entry in found if _may_be_told(execution_id, entry)])
        if not is_open and not found:
            if not kept_events.are_kept(execution_id):
                relay.push([entry for entry in recorded(execution_id) if entry.seq > after])
            return
        seconds = LOOK_SECONDS if found else min(SLOW_LOOK_SECONDS, seconds * 1.25)
        yield first_of(follower.left, seconds=seconds)


def _may_be_told(execution_id: UUID, entry: Entry) -> bool:
    """Whoever hears of a call carries it out: of one that the ledger does not know nobody does."""
    if entry.type != "tool_call" or was_handed_out(execution_id, entry.said or {}):
        return True
    logger.error(
        "the ledger does not say what an event of execution %s does",
        execution_id,
        extra={"alert": "tool_call_altered"},
    )
    return False


def recorded(execution_id: UUID) -> Iterator[Entry]:
    """The events of an ended execution, as far as its record tells them."""
    execution = Execution.objects.only(*STREAMS, "outputs", "output_order").get(pk=execution_id)
    yield Entry(1, "started", said={"id": str(execution_id)})
    seq = 1
    for stream, data in in_order(execution):
        seq += 1
        yield Entry(seq, stream, data)
    for output in from_json(execution.outputs) if execution.outputs else ():
        seq += 1
        yield Entry(seq, "output", said={"data": output})


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


def first_of(*moments: Moment, seconds: float | None = None) -> Future[None]:
    """Done with the first of them, whatever came of it, or after so many seconds."""
    first: Future[None] = Future()
    for moment in moments:
        moment.bring(first)
    if seconds is not None:
        within(seconds, first).add_done_callback(lambda _: tell([first]))
    return first
