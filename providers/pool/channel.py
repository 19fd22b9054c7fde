"""The host's end of the channel to a guest supervisor. What comes out of it is not trusted."""

from __future__ import annotations

import asyncio
import select
import socket
from collections import deque
from typing import cast

from providers.guest.wire import FrameError, Parser

Frame = tuple[dict[str, object], dict[str, bytes]]


class ChannelClosed(Exception):
    """The guest's end is gone: the sandbox has ended."""


class GuestChannel(asyncio.Protocol):
    """Hands out the guest's frames one at a time.

    A guest speaks only when it is spoken to. A frame that is not due, one that is malformed and
    one over its bound close the channel, and every later use raises FrameError.
    """

    def __init__(self) -> None:
        self._parser = Parser(limit=0)
        self._transport: asyncio.WriteTransport | None = None
        self._due = 1
        self._arrived: deque[Frame] = deque()
        self._waiting: asyncio.Future[Frame] | None = None
        self._failure: Exception | None = None
        self.closed = asyncio.get_running_loop().create_future()

    @classmethod
    async def open(cls, end: socket.socket) -> GuestChannel:
        """Take over `end`. Until something was sent the guest may only say that it is ready."""
        _, channel = await asyncio.get_running_loop().create_connection(cls, sock=end)
        return channel

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
        try:
            for frame in self._parser.feed(data):
                if self._due == 0:
                    raise FrameError("the guest spoke out of turn")
                self._due -= 1
                if self._waiting is not None and not self._waiting.done():
                    self._waiting.set_result(frame)
                else:
                    self._arrived.append(frame)
        except FrameError as error:
            self._fail(error)

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(ChannelClosed())

    def _fail(self, error: Exception) -> None:
        self._failure = self._failure or error
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(self._failure)
        if not self.closed.done():
            self.closed.set_result(None)
        self.close()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def send(self, data: bytes, answer_limit: int, answers: int = 1) -> None:
        """Queue one frame, to be answered by as many; each may have `answer_limit` raw bytes.

        Raises what ended the channel, if it has ended.
        """
        if self._failure is not None or self._transport is None:
            raise self._failure or ChannelClosed
        self._parser.limit = answer_limit
        self._due += answers
        self._transport.write(data)

    async def receive(self) -> Frame:
        """The next frame. Raises ChannelClosed or FrameError."""
        if self._arrived:
            return self._arrived.popleft()
        if self._failure is not None:
            raise self._failure
        self._waiting = asyncio.get_running_loop().create_future()
        return await self._waiting
