"""The connections of a sandbox that come as lanes of one stream: see `guest.network_connections`.

Each lane becomes a socket, which is served like any other connection. Nothing that arrives is
trusted: more lanes or bytes than are allowed end the stream.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import cast

from providers.runtime.guest import lanes

logger = logging.getLogger(__name__)

# More than a guest of ours ever has.
MOST_LANES = 256
# What waits for the sandbox to read it, beside what its lanes hold.
MOST_WAITING = 1024 * 1024


class LaneStream(asyncio.Protocol):
    """One sandbox's stream. `accept` is given the socket of each new connection."""

    _transport: asyncio.Transport

    def __init__(self, accept: Callable[[socket.socket], None]) -> None:
        self._accept = accept
        self._parser = lanes.Parser()
        self._lanes: dict[int, _Lane] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=MOST_WAITING)

    def pause_writing(self) -> None:
        """A sandbox that does not read is not read from: each lane that ends has an answer."""
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        try:
            for number, kind, content in self._parser.feed(data):
                self._take(number, kind, content)
        except (lanes.LaneError, OSError) as error:
            logger.warning("the connections of a sandbox were ended: %s", error)
            self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        for lane in list(self._lanes.values()):
            lane.abort()

    def close(self) -> None:
        """End every connection."""
        self._transport.abort()

    def _take(self, number: int, kind: int, content: bytes) -> None:
        """Raises LaneError and OSError."""
        lane = self._lanes.get(number)
        if kind == lanes.START:
            if lane is not None or len(self._lanes) >= MOST_LANES:
                raise lanes.LaneError("a lane too many")
            self._open(number)
        elif lane is None:
            # It has ended, which the sandbox has not heard yet.
            return
        elif kind == lanes.DATA:
            lane.take(content)
        elif kind == lanes.CREDIT:
            lane.more_credit(lanes.credit(content))
        elif kind == lanes.END:
            lane.end()
        else:
            raise lanes.LaneError("an unknown message")

    def _open(self, number: int) -> None:
        ours, theirs = socket.socketpair()
        lane = self._lanes[number] = _Lane(number, self._send, self._forget)
        lane.begin(ours)
        self._accept(theirs)

    def _send(self, message: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(message)

    def _forget(self, number: int) -> None:
        del self._lanes[number]
        self._send(lanes.pack(number, lanes.END))


class _Lane(asyncio.Protocol):
    """One connection: our end of the socket that is served."""

    def __init__(
        self, number: int, send: Callable[[bytes], None], forget: Callable[[int], None]
    ) -> None:
        self._number = number
        self._send = send
        self._forget = forget
        self._transport: asyncio.Transport | None = None
        self._starting: asyncio.Task[object] | None = None
        self._early = bytearray()
        self._has_ended = self._is_aborted = False
        # What may be sent to the sandbox, and what it has sent without new credit.
        self._credit = lanes.WINDOW
        self._owed = 0
        self._held = bytearray()

    def begin(self, ours: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        self._starting = loop.create_task(loop.create_connection(lambda: self, sock=ours))

    def take(self, content: bytes) -> None:
        """Bytes of the sandbox. Raises LaneError for more than it has credit for."""
        if self._has_ended:
            raise lanes.LaneError("bytes after the end of a lane")
        self._owed += len(content)
        if self._owed > lanes.WINDOW:
            raise lanes.LaneError("more than there was credit for")
        if self._transport is None:
            self._early += content
            return
        self._transport.write(content)
        self._renew()

    def more_credit(self, count: int) -> None:
        """Raises LaneError."""
        self._credit += count
        if self._credit > lanes.WINDOW:
            raise lanes.LaneError("more credit than was used")
        self._pass_on()

    def end(self) -> None:
        """The sandbox sends no more."""
        self._has_ended = True
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write_eof()

    def abort(self) -> None:
        self._is_aborted = True
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        # Whatever waits is heard of when it is gone: only then is there credit again.
        self._transport.set_write_buffer_limits(high=0)
        if self._is_aborted:
            self._transport.abort()
            return
        self._transport.write(bytes(self._early))
        self._early.clear()
        if self._has_ended:
            self._transport.write_eof()
        self._renew()

    def data_received(self, data: bytes) -> None:
        self._held += data
        self._pass_on()

    def connection_lost(self, error: Exception | None) -> None:
        self._forget(self._number)

    def resume_writing(self) -> None:
        self._renew()

    def _renew(self) -> None:
        """Give credit for what the connection has taken."""
        if self._transport is None or self._transport.get_write_buffer_size():
            return
        if self._owed:
            self._send(lanes.pack_credit(self._number, self._owed))
            self._owed = 0

    def _pass_on(self) -> None:
        """Send the sandbox what it has credit for, and read on when nothing is held."""
        while self._held and self._credit:
            piece = bytes(self._held[: min(self._credit, lanes.CHUNK)])
            del self._held[: len(piece)]
            self._credit -= len(piece)
            self._send(lanes.pack(self._number, lanes.DATA, piece))
        if self._transport is None or self._transport.is_closing():
            return
        if self._held:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()
