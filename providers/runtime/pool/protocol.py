"""The host's end of the conversation with a kept sandbox: many operations over one channel.

`providers.runtime.guest.protocol` says what is said. Nothing a guest says is trusted: what answers
no operation, comes out of order, is over its bound or was not asked for ends the sandbox.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
import select
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from providers.runtime.guest import wire
from providers.runtime.guest.protocol import CHUNK_BYTES, CREDIT, EVENT_COST, MOST_OPERATIONS
from providers.runtime.guest.wire import FrameError, Parser

Parts = Sequence[tuple[str, bytes]]

# What the answer to an operation that is neither a run nor a stream may hold.
ANSWER_BYTES = 8 * 1024 * 1024
# The longest reason and name that is taken from a guest.
REASON_LIMIT, NAME_LIMIT = 500, 100
# Of an event beside its parts: the longest are two paths.
MOST_FIELDS, MOST_TEXT = 12, 16 * 1024
_CODES = frozenset({"refused", "missing", "exhausted"})


class ChannelClosed(Exception):
    """The guest's end is gone: the sandbox has ended."""


class GuestChannel(asyncio.Protocol):
    """Hands out the guest's frames one at a time.

    A guest speaks only when it is spoken to. A frame that is not due, one that is malformed and
    one over its bound close the channel, and every later use raises FrameError.
    """

    def __init__(
        self,
        take: Callable[[bytes], bytes] | None,
        before_end: Callable[[], Awaitable[None]] | None,
        greets: bool,
    ) -> None:
        self._take = take
        self._before_end = before_end
        self._ending: asyncio.Task[None] | None = None
        self._closing = False
        self._parser = Parser(limit=0)
        self._transport: asyncio.WriteTransport | None = None
        self._due = int(greets)
        self._arrived: deque[Frame] = deque()
        self._waiting: asyncio.Future[Frame] | None = None
        self._take_event: Callable[[Frame], None] | None = None
        self._receive_any: Callable[[Frame], None] | None = None
        self._may_write = asyncio.Event()
        self._may_write.set()
        self.failure: Exception | None = None
        self.closed = asyncio.get_running_loop().create_future()

    @classmethod
    async def open(
        cls,
        end: socket.socket,
        take: Callable[[bytes], bytes] | None = None,
        before_end: Callable[[], Awaitable[None]] | None = None,
        *,
        greets: bool = True,
    ) -> GuestChannel:
        """Take over `end`. Until something was sent the guest may only say that it is ready, and
        nothing where it `greets` nobody.

        `take` is given what arrives and returns the guest's own part of it. When the guest's end
        closes, `before_end` is awaited before anybody is told, so that whoever sees the end finds
        what is known of it.
        """
        loop = asyncio.get_running_loop()
        _, channel = await loop.create_connection(lambda: cls(take, before_end, greets), sock=end)
        return channel

    @property
    def ending(self) -> bool:
        """Whether the guest's end has closed, and what is known of it is still being asked for."""
        return self._ending is not None and not self.closed.done()

    @property
    def silent(self) -> bool:
        """Whether the guest has said nothing yet, its end included, that the loop has not read."""
        if self.closed.done() or self._transport is None:
            return False
        poll = select.poll()
        poll.register(self._transport.get_extra_info("socket"), select.POLLIN)
        return not poll.poll(0)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        if self._take is not None:
            data = self._take(data)
        try:
            for frame in self._parser.feed(data):
                if self._receive_any is not None:
                    self._receive_any(frame)
                    continue
                if self._take_event is not None and "event" in frame[0]:
                    self._take_event(frame)
                    continue
                if self._due == 0:
                    raise FrameError("the guest spoke out of turn")
                self._due -= 1
                self._take_event = None
                if self._waiting is not None and not self._waiting.done():
                    self._waiting.set_result(frame)
                else:
                    self._arrived.append(frame)
        except FrameError as error:
            self._fail(error)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._before_end is None or self._closing:
            self._fail(ChannelClosed())
        else:
            self._ending = asyncio.get_running_loop().create_task(self._end(self._before_end))

    async def _end(self, before_end: Callable[[], Awaitable[None]]) -> None:
        try:
            await before_end()
        finally:
            self._fail(ChannelClosed())

    def _fail(self, error: Exception) -> None:
        self.failure = self.failure or error
        self._may_write.set()
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(self.failure)
        if not self.closed.done():
            self.closed.set_result(None)
        self.close()

    def converse(self, receive: Callable[[Frame], None], limit: int) -> None:
        """From now on the guest may speak at any time, and every frame goes to `receive`.

        That raises wire.FrameError for one that is not in order, which closes the channel. Raises
        FrameError where the guest has said something already.
        """
        if self._arrived or self._due:
            raise FrameError("the guest spoke out of turn")
        self._receive_any = receive
        self._parser.limit = limit

    @property
    def limit(self) -> int:
        """How many raw bytes one frame of the guest's may have."""
        return self._parser.limit

    @limit.setter
    def limit(self, limit: int) -> None:
        self._parser.limit = limit

    def write(self, data: bytes) -> None:
        """Queue one frame of a conversation. Raises what ended the channel, if it has ended."""
        if self.failure is not None or self._transport is None:
            raise self.failure or ChannelClosed
        self._transport.write(data)

    async def drained(self) -> None:
        """Wait while more is queued than the guest has read. Returns also when it has ended."""
        await self._may_write.wait()

    def pause_writing(self) -> None:
        self._may_write.clear()

    def resume_writing(self) -> None:
        self._may_write.set()

    def close(self) -> None:
        self._closing = True
        if self._transport is not None:
            self._transport.abort()

    def send(
        self,
        data: bytes,
        answer_limit: int,
        answers: int = 1,
        take_event: Callable[[Frame], None] | None = None,
    ) -> None:
        """Queue one frame, to be answered by as many; each may have `answer_limit` raw bytes.

        Frames with an `event` that come before the first answer go to `take_event`, which raises
        FrameError for one that is not in order; without it none is due. Raises what ended the
        channel, if it has ended.
        """
        if self.failure is not None or self._transport is None:
            raise self.failure or ChannelClosed
        self._parser.limit = answer_limit
        self._due += answers
        self._take_event = take_event
        self._transport.write(data)

    async def receive(self) -> Frame:
        """The next frame. Raises ChannelClosed or FrameError."""
        if self._arrived:
            return self._arrived.popleft()
        if self.failure is not None:
            raise self.failure
        self._waiting = asyncio.get_running_loop().create_future()
        return await self._waiting


