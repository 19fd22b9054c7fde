"""The Model Context Protocol over HTTP: the endpoint, its event loop and its session ids."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import re
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any, Generic, TypeVar

from django.conf import settings
from django.http import HttpResponse
from django.http.response import HttpResponseBase
from django.utils.crypto import constant_time_compare, salted_hmac
from mcp.server.lowlevel.server import Server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.server.transport_security import TransportSecuritySettings
from rest_framework.exceptions import APIException, PermissionDenied
from rest_framework.request import Request

from executions.doors.mcp.results import DOOR, Run
from executions.doors.native.deferred import SSE, EventStream, answer, stream
from executions.doors.native.frame import RunningView, render_error, require_length
from executions.doors.native.rendering import json_response
from executions.kernel.bodies import BODY, CALL, TINY, BodyTooLarge, reading, require_size, value_of
from executions.kernel.coroutines import Coroutine
from executions.runs.event_log import resolve
from executions.runs.models import Execution
from executions.runs.record import Caller
from executions.runs.service import HasEnded, cancelling
from executions.tenants.models import ApiKey, Scope
from executions.tenants.tenant_scope import executions_of
from providers.errors import InvalidConfiguration
from providers.json_reading import Read

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

    def carry_out(self) -> Coroutine[None]:
        # From now on it goes on to its end, whether its tool still waits or not.
        if not self.done.set_running_or_notify_cancel():
            return
        try:
            result = yield from self._work()
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
        self._runs: list[Run] = []
        self._gone: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def carried_out(self, app: App, loop: asyncio.AbstractEventLoop) -> Coroutine[HttpResponseBase]:
        """Have the SDK answer, and do meanwhile what its tools ask for."""
        asyncio.run_coroutine_threadsafe(self._serve(app), loop)
        while True:
            yield self._next()
            with self._lock:
                job = self._jobs.popleft() if self._jobs else None
                if job is None and self._is_over:
                    break
            if job is not None:
                yield from job.carry_out()
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

    def note(self, run: Run) -> None:
        self._runs.append(run)
        if self.answer.left.done():
            run.end()

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
            run.end()
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
        self._lock = threading.Lock()
        self._served: Served | None = None
        os.register_at_fork(after_in_child=self._forget)

    def served(self) -> Served:
        """Start it, unless it has been."""
        with self._lock:
            if self._served is None:
                ready: Future[Served] = Future()
                threading.Thread(
                    target=lambda: asyncio.run(self._run(ready)), name="mcp", daemon=True
                ).start()
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

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._served = None


_FORM = re.compile(r"([0-9a-f]{32})\.([0-9a-f]{64})", re.ASCII)
_LONGEST_ID = 80


def new_session_id(key: ApiKey) -> str:
    nonce = secrets.token_hex(16)
    return f"{nonce}.{_mac(nonce, key)}"


def nonce_of(session_id: str, key: ApiKey) -> str:
    """What its requests have in common; empty for an id that is not this key's."""
    parts = _FORM.fullmatch(session_id)
    if parts is None or not constant_time_compare(_mac(parts[1], key), parts[2]):
        return ""
    return parts[1]


def request_id_of(nonce: str, message_id: object) -> str:
    """How the record of a run names the request that asked for it."""
    said = f"{type(message_id).__name__[0]}{message_id}"
    if len(said) > _LONGEST_ID or not said.isascii() or not said.isprintable():
        said = hashlib.sha256(said.encode("utf-8", "replace")).hexdigest()
    return f"mcp:{nonce}:{said}"


def _mac(nonce: str, key: ApiKey) -> str:
    said = f"{nonce}:{key.pk}:{key.key_hash}"
    return salted_hmac("cofferdam mcp session", said, algorithm="sha256").hexdigest()


MOST_MESSAGE_BYTES = 8 * 1024 * 1024
SESSION_HEADER = "Mcp-Session-Id"
_WRITING = (Scope.EXECUTE, Scope.FILES, Scope.SESSIONS)
_PARSE_ERROR, _INVALID_REQUEST, _REFUSED = -32700, -32600, -32001


class NotOurSession(APIException):
    status_code = 404
    default_detail = "Unknown MCP session. Start with initialize."


class BadMessage(InvalidConfiguration):
    """What is no JSON."""


class NoMessage(APIException):
    status_code = 400
    default_detail = "Send one JSON-RPC message; its id must be a string or a whole number."


