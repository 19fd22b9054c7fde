"""The MCP server, over HTTP and over standard input and output.

The SDK's server runs in an event loop of its own, never in that of the web server. It gets a
request with its body, and its answer is read piece by piece (`Exchange`). A tool is carried out on
the thread of the request, which waits without holding it (`doors.native.deferred`).
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import cache
from typing import Any, Generic, TypeVar

import mcp_types as types
from django.conf import settings
from django.db import close_old_connections
from django.http import HttpResponse
from django.http.response import HttpResponseBase
from mcp.server.lowlevel.server import Server
from mcp.server.stdio import stdio_server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.server.transport_security import TransportSecuritySettings
from mcp.shared.exceptions import MCPError

from executions.doors.mcp import results, tool_calls
from executions.doors.mcp.results import (
    DOOR,
    Call,
    Context,
    Door,
    Lacking,
    error_result,
    lacks,
    require,
)
from executions.doors.mcp.tools import TOOLS
from executions.doors.native.deferred import SSE, EventStream
from executions.doors.native.frame import render_error
from executions.kernel.coroutines import Coroutine, run_sync, wait_for
from executions.runs.active_runs import ClientRun
from executions.runs.event_log import resolve
from executions.runs.requests import Caller
from executions.tenants import keys
from executions.tenants.quotas import take_request
from executions.tenants.service import ensure_active
from providers.errors import SandboxError
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

    def next_change(self) -> Future[None]:
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

    async def carry_out(self, app: App, loop: asyncio.AbstractEventLoop) -> HttpResponseBase:
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

    def ensure_started(self) -> Served:
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


INSTRUCTIONS = (
    "Runs code in isolated sandboxes. run_code is for one program: nothing is kept after it. For "
    "several steps open a session: it keeps variables, files and processes until it is closed or "
    "not used for its idle time. Times are in seconds. Long outputs are truncated: "
    "execution_output reads the rest. Every run is recorded. cofferdam://executions/{id} has the "
    "record with its signed receipt."
)


def make_server(door: Door | None = None) -> Server[Any]:
    """A server for clients that come in by `door`, or by the one that their request brings."""

    def door_of(context: Context) -> Door:
        if door is not None:
            return door
        found: Door = context.request.scope[DOOR]  # type: ignore[union-attr]
        return found

    async def list_tools(
        context: Context, params: types.PaginatedRequestParams | None
    ) -> types.ListToolsResult:
        by = door_of(context)
        try:
            said = await by.do(lambda: tool_calls.languages(by))
        except SandboxError:
            # No provider can be asked. A run says what is the matter.
            said = ([], "")
        tools = [tool.describe(*said) for tool in TOOLS.values() if not lacks(by, tool.needs)]
        return types.ListToolsResult(tools=tools)

    async def call_tool(
        context: Context, params: types.CallToolRequestParams
    ) -> types.CallToolResult:
        by = door_of(context)
        if (tool := TOOLS.get(params.name)) is None:
            raise MCPError(types.INVALID_PARAMS, f"Unknown tool: {params.name[:100]}")

        async def tell(progress: float, message: str) -> None:
            await context.session.report_progress(progress, message=message)

        async def check_scopes() -> None:
            require(by, tool.needs, f"tool {params.name}")

        try:
            await by.do(check_scopes)
            tool.refuse_unknown(params.arguments or {})
            return await tool.call(Call(by, dict(params.arguments or {}), tell))
        except Lacking as error:
            return error_result("forbidden", str(error))
        except Exception as error:
            said = json.loads(render_error(error, {}).content)
            return error_result(
                said["error"]["code"],
                said["error"]["message"],
                field=said["error"]["field"],
                execution_id=said["id"],
            )

    async def list_resources(
        context: Context, params: types.PaginatedRequestParams | None
    ) -> types.ListResourcesResult:
        by, cursor = door_of(context), params.cursor if params else None
        return await _translate_errors(by.do(lambda: results.list_resources(by, cursor)))

    async def list_templates(
        context: Context, params: types.PaginatedRequestParams | None
    ) -> types.ListResourceTemplatesResult:
        return types.ListResourceTemplatesResult(resource_templates=results.templates())

    async def read_resource(
        context: Context, params: types.ReadResourceRequestParams
    ) -> types.ReadResourceResult:
        by = door_of(context)
        return await _translate_errors(by.do(lambda: results.read_resource(by, params.uri)))

    server: Server[Any] = Server(
        "cofferdam",
        version=str(settings.SPECTACULAR_SETTINGS["VERSION"]),
        title="Cofferdam",
        instructions=INSTRUCTIONS,
        on_list_tools=list_tools,
        on_call_tool=call_tool,
        on_list_resources=list_resources,
        on_list_resource_templates=list_templates,
        on_read_resource=read_resource,
    )
    # What is told of runs elsewhere is told by their records, with what may be told of them.
    server.middleware.clear()
    return server


async def _translate_errors(work: Awaitable[T]) -> T:
    """Its result; its error as MCP has it."""
    try:
        return await work
    except MCPError:
        raise
    except Lacking as error:
        raise MCPError(types.INVALID_REQUEST, str(error)) from None
    except Exception as error:
        known = render_error(error, {})
        said = json.loads(known.content)["error"]
        code = types.INTERNAL_ERROR if known.status_code >= 500 else types.INVALID_PARAMS
        raise MCPError(code, said["message"], data=said) from None


@cache
def _loop(most_bytes: int) -> McpLoop:
    return McpLoop(make_server(), most_bytes)


def ensure_started(most_bytes: int) -> Served:
    """Start the server for messages of at most `most_bytes`, unless it was started."""
    return _loop(most_bytes).ensure_started()


class StdioDoor:
    """Each call has a thread while it is carried out. With each, the key or the tenant is looked at
    anew."""

    def __init__(self, caller: Caller) -> None:
        self.caller = caller

    async def do(self, work: Callable[[], Coroutine[T]]) -> T:
        return await asyncio.to_thread(self._carry_out, work)

    def note(self, run: ClientRun) -> None:
        """The call itself is cancelled, and ends its run."""

    def _carry_out(self, work: Callable[[], Coroutine[T]]) -> T:
        close_old_connections()
        try:
            tenant = self.caller.tenant
            if (key := self.caller.api_key) is not None:
                key.refresh_from_db()
                keys.ensure_valid(key, self.caller.client_address)
            else:
                tenant.refresh_from_db()
                ensure_active(tenant)
            take_request(tenant, only_reads=False).require()
            return run_sync(work())
        finally:
            close_old_connections()


async def serve(caller: Caller) -> None:
    """Answer until the client closes its end."""
    # Standard output is the client's.
    logging.getLogger("mcp").setLevel(logging.WARNING)
    server = make_server(StdioDoor(caller))
    async with stdio_server() as (received, sent):
        await server.run(received, sent, server.create_initialization_options())
