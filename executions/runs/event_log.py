"""The events of a run, in memory and in the database, and the threads that follow background
processes so that their records end when they do.

Each has a thread for as long as it runs, which may be a day: none of those that calls of providers
are waited for in, which are everybody's. Beyond a tenant's share nobody follows, and the schedule
records the ends.
"""

from __future__ import annotations

import json
import logging
import threading
from binascii import a2b_base64, b2a_base64
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import reduce
from operator import or_
from typing import Any, Protocol
from uuid import UUID

from django.db import Error as DatabaseFailure
from django.db import IntegrityError
from django.db.models import Max, Q
from django.db.models.functions import Now

from executions.kernel.background import Shares
from executions.kernel.database import delete_in_batches
from executions.kernel.text import from_json, storable
from executions.runs.models import ExecutionEvent
from executions.runs.network import attempt_shape, checked_attempt
from executions.runs.results import MOST_PIECES, MOST_VALUES, bundle_text, values_in
from executions.runs.shapes import NetworkAttemptShape
from providers.network import MOST_LISTED
from providers.threads import Loop, NoThreadLeft, reset_after_fork, start_thread
from providers.values import Event, ExecutionResult, RunLimits

logger = logging.getLogger(__name__)

# How large an event of text gets by joining, as long as there are few that nobody was given.
JOINED_BYTES = 64 * 1024
# From so many on text is added to the last one of its stream, which the other may have come after.
MOST_UNREAD = 256
# So many are kept for whoever comes later; the record has all of what they held.
MOST_KEPT = 8192
STREAMS = ("stdout", "stderr")


@dataclass
class RunEvent:
    """One event. `data` is the bytes of a stream; what else it says is in `said`."""

    seq: int
    type: str
    data: bytes = b""
    said: Mapping[str, Any] | None = None

    @property
    def size(self) -> int:
        return len(self.data) + 128 + sum(len(str(value)) for value in (self.said or {}).values())

    @classmethod
    def of_body(cls, body: Mapping[str, Any]) -> RunEvent:
        """One that was kept as JSON."""
        rest = {name: body[name] for name in body if name not in ("seq", "type")}
        return cls(body["seq"], body["type"], said=rest)

    @classmethod
    def of_stored(cls, body: Mapping[str, Any]) -> RunEvent:
        """The same, with the bytes of a stream as they came."""
        if body["type"] not in STREAMS:
            return cls.of_body(body)
        data = a2b_base64(coded) if (coded := body.get("data_base64")) else body["text"].encode()
        return cls(body["seq"], body["type"], data)

    def body(self) -> dict[str, Any]:
        """As JSON for clients. Bytes that are no UTF-8 come beside their text."""
        body: dict[str, Any] = {"seq": self.seq, "type": self.type, **(self.said or {})}
        if self.said is None:
            try:
                body["text"] = self.data.decode()
            except UnicodeDecodeError:
                body["text"] = self.data.decode("utf-8", "replace")
                body["data_base64"] = b2a_base64(self.data, newline=False).decode()
        return body


class EventSource(Protocol):
    """Where a stream takes its events from."""

    def read(self, after: int, most_bytes: int) -> tuple[Sequence[RunEvent], bool]:
        """Those that follow `after`, and whether they are the last there will be."""

    def next_change(self, after: int) -> Future[None]:
        """Done when `read` may have something else to say. Who waits no longer cancels it."""


def resolve(futures: Iterable[Future[None]]) -> None:
    """Have them done, outside of any lock: what they call may want it."""
    for future in futures:
        # Whoever waited may have given up, or was told already.
        with suppress(InvalidStateError):
            future.set_result(None)


class Broadcast(Future[None]):
    """What comes once, and is waited for by many, or by one again and again.

    Each has a future of his own for it. A callback would be held until it comes, which may be a
    day, whoever has gone by then.
    """

    def __init__(self) -> None:
        super().__init__()
        self._waiting = waiting = set[Future[None]]()
        self.add_done_callback(lambda _: resolve(list(waiting)))

    def bring(self, future: Future[None]) -> None:
        """Have a future be done when this comes. One that is done before is held no longer."""
        self._waiting.add(future)
        future.add_done_callback(self._waiting.discard)
        # Either this is seen here, or the future there.
        if self.done():
            resolve([future])


