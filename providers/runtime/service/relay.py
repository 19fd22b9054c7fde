"""From a kept sandbox to a client: frames as they come, at the client's pace."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from typing import Any, Protocol

from aiohttp import StreamReader, web

from providers.errors import InvalidConfiguration, ProviderUnavailable, SandboxError
from providers.runtime.guest import wire
from providers.runtime.pool.kept import OnFrame
from providers.runtime.pool.protocol import Frame, Parts
from providers.runtime.service import messages
from providers.runtime.service.operations import ALIVE_SECONDS, MEDIA_TYPE
from providers.values import ExecutionResult

logger = logging.getLogger(__name__)

# How long a client may not read before it is taken to have left.
SEND_SECONDS = 60.0
# Events of a run that may wait for its reader one by one. Beyond that they are put together.
MOST_WAITING = 1000
# Events that are never put together with another.
_WHOLE = frozenset({"output", "call", "network"})


class Outbox:
    """The events of a run on their way to one reader, whom the run does not wait for.

    A slow one gets what came meanwhile in larger pieces. The run's limits bound them all.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[dict[str, object], dict[str, Any]]] = deque()
        self._changed = asyncio.Event()
        self._closed = False

    def put(self, frame: Frame) -> None:
        """Take an event. It is written when its turn comes."""
        header, parts = frame
        event = header["event"]
        if len(self._waiting) >= MOST_WAITING and event not in _WHOLE:
            for known, content in (self._waiting[-1], self._waiting[-2]):
                if known["event"] == event:
                    content["data"] += parts.get("data", b"")
                    return
        # Copied into what grows in place: small pieces are not to cost more the more there are.
        data = {"data": bytearray(parts.get("data", b""))}
        self._waiting.append(({"event": event}, dict(parts) if event in _WHOLE else data))
        self._changed.set()

    def close(self) -> None:
        """Nothing more comes."""
        self._closed = True
        self._changed.set()

    async def frames(self) -> AsyncIterator[Frame]:
        """What comes, until it is closed and empty."""
        while self._waiting or not self._closed:
            if self._waiting:
                yield self._waiting.popleft()
                continue
            self._changed.clear()
            await self._changed.wait()


class Sender(Protocol):
    async def send(self, header: Mapping[str, object], parts: Parts = ()) -> None: ...


class Relay:
    """The answer to one request, written frame by frame and flushed at once."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._response = web.StreamResponse(
            headers={"Content-Type": MEDIA_TYPE, "X-Accel-Buffering": "no"}
        )
        self._writing = asyncio.Lock()
        self._alive: asyncio.Task[None] | None = None
        self._said_something = False

    async def __aenter__(self) -> Relay:
        await self._response.prepare(self._request)
        self._alive = asyncio.get_running_loop().create_task(self._say_alive())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._alive is not None:
            self._alive.cancel()

    async def send(self, header: Mapping[str, object], parts: Parts = ()) -> None:
        """Raises TimeoutError and ConnectionError where the client does not read."""
        self._said_something = True
        async with self._writing, asyncio.timeout(SEND_SECONDS):
            await self._response.write(wire.pack(dict(header), list(parts)))

    async def pass_on(self, frame: Frame) -> None:
        """A guest's frame, without what is between it and the host alone."""
        header, parts = frame
        kept = {key: value for key, value in header.items() if key not in ("id", "seq", "parts")}
        await self.send(kept, list(parts.items()))

    async def fail(self, error: SandboxError) -> None:
        """Say why there is no answer."""
        text = messages.dumps(messages.error_to_json(error))
        await self.send({"event": "error"}, [("error", text)])

    async def finish(self) -> web.StreamResponse:
        await self._response.write_eof()
        return self._response

    def give_up(self) -> web.StreamResponse:
        """The client has left, or does not read: whatever else is on its way is dropped."""
        if self._request.transport is not None:
            self._request.transport.abort()
        return self._response

    async def _say_alive(self) -> None:
        while True:
            await asyncio.sleep(ALIVE_SECONDS)
            if not self._said_something:
                await self.send({"event": "alive"})
            self._said_something = False


async def relayed(
    request: web.Request, work: Callable[[Relay], Awaitable[None]]
) -> web.StreamResponse:
    """The answer that `work` writes. What it raises is the answer's last frame."""
    async with Relay(request) as relay:
        try:
            try:
                await work(relay)
            except SandboxError as error:
                await relay.fail(error)
            except (ConnectionError, TimeoutError):
                raise
            except Exception:
                logger.exception("an operation failed inside the service")
                await relay.fail(
                    ProviderUnavailable(
                        "The pool service failed. Its log has the reason.", started=True
                    )
                )
            return await relay.finish()
        except (ConnectionError, TimeoutError):
            return relay.give_up()


async def relay_run(
    relay: Sender, run: Callable[[OnFrame], Coroutine[Any, Any, ExecutionResult]]
) -> None:
    """A run with its events as they come, and its result. It is cancelled when its client leaves,
    or does not read."""
    outbox = Outbox()

    async def send() -> None:
        async for header, parts in outbox.frames():
            await relay.send(header, list(parts.items()))

    sending = asyncio.get_running_loop().create_task(send())
    running = asyncio.get_running_loop().create_task(run(outbox.put))
    try:
        await asyncio.wait([sending, running], return_when=asyncio.FIRST_COMPLETED)
        if sending.done():
            sending.result()
        try:
            result = await running
        except SandboxError as error:
            # Callers run it again on our word.
            error.started = error.started or not error.nothing_ran
            raise
        outbox.close()
        await sending
    finally:
        running.cancel()
        sending.cancel()
    await relay.send({"event": "done"}, [("result", await result_text(result))])


async def result_text(result: ExecutionResult) -> bytes:
    """Return a result as JSON. A large one is written on a thread."""
    size = sum(len(artifact.content) for artifact in result.artifacts) + len(result.stdout)
    return await in_thread_if_large(size, lambda: messages.dumps(messages.result_to_json(result)))


async def in_thread_if_large(size: int, work: Callable[[], bytes]) -> bytes:
    """Leave work on so many bytes to a thread where everybody else would wait for it."""
    return await asyncio.to_thread(work) if size > messages.LARGE else work()


class Incoming:
    """The frames of a request's body, as they come."""

    def __init__(self, content: StreamReader) -> None:
        self._content = content
        self._parser = wire.Parser(wire.REQUEST_LIMIT)
        self._frames: deque[Frame] = deque()

    async def first(self) -> Frame:
        """The operation. Raises InvalidConfiguration."""
        frame = await self._next()
        if frame is None:
            raise InvalidConfiguration("body: Holds no operation.", field="body")
        return frame

    async def pieces(self) -> AsyncIterator[bytes]:
        """What is to be written. Raises InvalidConfiguration."""
        while (frame := await self._next()) is not None:
            yield frame[1].get("data", b"")

    async def leave(self) -> None:
        """Take in what is left, so that the client comes to read the answer."""
        while await self._content.readany():
            continue

    async def _next(self) -> Frame | None:
        try:
            while not self._frames:
                data = await self._content.readany()
                if not data:
                    return None
                self._frames += self._parser.feed(data)
        except wire.FrameError as error:
            raise InvalidConfiguration(f"body: {error}.", field="body") from None
        return self._frames.popleft()
