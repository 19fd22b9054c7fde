"""The host's end of the channel to a guest supervisor. What comes out of it is not trusted."""

from __future__ import annotations

import asyncio
import select
import socket
from collections import deque
from collections.abc import Awaitable, Callable
from typing import cast

from providers.runtime.guest.wire import FrameError, Parser

Frame = tuple[dict[str, object], dict[str, bytes]]


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
        await before_end()
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