class EventLog:
    """The events of one run of this process. Any thread may add to it and read from it."""

    def __init__(self, limits: RunLimits) -> None:
        self.execution_id: UUID | None = None
        # Whether it is to be found by other processes too, and for a while after the end.
        self.is_kept = False
        self.on_begin: Callable[[], object] = lambda: None
        self.writing = threading.Lock()
        self.written = 0
        # Done when nothing more comes, and the record is closed as far as it can be.
        self.closed = Broadcast()
        self._lock = threading.Lock()
        self._waiting: set[Future[None]] = set()
        self._entries: list[RunEvent] = []
        self._next = 1
        self._given = 0
        self._has_ended = False
        self._texts = {stream: bytearray() for stream in STREAMS}
        self._held = dict.fromkeys(STREAMS, b"")
        self._outputs: list[str] = []
        self._attempts = 0
        self.set_limits(limits)
        self._order: list[list[int]] = []
        self._is_ordered = True

    @property
    def has_begun(self) -> bool:
        return self.execution_id is not None

    @property
    def has_ended(self) -> bool:
        return self._has_ended

    def set_limits(self, limits: RunLimits) -> None:
        """Take the limits of the run, before anything comes of it."""
        self._limits = limits
        self._outputs_room = limits.rich_output_bytes * 4 // 3 + 4096

    def begin(self, execution_id: UUID) -> None:
        """The record is there: from now on it can be followed."""
        self.execution_id = execution_id
        self._add(lambda: self._append("started", said={"id": str(execution_id)}))
        self.on_begin()

    def restore(self, execution_id: UUID, entries: Sequence[RunEvent]) -> None:
        """Take over the events that another process has written of it, before anything comes here.
        What comes goes on with their numbers."""
        with self._lock:
            self.execution_id = execution_id
            for entry in entries:
                if entry.type in STREAMS:
                    self._put_out(entry.type, entry.data)
            self._entries, self._held = list(entries), dict.fromkeys(STREAMS, b"")
            self._next = entries[-1].seq + 1
            self._given = self.written = entries[-1].seq

    def emit(self, event: Event) -> None:
        """What a provider says has come. Never raises and never waits."""
        if not isinstance(event, Event):
            return
        if event.type in STREAMS and isinstance(event.data, bytes):
            self._add(lambda: self._put_out(event.type, event.data))
        elif event.type == "output" and (text := bundle_text(event.output)):
            self._add(lambda: self._show(text))
        elif event.type == "network" and (attempt := checked_attempt(event.attempt)):
            self._add(lambda: self._try_host(attempt_shape(attempt)))

    def _try_host(self, attempt: NetworkAttemptShape) -> None:
        # As many as the record lists.
        if self._attempts < MOST_LISTED:
            self._attempts += 1
            self._append("network", said={"attempt": attempt})

    def say(self, kind: str, said: Mapping[str, Any]) -> None:
        """Tell what is neither output nor result, once the record is there."""
        self._add(lambda: self._append(kind, said=said))

    def put_out(self, result: ExecutionResult) -> None:
        """Tell what a provider did not tell while it ran, or not in full. Checked by the gate."""
        self._add(lambda: self._put_out_rest(result))

    def finish(self) -> None:
        """Nothing more comes."""

        def end() -> None:
            for stream in STREAMS:
                self._let_go(stream)
            self._has_ended = True

        self._add(end)

    def text_of(self, stream: str) -> str:
        """Return what has come of a stream by now, as a record has it."""
        with self._lock:
            return storable(self._texts[stream].decode("utf-8", "replace"))

    def outputs_json(self) -> str:
        with self._lock:
            return f"[{','.join(self._outputs)}]" if self._outputs else ""

    def order(self) -> list[list[int]] | None:
        """In which order the bytes of stdout (1) and stderr (2) came, as which and how many; None
        where it is not known."""
        with self._lock:
            return [list(part) for part in self._order] or None

    def read(self, after: int, most_bytes: int) -> tuple[Sequence[RunEvent], bool]:
        with self._lock:
            found: list[RunEvent] = []
            first = self._entries[0].seq if self._entries else self._next
            for entry in self._entries[max(0, after + 1 - first) :]:
                found.append(entry)
                most_bytes -= entry.size
                if most_bytes <= 0:
                    break
            last = found[-1].seq if found else after
            self._given = max(self._given, found[-1].seq if found else 0)
            return found, self._has_ended and last >= self._next - 1

    def next_change(self, after: int) -> Future[None]:
        future: Future[None] = Future()
        with self._lock:
            is_there = self._next - 1 > after
            if not is_there:
                self._waiting.add(future)
        if is_there:
            resolve([future])
        else:
            future.add_done_callback(self._let_go_of)
        return future

    def _let_go_of(self, future: Future[None]) -> None:
        with self._lock:
            self._waiting.discard(future)

    def _add(self, add: Any) -> None:
        with self._lock:
            if self._has_ended:
                return
            before, size = self._next, self._size_of_last()
            add()
            told: set[Future[None]] = set()
            if self._has_ended or self._next != before or self._size_of_last() != size:
                told, self._waiting = self._waiting, told
        resolve(told)

    def _size_of_last(self) -> int:
        return len(self._entries[-1].data) if self._entries else 0

    def _put_out(self, stream: str, data: bytes) -> None:
        text = self._texts[stream]
        data = data[: self._limits.output_bytes - len(text)]
        if not data:
            return
        text += data
        number = STREAMS.index(stream) + 1
        if not self._is_ordered:
            pass
        elif self._order and self._order[-1][0] == number:
            self._order[-1][1] += len(data)
        else:
            self._order.append([number, len(data)])
            if len(self._order) > MOST_PIECES:
                self._order, self._is_ordered = [], False
        whole, self._held[stream] = whole_characters(self._held[stream] + data)
        if whole:
            self._append(stream, whole)

    def _put_out_rest(self, result: ExecutionResult) -> None:
        for stream in STREAMS:
            self._let_go(stream)
            text = getattr(result, stream)
            told = storable(self._texts[stream].decode("utf-8", "replace"))
            if len(text) > len(told) and text.startswith(told):
                self._append(stream, text[len(told) :].encode())
        for output in result.outputs[len(self._outputs) :]:
            self._append("output", said={"data": output})

    def _let_go(self, stream: str) -> None:
        """Of a character whose rest does not come."""
        if held := self._held[stream]:
            self._held[stream] = b""
            self._append(stream, held)

    def _show(self, text: str) -> None:
        if len(self._outputs) >= self._limits.rich_output_count or len(text) > self._outputs_room:
            return
        self._outputs_room -= len(text)
        self._outputs.append(text)
        if values_in(text) > MOST_VALUES:
            # The record has it.
            return
        self._append("output", said={"data": from_json(text)})

    def _append(self, kind: str, data: bytes = b"", said: Mapping[str, Any] | None = None) -> None:
        if said is None and (entry := self._joinable(kind, len(data))):
            entry.data += data
            return
        self._entries.append(RunEvent(self._next, kind, data, said))
        self._next += 1
        if len(self._entries) >= 2 * MOST_KEPT:
            del self._entries[:MOST_KEPT]

    def _joinable(self, kind: str, size: int) -> RunEvent | None:
        """The event of the same stream to which text is added, of those that nobody was given."""
        unread = min(self._next - 1 - self._given, len(self._entries))
        if not unread:
            return None
        last = self._entries[-1]
        if last.type == kind and len(last.data) + size <= JOINED_BYTES:
            return last
        if unread < MOST_UNREAD:
            return None
        newest_first = reversed(self._entries[-unread:])
        return next((entry for entry in newest_first if entry.type == kind), None)


