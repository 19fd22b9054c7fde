"""One request of the endpoint, between the event loop of the SDK's server and Django's threads.

The SDK's server runs in an event loop of its own, never in that of the web server. It gets the
request with its body, and its answer is read piece by piece. A tool is carried out on the thread of
the request, which waits without holding it (`doors.native.deferred`).
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any, Generic, TypeVar

from django.http import HttpResponse
from django.http.response import HttpResponseBase
from mcp.server.lowlevel.server import Server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.server.transport_security import TransportSecuritySettings

from executions.doors.mcp.results import DOOR
from executions.doors.native.deferred import SSE, EventStream
from executions.kernel.coroutines import Coroutine, wait_for
from executions.runs.active_runs import ClientRun
from executions.runs.event_log import resolve
from executions.runs.requests import Caller
from providers.threads import reset_after_fork, start_thread

logger = logging.getLogger(__name__)

T = TypeVar("T")
# What the SDK may be ahead of its reader.
AHEAD_BYTES = 256 * 1024
Headers = Iterable[tuple[bytes, bytes]]
App = Callable[[dict[str, Any], Any, Any], Any]


class Answer(EventStream):
    """What the SDK sends, whose head is known only when it begins."""

    def __init__(self, on_leave: Callable[[], None]) -> None:
        super().__init__(SSE, on_leave=on_leave)
        self.begins: Future[None] = Future()
        self._lock = threading.Lock()
        self._head: tuple[int, Mapping[str, str]] | None = None
        self._pieces: deque[bytes] = deque()
        self._is_all = False
        self._room: Future[None] | None = None
        self._wanted: Future[None] = Future()

    @property
    def has_begun(self) -> bool:
        return self._head is not None

    def start(self, status: int, headers: Headers) -> None:
        said = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers}
        # The server's connections are its own to keep.
        said = {name: value for name, value in said.items() if name.lower() != "connection"}
        self._head = (status, said)

    def open(self) -> None:
        if self._head is None:
            return
        self.status_code, headers = self._head
        for name, value in headers.items():
            self[name] = value

    def put(self, body: bytes, *, more: bool) -> Future[None] | None:
        """What to wait for before there is room for more, if there is none."""
        with self._lock:
            self._pieces.append(body)
            self._is_all = not more
            wanted, room = self._wanted, None
            if more and self.is_waited_for and not self.left.done():
                held = sum(map(len, self._pieces))
                room = self._room = Future() if held > AHEAD_BYTES else None
        resolve([self.begins, wanted])
        return room

    def take(self) -> tuple[bytes, bool]:
        with self._lock:
            body = b"".join(self._pieces)
            self._pieces.clear()
            self._is_over = self._is_all
            room, self._room = self._room, None
        if room is not None:
            resolve([room])
        return body, not self._is_over

    def cut_off(self) -> bytes:
        """Nothing: only the SDK knows how far its own answer is."""
        return b""

    def changed(self) -> Future[None]:
        with self._lock:
            wanted = self._wanted = Future()
            is_there = bool(self._pieces) or self._is_all
        if is_there:
            resolve([wanted])
        return wanted

    def leave(self) -> None:
        super().leave()
        with self._lock:
            room, self._room = self._room, None
        if room is not None:
            resolve([room])


class _Job(Generic[T]):
    """Work that a tool waits for."""

    def __init__(self, work: Callable[[], Coroutine[T]]) -> None:
        self.done: Future[T] = Future()
        self._work = work

    async def carry_out(self) -> None:
        # From now on it goes on to its end, whether its tool still waits or not.
        if not self.done.set_running_or_notify_cancel():
            return
        try:
            result = await self._work()
        except Exception as error:
            with suppress(InvalidStateError):
                self.done.set_exception(error)
        else:
            with suppress(InvalidStateError):
                self.done.set_result(result)


class Exchange:
    """A request with its answer; the door of the tools that it calls."""

    def __init__(self, caller: Caller, scope: dict[str, Any], body: bytes) -> None:
        self.caller = caller
        self.answer = Answer(self._leave)
        self._scope = {**scope, DOOR: self}
        self._body: bytes | None = body
        self._lock = threading.Lock()
        self._jobs: deque[_Job[Any]] = deque()
        self._is_over = False
        self._wanted: Future[None] = Future()
        self._runs: list[ClientRun] = []
        self._gone: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def carried_out(self, app: App, loop: asyncio.AbstractEventLoop) -> HttpResponseBase:
        """Have the SDK answer, and do meanwhile what its tools ask for."""
        asyncio.run_coroutine_threadsafe(self._serve(app), loop)
        while True:
            await wait_for(self._next())
            with self._lock:
                job = self._jobs.popleft() if self._jobs else None
                if job is None and self._is_over:
                    break
            if job is not None:
                await job.carry_out()
        if not self.answer.is_waited_for:
            self.answer.open()
        return HttpResponse(status=500)

    async def do(self, work: Callable[[], Coroutine[T]]) -> T:
        job = _Job(work)
        with self._lock:
            self._jobs.append(job)
            wanted = self._wanted
        resolve([wanted])
        return await asyncio.wrap_future(job.done)

    def note(self, run: ClientRun) -> None:
        self._runs.append(run)
        if self.answer.left.done():
            run.cancel()

    def _next(self) -> Future[None]:
        with self._lock:
            wanted = self._wanted = Future()
            is_there = bool(self._jobs) or self._is_over
        if is_there:
            resolve([wanted])
        return wanted

    def _leave(self) -> None:
        """The client has gone before it had all of the answer, and nobody else can have it."""
        for run in self._runs:
            run.cancel()
        if self._loop is not None and self._gone is not None:
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._gone.set)

    async def _serve(self, app: App) -> None:
        self._gone = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        if self.answer.left.done():
            self._gone.set()
        try:
            await app(self._scope, self._receive, self._send)
        except Exception:
            logger.exception("a request of an MCP client failed inside the service")
        finally:
            if not self.answer.has_begun:
                self.answer.start(500, [(b"content-type", b"application/json")])
                self.answer.put(_BROKEN, more=True)
            self.answer.put(b"", more=False)
            with self._lock:
                self._is_over = True
                wanted = self._wanted
            resolve([wanted])

    async def _receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        if self._gone is not None:
            await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.answer.start(message["status"], message.get("headers", ()))
            return
        more = bool(message.get("more_body"))
        room = self.answer.put(message.get("body", b""), more=more)
        if room is not None:
            await asyncio.wrap_future(room)


_BROKEN = (
    b'{"jsonrpc":"2.0","id":null,"error":{"code":-32603,'
    b'"message":"The request failed inside the service."}}'
)


_START_SECONDS = 30.0
Served = tuple[App, asyncio.AbstractEventLoop]


class McpLoop:
    """The SDK's application, without any state of its own: whichever process is asked can answer.

    Host, Origin, keys and bodies are checked before it is asked.
    """

    def __init__(self, server: Server, most_bytes: int) -> None:
        self._server = server
        self._most_bytes = most_bytes
        self._forget()
        reset_after_fork(self._forget)

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._served: Served | None = None

    def served(self) -> Served:
        """Start it, unless it has been. Raises NoThreadLeft."""
        with self._lock:
            if self._served is None:
                ready: Future[Served] = Future()
                start_thread("mcp", lambda: asyncio.run(self._run(ready)))
                self._served = ready.result(_START_SECONDS)
            return self._served

    async def _run(self, ready: Future[Served]) -> None:
        manager = StreamableHTTPSessionManager(
            self._server,
            stateless=True,
            security_settings=TransportSecuritySettings(enable_dns_rebinding_protection=False),
            max_request_body_size=self._most_bytes,
        )
        async with manager.run():
            ready.set_result((manager.handle_request, asyncio.get_running_loop()))
            await asyncio.Event().wait()
