"""The attach stream of a container as a plain socket.

Without a terminal the engine puts an 8-byte header before each piece of output: the stream (1 is
stdout, 2 is stderr) and the piece's size. They are taken off here.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import cast

STDERR = 2
COMPLAINT_BYTES = 2000
_HEADER_BYTES = 8


class Demultiplexer:
    """Takes the engine's headers off: stdout is passed on, the beginning of stderr is kept."""

    def __init__(self) -> None:
        self.stderr = b""
        self._header = b""
        self._left = 0
        self._stream = 0

    @property
    def complaint(self) -> str:
        """The beginning of what was written to stderr, as text."""
        return self.stderr.decode("utf-8", "replace").strip()

    def feed(self, data: bytes) -> bytes:
        """The part of `data` that is stdout."""
        out = []
        view = memoryview(data)
        while view:
            if self._left == 0:
                taken = _HEADER_BYTES - len(self._header)
                self._header += view[:taken]
                view = view[taken:]
                if len(self._header) < _HEADER_BYTES:
                    break
                self._stream = self._header[0]
                self._left = int.from_bytes(self._header[4:], "big")
                self._header = b""
                continue
            piece, view = view[: self._left], view[self._left :]
            self._left -= len(piece)
            if self._stream != STDERR:
                out.append(piece)
            elif len(self.stderr) < COMPLAINT_BYTES:
                self.stderr += piece[: COMPLAINT_BYTES - len(self.stderr)]
        return b"".join(out)


class _End(asyncio.Protocol):
    """One end of the pump. What it receives goes to the other, at the other's pace."""

    def __init__(self, take: Callable[[bytes], bytes], ended: Callable[[], None]) -> None:
        self._take = take
        self._ended = ended
        self._transport: asyncio.Transport | None = None
        self.other: _End | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self.other is not None and (content := self._take(data)):
            self.other.write(content)

    def write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def pause_writing(self) -> None:
        if self.other is not None:
            self.other.pause(True)

    def resume_writing(self) -> None:
        if self.other is not None:
            self.other.pause(False)

    def pause(self, paused: bool) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        if paused:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended()

    def finish(self) -> None:
        """Close once everything written has been taken."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()


class Pump:
    """Carries bytes between an attach stream and `channel`, which its user reads and writes.

    When the container's end closes, `before_end` is awaited first and `channel` closed then, so
    that whoever sees the end finds what is known of it.
    """

    def __init__(self, before_end: Callable[[], Awaitable[None]]) -> None:
        self.channel, self._inner = socket.socketpair()
        self.channel.setblocking(False)
        self._inner.setblocking(False)
        self._before_end = before_end
        self._demultiplexer = Demultiplexer()
        self._container = _End(self._demultiplexer.feed, self._container_ended)
        self._user = _End(bytes, self._user_ended)
        self._ending: asyncio.Task[None] | None = None
        self._closed = False

    async def start(self, stream: socket.socket) -> None:
        """Take over `stream`."""
        loop = asyncio.get_running_loop()
        stream.setblocking(False)
        self._container.other, self._user.other = self._user, self._container
        # The user's end first: the container may already have spoken.
        await loop.create_connection(lambda: self._user, sock=self._inner)
        await loop.create_connection(lambda: self._container, sock=stream)

    @property
    def complaint(self) -> str:
        """The beginning of what the container wrote to its stderr."""
        return self._demultiplexer.complaint

    def close(self) -> None:
        """Close both ends; nobody reads any more."""
        self._closed = True
        self._container.abort()
        self._user.abort()
        self._inner.close()

    def _user_ended(self) -> None:
        self._closed = True
        self._container.abort()

    def _container_ended(self) -> None:
        if self._closed:
            return
        self._ending = asyncio.get_running_loop().create_task(self._end())

    async def _end(self) -> None:
        await self._before_end()
        self._user.finish()