def whole_characters(data: bytes) -> tuple[bytes, bytes]:
    """The bytes up to a character of UTF-8 that they end within, and the rest."""
    for back in range(1, min(3, len(data)) + 1):
        byte = data[-back]
        if byte & 0xC0 == 0x80:
            continue
        needed = 2 if 0xC2 <= byte < 0xE0 else 3 if byte & 0xF0 == 0xE0 else 4
        if 0xC2 <= byte < 0xF5 and needed > back:
            return data[:-back], data[-back:]
        break
    return data, b""


# How often what has come meanwhile is written.
WRITE_SECONDS = 0.1
# How long after the end it is kept.
KEPT = timedelta(minutes=1)
_BATCH_BYTES = 256 * 1024
# Of one statement.
_EXECUTIONS_AT_ONCE = 100


def write(log: EventLog) -> None:
    """Write what was not written yet. Raises what the database does."""
    with log.writing:
        while log.execution_id is not None:
            entries, _ = log.read(log.written, _BATCH_BYTES)
            if not entries:
                return
            ExecutionEvent.objects.create(
                execution_id=log.execution_id,
                first=entries[0].seq,
                last=entries[-1].seq,
                # Not `to_json`: what it has bounded is a little deeper within an event.
                bodies=json.dumps(
                    [entry.body() for entry in entries], ensure_ascii=False, separators=(",", ":")
                ),
            )
            log.written = entries[-1].seq


def write_rest(log: EventLog) -> None:
    """Write the end of what is kept. The run matters more: it is told where it cannot be."""
    _writer.leave(log)
    if not log.is_kept:
        return
    try:
        write(log)
    except DatabaseFailure as failure:
        logger.warning("events of execution %s are not kept: %s", log.execution_id, failure)
    except Exception:
        logger.exception("events of execution %s cannot be kept", log.execution_id)


def place_of(execution_id: UUID, after: int) -> int:
    """Behind which place the rows have the events that follow `after`.

    A place is the number of a row's first event, by which rows are found through an index.
    """
    if not after:
        return 0
    rows = ExecutionEvent.objects.filter(execution=execution_id, first__lte=after)
    first = rows.order_by("-first").values_list("first", flat=True).first()
    return 0 if first is None else first - 1