class McpView(RunningView):
    schema = None
    http_method_names = ["post"]

    def get_exception_handler(self) -> Callable[..., HttpResponse]:
        return _as_message

    def perform_authentication(self, request: Request) -> None:
        # Before any key is looked at: a page of a browser has no business here.
        _refuse_foreign_origin(request)
        super().perform_authentication(request)

    def post(self, request: Request) -> HttpResponseBase:
        content = _content_of(request)
        message = _message_in(request, content, self.api_key)
        nonce = self._nonce(request)
        if nonce and message.get("method") == "notifications/cancelled":
            return answer(request, self.told(self._cancel(nonce, message)))
        return self._exchanged(request, content, message, nonce)

    def _nonce(self, request: Request) -> str:
        if not (given := request.headers.get(SESSION_HEADER, "")):
            return ""
        if not (nonce := nonce_of(given, self.api_key)):
            raise NotOurSession
        return nonce

    def _exchanged(
        self, request: Request, content: bytes, message: Mapping[str, Any], nonce: str
    ) -> HttpResponseBase:

        from executions.doors.mcp.server import served

        request_id = self.request_id
        if nonce and "id" in message:
            request_id = request_id_of(nonce, message["id"])
        caller = Caller.of_key(
            self.api_key,
            request_id=request_id,
            client_address=request.META.get("REMOTE_ADDR", "")[:64],
        )
        exchange = Exchange(caller, _scope_of(request), content)
        if message.get("method") == "initialize":
            exchange.answer[SESSION_HEADER] = new_session_id(self.api_key)
        work = exchange.carried_out(*served(MOST_MESSAGE_BYTES))
        return stream(request, self.told(work), exchange.answer)

    def _cancel(self, nonce: str, message: Mapping[str, Any]) -> Coroutine[HttpResponse]:
        """End what a request of the same MCP session runs, in whichever process it does."""
        params = message.get("params")
        asked = params.get("requestId") if isinstance(params, dict) else None
        if isinstance(asked, int | str):
            mine = executions_of(self.api_key.tenant).defer(None).defer("pending")
            status = (Execution.Status.RUNNING, Execution.Status.QUEUED)
            found = mine.filter(
                request_id=request_id_of(nonce, asked),
                api_key=self.api_key,
                background=False,
                tenant_slug=self.api_key.tenant.slug,
                finished_at=None,
                status__in=status,
            ).first()
            if found is not None:
                with contextlib.suppress(HasEnded):
                    yield from cancelling(found, f"key:{self.api_key.prefix}")
        return HttpResponse(status=202)


def _content_of(request: Request) -> bytes:
    require_length(request.META, MOST_MESSAGE_BYTES)
    source = request.stream
    return b"" if source is None else bytes(source.read(MOST_MESSAGE_BYTES))


def _message_in(request: Request, content: bytes, key: ApiKey) -> Mapping[str, Any]:
    """The message. What else it has to be, the SDK says.

    Raises BadMessage, NoMessage, and BodyTooLarge: only a call of a tool is large, and only by a
    key that does more than to read.
    """
    bounds = CALL if any(map(key.has_scope, _WRITING)) else TINY
    require_size(content, bounds)
    read: Future[Read] | None = request.META.get(BODY)
    if read is None:
        read = reading(content, bounds)
    try:
        message = value_of(read, bounds)
        if not isinstance(message, dict):
            raise NoMessage
        if message.get("method") != "tools/call":
            require_size(content, TINY)
            value_of(read, TINY)
    except (BodyTooLarge, NoMessage):
        raise
    except InvalidConfiguration as error:
        raise BadMessage(error.message, field="body") from None
    if "id" in message and (
        not isinstance(message["id"], int | str) or isinstance(message["id"], bool)
    ):
        raise NoMessage
    return message


def _scope_of(request: Request) -> dict[str, Any]:
    """The request as ASGI has it."""
    headers = [
        (name.lower().encode("latin-1"), value.encode("latin-1"))
        for name, value in request.headers.items()
    ]
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": request.scheme,
        "path": request.path,
        "raw_path": request.path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": headers,
        "client": None,
        "server": None,
    }


def _refuse_foreign_origin(request: Request) -> None:
    """A page that a browser was lured to may not call, whatever name it has made this host take."""
    host = request.get_host()
    if (origin := request.headers.get("Origin")) is None:
        return
    if origin in settings.CSRF_TRUSTED_ORIGINS or origin == f"{request.scheme}://{host}":
        return
    raise PermissionDenied("Calls from web pages of this origin are not allowed.")


def _as_message(exc: Exception, context: Mapping[str, Any]) -> HttpResponse:
    """An error of the product, as an error of JSON-RPC."""
    known = render_error(exc, context)
    said = json.loads(known.content)["error"]
    code = _PARSE_ERROR if isinstance(exc, BadMessage) else _REFUSED
    if isinstance(exc, NoMessage):
        code = _INVALID_REQUEST
    error = {"code": code, "message": said["message"], "data": said}
    response = json_response({"jsonrpc": "2.0", "id": None, "error": error}, known.status_code)
    for name in ("WWW-Authenticate", "Allow", "Retry-After"):
        if name in known:
            response[name] = known[name]
    return response