class ConversationEnded(Exception):
    """The sandbox is gone. The text is why where its guest broke the protocol, else empty."""


class Refused(Exception):
    """The guest says that it did not carry an operation out. All of it is its claim."""

    def __init__(self, code: str, reason: str, field: str | None) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason
        self.field = field


@dataclass(frozen=True)
class Allowance:
    """What a guest may send for an operation: which events, and how many bytes.

    `answer_bytes` bounds the parts of the last frame, `totals` the bytes of each kind of event
    from first to last, `count` outputs and `calls` calls of tools. An event may have CHUNK_BYTES,
    or what its total leaves where it has one.
    """

    events: frozenset[str] = frozenset()
    answer_bytes: int = ANSWER_BYTES
    totals: Mapping[str, int] | None = None
    count: int | None = None
    calls: int = 0


PLAIN = Allowance()


class Operation:
    """One operation under way. `answer` is its last frame, or why there is none.

    With `on_event` events are handed over as they come and the guest's credit is renewed at once:
    a run, whose bounds are totals. Otherwise they wait to be taken, and so does the credit.
    """

    def __init__(
        self,
        conversation: Conversation,
        number: int,
        allowance: Allowance,
        on_event: Callable[[Frame], None] | None,
    ) -> None:
        self.number = number
        self.allowance = allowance
        self.answer: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        # Whoever gave the operation up has no use for the reason.
        self.answer.add_done_callback(lambda done: done.cancelled() or done.exception())
        self.taken = 0
        self._conversation = conversation
        self._on_event = on_event
        self._seq = 0
        self._credit = CREDIT
        self._used = 0
        self._left = dict(allowance.totals or {})
        self._outputs = self._calls = 0
        self._waiting: deque[tuple[Frame, int]] = deque()
        self._arrived = asyncio.Event()

    async def next_event(self) -> Frame | None:
        """The next event, None after the last. Raises ConversationEnded and Refused."""
        while not self._waiting:
            if self.answer.done():
                self.answer.result()
                return None
            self._arrived.clear()
            await self._arrived.wait()
        frame, cost = self._waiting.popleft()
        self.taken += 1
        self._renew(cost)
        return frame

    async def room(self, frames: int) -> None:
        """Wait until the guest has taken so many of our frames, or has answered.

        Raises ConversationEnded and Refused.
        """
        while self.taken < frames and not self.answer.done():
            await self.next_event()
        if self.answer.done():
            self.answer.result()

    def stop(self) -> None:
        """Have the guest come to the operation's end. `answer` has it."""
        if not self.answer.done():
            self._conversation.tell({"op": "stop", "target": self.number})

    def receive(self, frame: Frame) -> bool:
        """Take in a frame of the guest's for this operation. Whether it was the last.

        Raises wire.FrameError for one that is not due.
        """
        header, parts = frame
        if type(header.get("seq")) is not int or header["seq"] != self._seq:
            raise wire.FrameError("the guest counts its events wrongly")
        self._seq += 1
        event = header.get("event")
        size = sum(map(len, parts.values()))
        if event in ("done", "failed"):
            if size > (self.allowance.answer_bytes if event == "done" else 0):
                raise wire.FrameError("an answer is over its limit")
            if event == "done":
                self._settle(frame)
            else:
                self.fail(_refusal(header))
            return True
        if not isinstance(event, str) or event not in self.allowance.events:
            raise wire.FrameError("the guest sent an unrequested event")
        _check_header(header)
        self._charge(event, size)
        if self._on_event is not None:
            self._renew(size + EVENT_COST)
            self._on_event(frame)
        else:
            self._waiting.append((frame, size + EVENT_COST))
            self._arrived.set()
        return False

    def fail(self, error: Exception) -> None:
        """End the operation without an answer."""
        if not self.answer.done():
            self.answer.set_exception(error)
        self._arrived.set()

    def _settle(self, frame: Frame) -> None:
        if not self.answer.done():
            self.answer.set_result(frame)
        self._arrived.set()

    def _charge(self, event: str, size: int) -> None:
        if event in self._left:
            self._left[event] -= size
            if self._left[event] < 0:
                raise wire.FrameError(f"more {event} than the limits of its run allow")
            if event == "output":
                self._outputs += 1
                if self._outputs > (self.allowance.count or 0):
                    raise wire.FrameError("more outputs than the limits of their run allow")
            return
        if event == "call":
            self._calls += 1
            if self._calls > self.allowance.calls:
                raise wire.FrameError("more tool calls than a run may make")
        if size > CHUNK_BYTES:
            raise wire.FrameError("an event is over its limit")
        self._credit -= size + EVENT_COST
        if self._credit < 0:
            raise wire.FrameError("the guest has sent more than it has credit for")

    def _renew(self, cost: int) -> None:
        self._used += cost
        if self._used >= CREDIT // 2 and not self.answer.done():
            self._credit += self._used
            self._conversation.tell({"op": "credit", "target": self.number, "bytes": self._used})
            self._used = 0