def latest_places(places: Mapping[UUID, int]) -> dict[UUID, int]:
    """The last place of each execution that has rows behind the place that is given for it."""
    found: dict[UUID, int] = {}
    wanted = list(places.items())
    for start in range(0, len(wanted), _EXECUTIONS_AT_ONCE):
        some = wanted[start : start + _EXECUTIONS_AT_ONCE]
        behind = reduce(or_, (Q(execution=pk, first__gt=place) for pk, place in some))
        rows = ExecutionEvent.objects.filter(behind).order_by()
        found.update(rows.values_list("execution_id").annotate(Max("first")))
    return found


def read_behind(execution_id: UUID, place: int) -> tuple[int, Sequence[RunEvent]]:
    """The next row's place and its events; nothing, and the same place, where there is none."""
    rows = ExecutionEvent.objects.filter(execution=execution_id, first__gt=place)
    row = rows.order_by("first").values_list("first", "bodies").first()
    if row is None:
        return place, []
    return row[0], [RunEvent.of_body(body) for body in from_json(row[1])]


def stored_events(execution_id: UUID) -> list[RunEvent]:
    """Return all that is kept of an execution, from its first event on to the first gap."""
    rows = ExecutionEvent.objects.filter(execution=execution_id).order_by("first")
    found: list[RunEvent] = []
    for first, bodies in rows.values_list("first", "bodies"):
        if first != len(found) + 1:
            break
        found += [RunEvent.of_stored(body) for body in from_json(bodies)]
    return found


def has_stored_events(execution_id: UUID) -> bool:
    return ExecutionEvent.objects.filter(execution=execution_id).exists()


def forget_old() -> int:
    """Remove those of executions that ended long enough ago. How many rows."""
    old = ExecutionEvent.objects.filter(execution__finished_at__lt=Now() - KEPT)
    return delete_in_batches(old)


def follow(log: EventLog) -> None:
    """Write the events of a run while it lasts: somebody follows it elsewhere."""
    log.is_kept = True
    _writer.take(log)


class _Writer:
    """One thread that writes for all runs that are followed, as long as there are any."""

    def __init__(self) -> None:
        self._loop = Loop("events", self._write_all)
        self._forget()
        reset_after_fork(self._forget)

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._logs: set[EventLog] = set()

    def take(self, log: EventLog) -> None:
        with self._lock:
            if log.has_ended:
                return
            self._logs.add(log)
        # Without a thread whoever follows asks again.
        self._loop.start_if_possible()

    def leave(self, log: EventLog) -> None:
        with self._lock:
            self._logs.discard(log)

    def _write_all(self) -> float | None:
        with self._lock:
            logs = list(self._logs)
        for log in logs:
            try:
                write(log)
            except IntegrityError:
                # Another process writes them by now, for the client that went there.
                log.is_kept = False
                self.leave(log)
            except DatabaseFailure as failure:
                logger.info("events wait for the database: %s", failure)
            except Exception:
                # Of one run alone: the others are written on.
                logger.exception("events of %s cannot be written", log.execution_id)
                self.leave(log)
        return WRITE_SECONDS if logs else None


_writer = _Writer()


# Of one tenant, and of all.
MOST_OF_ONE, MOST = 32, 256

_lock = threading.Lock()
_ends: dict[UUID, Callable[[], bool]] = {}
_logs: dict[UUID, EventLog] = {}
shares = Shares(MOST, MOST_OF_ONE)


def begin(
    tenant_slug: str,
    execution_id: UUID,
    end: Callable[[], bool],
    follow: Callable[[], None],
    log: EventLog,
) -> bool:
    """Have `follow` be done in a thread of its own. Whether there was one left.

    `end` records the execution as cancelled, with the output that was seen of it so far.
    What comes of it is in `log`.
    """
    if not shares.take(tenant_slug):
        return False
    with _lock:
        _ends[execution_id] = end
        _logs[execution_id] = log

    def let_go() -> None:
        with _lock:
            _ends.pop(execution_id, None)
            _logs.pop(execution_id, None)
        shares.give_back(tenant_slug)

    try:
        start_thread("follow-process", follow, at_end=let_go)
    except NoThreadLeft:
        return False
    return True


def log_of(execution_id: UUID) -> EventLog | None:
    with _lock:
        return _logs.get(execution_id)


def ids() -> list[UUID]:
    """The executions that are followed here."""
    with _lock:
        return list(_logs)


def has(execution_id: UUID) -> bool:
    return execution_id in _ends


def take(execution_id: UUID) -> Callable[[], bool]:
    """Have it be recorded by nobody but the caller: what records it as cancelled, and says whether
    it did. Of one that this process does not follow, that does nothing.
    """
    with _lock:
        return _ends.pop(execution_id, lambda: False)
