"""The host's end of the stream to a tenant's kernel: a socket for every run in it.

`providers.runtime.guest.lanes` says what is said. Nothing that comes is trusted: what is not in
order ends the kernel, and with it every run in it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Callable
from typing import cast

from providers.runtime.guest import lanes
from providers.runtime.guest.lanes import LaneError

logger = logging.getLogger(__name__)

REASON_LIMIT = 500


class Lane(asyncio.Protocol):
    """One run's stream. Its other end is the socket that `open` has returned.

    `ended` is done once nothing of the run is left, with how it ended in words, or once the kernel
    is gone: then its result is None. `has_spoken` once anything has come from it.
    """

    def __init__(self, stream: Lanes, number: int) -> None:
        self.number = number
        self.has_spoken = False
        self.ended: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._stream = stream
        self._transport: asyncio.Transport | None = None
        self._credit = lanes.WINDOW
        self._held = bytearray()
        self._granted = lanes.WINDOW
        self._taken = 0
        self._full = False
        self._closed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=0)

    def data_received(self, data: bytes) -> None:
        self._held += data
        self._send()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self.end()

    def pause_writing(self) -> None:
        self._full = True

    def resume_writing(self) -> None:
        self._full = False
        self._grant()

    def more_credit(self, count: int) -> None:
        """The kernel takes so many more bytes. Raises LaneError."""
        self._credit += count
        if self._credit > lanes.WINDOW:
            raise LaneError("more credit than the window")
        self._send()

    def receive(self, data: bytes) -> None:
        """Bytes of the run's. Raises LaneError."""
        self.has_spoken = True
        self._granted -= len(data)
        if self._granted < 0:
            raise LaneError("the kernel has sent more than it has credit for")
        self._taken += len(data)
        if self._transport is not None:
            self._transport.write(data)
        if not self._full:
            self._grant()

    def end(self) -> None:
        """Have the kernel end the run, if there is anything of it."""
        if not self._closed:
            self._closed = True
            self._held.clear()
            if not self.ended.done():
                self._stream.write(lanes.pack(self.number, lanes.END))
            if self._transport is not None:
                self._transport.abort()

    def note_the_end(self, how: str | None) -> None:
        """Nothing of it is left; how it ended, None where the kernel is gone."""
        if not self.ended.done():
            self.ended.set_result(how)
        self._closed = True
        if self._transport is not None:
            # What was written before is still delivered.
            self._transport.close()

    def _send(self) -> None:
        if self._closed:
            return
        while self._held and self._credit:
            part = bytes(self._held[: min(self._credit, lanes.MESSAGE_LIMIT)])
            del self._held[: len(part)]
            self._credit -= len(part)
            self._stream.write(lanes.pack(self.number, lanes.DATA, part))
        if self._transport is not None and not self._transport.is_closing():
            if self._held:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()

    def _grant(self) -> None:
        if self._taken >= lanes.WINDOW // 2 and not self._closed:
            self._granted += self._taken
            self._stream.write(lanes.pack_credit(self.number, self._taken))
            self._taken = 0


class Lanes(asyncio.Protocol):
    """All lanes of one kernel. `at_end` is called once when its stream has ended, however.

    `decode` takes off what an engine puts around the bytes of the kernel.
    """

    def __init__(
        self, at_end: Callable[[], None], decode: Callable[[bytes], bytes] = bytes
    ) -> None:
        self.failure = ""
        self.alive = True
        self._at_end = at_end
        self._decode = decode
        self._parser = lanes.Parser()
        self._transport: asyncio.WriteTransport | None = None
        self._early = bytearray()
        self._lanes: dict[int, Lane] = {}
        self._last = 0

    @property
    def count(self) -> int:
        """How many runs of which something is left."""
        return len(self._lanes)

    async def open(self, template: bytes) -> tuple[Lane, socket.socket]:
        """Have the kernel make a run for this template: its lane, and the end to speak to it by.

        Raises OSError.
        """
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        theirs.setblocking(False)
        self._last += 1
        lane = Lane(self, self._last)
        try:
            loop = asyncio.get_running_loop()
            await loop.create_connection(lambda: lane, sock=ours)
            if not self.alive:
                raise ConnectionResetError(self.failure or "the tenant's kernel has ended")
        except BaseException:
            ours.close()
            theirs.close()
            raise
        self._lanes[lane.number] = lane
        self.write(lanes.pack(lane.number, lanes.START, template))
        return lane, theirs

    def write(self, data: bytes) -> None:
        """Say something, if anybody is there."""
        if self._transport is not None:
            self._transport.write(data)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            for number, kind, content in self._parser.feed(self._decode(data)):
                self._receive(number, kind, content)
        except LaneError as error:
            self.failure = self.failure or str(error)
            logger.error("ending a tenant's kernel: %s", error)
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self.alive:
            self.alive = False
            for lane in self._lanes.values():
                lane.note_the_end(None)
            self._lanes.clear()
            self._at_end()

    def close(self) -> None:
        """Speak no more. The kernel ends when it notices."""
        if self._transport is not None:
            self._transport.abort()
        self.connection_lost(None)

    def _receive(self, number: int, kind: int, content: bytes) -> None:
        if kind == lanes.FAILED:
            raise LaneError(content[:REASON_LIMIT].decode("utf-8", "replace"))
        lane = self._lanes.get(number)
        if lane is None:
            raise LaneError("it sent a message for an unknown run")
        if kind == lanes.DATA:
            lane.receive(content)
        elif kind == lanes.CREDIT:
            lane.more_credit(lanes.credit(content))
        elif kind == lanes.ENDED:
            code, reason = _read_end(content)
            del self._lanes[number]
            lane.note_the_end(_in_words(code, reason))
            if reason and code is not None:
                # It has ended, and something of it is left.
                raise LaneError(reason)
        else:
            raise LaneError("it sent an unexpected message")


def _read_end(content: bytes) -> tuple[int | None, str]:
    try:
        told = json.loads(content)
        code, reason = told["code"], told["reason"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise LaneError("an unreadable end message") from error
    return code if type(code) is int else None, str(reason)[:REASON_LIMIT]


def _in_words(code: int | None, reason: str) -> str:
    if code is None:
        return reason
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    return f"Its first process ended with {how}"