def _check_header(header: Mapping[str, object]) -> None:
    """Credit counts the parts of an event, so what waits of it beside them is little. Raises
    wire.FrameError."""
    values = [value for name, value in header.items() if name != "parts"]
    if len(values) > MOST_FIELDS or any(isinstance(each, (dict, list)) for each in values):
        raise wire.FrameError("an event has too many fields")
    if any(isinstance(each, float) and not math.isfinite(each) for each in values):
        raise wire.FrameError("an event has a number that is not finite")
    if sum(len(each) for each in values if isinstance(each, str)) > MOST_TEXT:
        raise wire.FrameError("an event has too much text in its fields")


class Conversation:
    """Over the channel of a warm sandbox, from its first frame on. Lives in one event loop."""

    def __init__(self, channel: GuestChannel) -> None:
        self._channel = channel
        self._operations: dict[int, Operation] = {}
        channel.converse(self._receive, ANSWER_BYTES)
        channel.closed.add_done_callback(lambda _: self._note_the_end())

    @property
    def under_way(self) -> int:
        """How many operations have not come to their end."""
        return len(self._operations)

    def begin(
        self,
        name: str,
        fields: Mapping[str, object],
        parts: Parts = (),
        *,
        allowance: Allowance = PLAIN,
        on_event: Callable[[Frame], None] | None = None,
    ) -> Operation:
        """Send an operation. Raises ConversationEnded, and Refused where it cannot be."""
        if len(self._operations) >= MOST_OPERATIONS:
            raise Refused("exhausted", "Too many operations are under way in this sandbox.", None)
        # Not to be guessed: what a guest says before it has the operation cannot be its answer.
        number = secrets.randbits(53)
        header: dict[str, object] = {**fields, "id": number, "op": name}
        if allowance.events:
            header["credit"] = CREDIT
        frame = _frame(header, parts)
        self._write(frame)
        operation = Operation(self, number, allowance, on_event)
        self._operations[number] = operation
        self._set_limit()
        return operation

    async def ask(
        self,
        name: str,
        fields: Mapping[str, object],
        parts: Parts = (),
        *,
        seconds: float,
    ) -> Frame:
        """An operation with nothing but an answer.

        Raises TimeoutError after so many seconds, ConversationEnded and Refused.
        """
        operation = self.begin(name, fields, parts)
        async with asyncio.timeout(seconds):
            return await asyncio.shield(operation.answer)

    def tell(self, header: Mapping[str, object], parts: Parts = ()) -> None:
        """Say what has no answer of its own. Nothing where the sandbox is gone."""
        frame = wire.pack(dict(header), list(parts))
        # Its end is there a while before `closed` says so: what it ended of is asked for first.
        with contextlib.suppress(ChannelClosed, wire.FrameError):
            self._channel.write(frame)

    def tell_bytes(self, data: bytes) -> None:
        """Say what is no frame. Raises ConversationEnded."""
        self._write(data)

    async def drained(self) -> None:
        """Wait while the guest does not read what was written."""
        await self._channel.drained()

    def _write(self, data: bytes) -> None:
        try:
            self._channel.write(data)
        except (ChannelClosed, wire.FrameError) as error:
            raise ConversationEnded(str(error)) from error

    def _receive(self, frame: Frame) -> None:
        number = frame[0].get("id")
        operation = self._operations.get(number) if type(number) is int else None
        if operation is None:
            raise wire.FrameError("the guest answered an unknown request")
        if operation.receive(frame):
            del self._operations[operation.number]
            self._set_limit()

    def _set_limit(self) -> None:
        """The most that any frame may hold now: the answers that are due, and one event."""
        due = [each.allowance for each in self._operations.values()]
        totals = [total for each in due for total in (each.totals or {}).values()]
        self._channel.limit = max([CHUNK_BYTES, *totals, *(each.answer_bytes for each in due)])

    def _note_the_end(self) -> None:
        failure = self._channel.failure
        broken = str(failure) if isinstance(failure, wire.FrameError) else ""
        for operation in self._operations.values():
            operation.fail(ConversationEnded(broken))
        self._operations.clear()


def _frame(header: dict[str, object], parts: Parts) -> bytes:
    """Raises Refused for what the guest could not read."""
    try:
        frame = wire.pack(header, list(parts))
    except (TypeError, ValueError, RecursionError) as error:
        raise Refused("refused", f"It cannot be sent: {error}.", None) from error
    names = int.from_bytes(frame[:4], "big")
    if names > wire.HEADER_LIMIT or len(frame) - names > wire.REQUEST_LIMIT:
        raise Refused("refused", "It is too large to be sent.", None)
    return frame


def _refusal(header: Mapping[str, object]) -> Refused:
    code, reason, field = (header.get(name) for name in ("code", "reason", "field"))
    return Refused(
        code if isinstance(code, str) and code in _CODES else "refused",
        _plain(reason, REASON_LIMIT) or "The sandbox refused it.",
        _plain(field, NAME_LIMIT) or None,
    )


def _plain(claimed: object, limit: int) -> str:
    """Text as a guest claims it, without what a log or a terminal would obey."""
    if not isinstance(claimed, str):
        return ""
    return "".join(each if each.isprintable() else "\ufffd" for each in claimed[:limit])


Frame = tuple[dict[str, object], dict[str, bytes]]
