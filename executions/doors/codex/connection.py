"""One connection of Codex: JSON-RPC over a WebSocket, one message a frame, for one session of ours.

What is known of a connection is state of the event loop. What a message asks for is done on
threads, by `call`, as a caller with the key: each time that is asked whether it is still valid, and
each request counts for its tenant.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar
from urllib.parse import parse_qsl
from uuid import UUID, uuid4

from executions.doors.codex import credentials, filesystem, http_requests, recovery
from executions.doors.codex.attachments import Attachment, Attachments
from executions.doors.codex.http_requests import HttpAnswer, HttpRequest
from executions.doors.codex.messages import (
    ALREADY_ATTACHED,
    INTERNAL,
    INVALID_REQUEST,
    METHOD_NOT_FOUND,
    MOST_PATH,
    NOBODY,
    Close,
    Copy,
    Create,
    Failure,
    Initialize,
    OnePath,
    Open,
    Params,
    Paths,
    Read,
    ReadBlock,
    Remove,
    Signal,
    Start,
    Terminate,
    Walk,
    Write,
    WriteFile,
    failure_of,
    normal_path,
    plain,
    read_params,
)
from executions.doors.codex.process import Process, command_of
from executions.doors.codex.processes import Call, Started
from executions.doors.codex.recovery import Found, Moved, Name
from executions.doors.session_options import OPTIONS, read_options
from executions.doors.unknown_names import log_unknown
from executions.kernel.bodies import requests_of
from executions.kernel.coroutines import Coroutine
from executions.runs.event_log import EventLog
from executions.runs.requests import Caller
from executions.runs.rights import KeyRight
from executions.runs.routing import COMMANDS, ensure_language
from executions.sessions import cells
from executions.sessions.control import open_session
from executions.sessions.models import Session
from executions.sessions.queries import living_session_of
from executions.sessions.requests import NoSuchSession, SessionRequest
from executions.sessions.waiting_commands import Asked, ask_first, start_approved, withdraw
from executions.tenants import keys
from executions.tenants.models import ApiKey, Scope
from executions.tenants.quotas import take_request
from providers.errors import InvalidConfiguration
from providers.json_reading import Bounds, read_text

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Messages of one connection that are under way, and their bytes: one is taken in any case.
MOST_UNDER_WAY, MOST_BYTES = 32, 4 * 1024 * 1024
# Of a message: more values would take many times the memory of its text.
_BOUNDS = Bounds(MOST_BYTES, 10_000, depth=64)
_OPEN = (Scope.SESSIONS,)
_RUN = (Scope.EXECUTE, Scope.SESSIONS)
_FILES = (Scope.FILES,)
# What the query of the address may name; the last is the client's own working directory.
_QUERY = (*OPTIONS, "folder")
_UNKNOWN = "a client of Codex sent a method that is not supported: %s"


@dataclass(frozen=True)
class Admitted:
    """Whose a connection is, and the query that says with which session it begins."""

    key_id: int
    tenant_slug: str
    address: str
    right: KeyRight
    query: str
    # Of the service, as its peer names it: where the pages of a person are.
    origin: str = ""


def admit(path: str, meta: Mapping[str, Any]) -> Admitted:
    """Return whose a connection is, by its path and its headers. Raises Unauthenticated, and
    InvalidConfiguration for a query that names what is not there."""
    key = credentials.authenticate(path, meta)
    address = str(meta.get("REMOTE_ADDR", ""))
    right = KeyRight(key.pk, key.tenant.slug, frozenset(key.scopes.split()), address)
    query = str(meta.get("QUERY_STRING", ""))
    read_query(query)
    return Admitted(key.pk, key.tenant.slug, address, right, query, _origin(meta))


def _origin(meta: Mapping[str, Any]) -> str:
    host = plain(str(meta.get("HTTP_HOST", "")), 255)
    # Which a proxy that is not trusted does not say: see `client_address`.
    said = {meta.get("wsgi.url_scheme"), meta.get("HTTP_X_FORWARDED_PROTO")}
    scheme = "https" if said & {"https", "wss"} else "http"
    return f"{scheme}://{host}" if host else ""


def read_query(query: str, agent: str = "") -> tuple[SessionRequest, Paths]:
    """Return the session that a query asks for, and how its client names paths. Raises
    InvalidConfiguration. `agent` is what the client calls itself."""
    try:
        pairs = parse_qsl(query, keep_blank_values=True, max_num_fields=2 * len(_QUERY))
    except ValueError:
        raise InvalidConfiguration("query: Has too many fields.", field="query") from None
    given = dict(pairs)
    if len(given) != len(pairs) or not given.keys() <= set(_QUERY):
        known = ", ".join(_QUERY)
        raise InvalidConfiguration(f"query: May have each of {known} once.", field="query")
    paths = _paths(given.pop("folder", ""))
    return read_options(given, agent), paths


def _paths(folder: str) -> Paths:
    if not folder:
        return Paths()
    path = normal_path(folder)
    if not folder.startswith("/") or path == "/" or len(path) > MOST_PATH or "\0" in path:
        raise InvalidConfiguration(
            "folder: Must be an absolute path, and not the root.", field="folder"
        )
    return Paths(path)


class Connection:
    """One peer's. `say` sends a text, and `call` has work done on threads."""

    def __init__(
        self,
        admitted: Admitted,
        attachments: Attachments,
        say: Callable[[str], Awaitable[None]],
        call: Call,
    ) -> None:
        self._admitted = admitted
        self._attachments = attachments
        self._say = say
        self._call = call
        _, self._paths = read_query(admitted.query)
        self._attached: Attachment | None = None
        self._agent = ""
        self._is_opening = False
        self._is_initialized = False
        self._has_left = False
        self._handles = filesystem.Handles()
        self._under_way: set[asyncio.Task[None]] = set()
        self._bytes = 0
        # One text at a time; and one answer at a time of those that may be long.
        self._saying = asyncio.Lock()
        self._large = asyncio.Lock()
        self._requesting = asyncio.Lock()

    @property
    def has_room(self) -> bool:
        return len(self._under_way) < MOST_UNDER_WAY and self._bytes < MOST_BYTES

    async def wait_for_room(self, seconds: float) -> None:
        """Wait until something that is under way has ended, for so many seconds at most."""
        await asyncio.wait(self._under_way, timeout=seconds, return_when="FIRST_COMPLETED")

    async def take(self, text: str) -> None:
        """Take one message. What it asks for goes on after this."""
        body = text.encode()
        try:
            message = read_text(body, _BOUNDS).value
        except ValueError as error:
            await self._refuse(NOBODY, Failure(INVALID_REQUEST, f"The message: {error}."))
            return
        if not isinstance(message, dict) or not isinstance(method := message.get("method"), str):
            failure = Failure(INVALID_REQUEST, "Send one request or notification as an object.")
            await self._refuse(NOBODY, failure)
            return
        if "id" not in message:
            await self._note(method)
            return
        request_id = message["id"]
        if type(request_id) not in (int, str) or len(str(request_id)) > 256:
            failure = Failure(INVALID_REQUEST, "id: Must be a number or a string.")
            await self._refuse(NOBODY, failure)
            return
        size = len(body)
        task = asyncio.create_task(self._answer(request_id, method, message.get("params"), size))
        self._under_way.add(task)
        self._bytes += size

        def end(done: asyncio.Task[None]) -> None:
            self._under_way.discard(done)
            self._bytes -= size

        task.add_done_callback(end)

    async def notify(self, method: str, params: Mapping[str, Any]) -> None:
        """Tell the peer, if it is still there. At its own pace: whoever tells waits for it."""
        await self._send({"method": method, "params": params})

    def leave(self) -> None:
        """The peer has gone. What is under way goes on to its end."""
        self._has_left = True
        if self._attached is not None:
            self._attachments.detach(self._attached)

    async def _note(self, method: str) -> None:
        if method == "initialized" and self._attached is not None:
            self._is_initialized = True
            return
        log_unknown(logger, _UNKNOWN, method)
        failure = Failure(INVALID_REQUEST, f"unexpected notification {method[:64]}")
        await self._refuse(NOBODY, failure)

    async def _answer(self, request_id: int | str, method: str, given: Any, size: int) -> None:
        try:
            known = _METHODS.get(method)
            if known is None:
                log_unknown(logger, _UNKNOWN, method)
                raise Failure(METHOD_NOT_FOUND, f"the method {method[:64]} is not supported")
            model, handle = known
            if method != "initialize" and not self._is_initialized:
                raise Failure(INVALID_REQUEST, "client must call initialize and send initialized")
            await handle(self, _Answer(self, request_id, size), read_params(model, given))
        except Exception as error:
            failure = failure_of(error)
            if failure is None:
                logger.exception("a call of Codex failed inside the service")
                failure = Failure(INTERNAL, "The call failed inside the service.")
            await self._refuse(request_id, failure)

    async def _refuse(self, request_id: int | str, failure: Failure) -> None:
        error = {"code": failure.code, "message": failure.message}
        await self._send({"id": request_id, "error": error})

    async def _send(self, message: Mapping[str, Any]) -> None:
        async with self._saying:
            await self._say_now(message)

    async def _say_now(self, message: Mapping[str, Any]) -> None:
        if self._has_left:
            return
        # The server says so by an error that the connection has ended meanwhile.
        with suppress(OSError):
            await self._say(json.dumps(message, separators=(",", ":")))

    async def _do(
        self,
        scopes: tuple[Scope, ...],
        work: Callable[[ApiKey], Coroutine[T]],
        *,
        reads: bool,
        size: int = 0,
    ) -> T:
        """Do something with the key. Raises Failure where it lacks a scope or is not valid."""

        async def checked() -> T:
            key = _valid_key(self._admitted)
            _ensure_scopes(key, scopes, self._admitted.address)
            take_request(key.tenant, only_reads=reads, counts_as=requests_of(size)).require()
            return await work(key)

        return await self._call(checked)

    async def _on_session(
        self,
        scopes: tuple[Scope, ...],
        work: Callable[[Session, ApiKey], Coroutine[T]],
        *,
        reads: bool = False,
        size: int = 0,
    ) -> T:
        attachment = self._attachment()

        async def with_session(key: ApiKey) -> T:
            return await work(_session_of(key, attachment.session_id), key)

        return await self._do(scopes, with_session, reads=reads, size=size)

    def _attachment(self) -> Attachment:
        if self._attached is None:
            raise Failure(INVALID_REQUEST, "client must call initialize before using methods")
        return self._attached

    async def initialize(self, answer: _Answer, wanted: Initialize) -> None:
        """Open a session, or find one again."""
        if self._is_opening:
            failure = "initialize may only be sent once per connection"
            raise Failure(INVALID_REQUEST, failure)
        self._is_opening = True
        agent = plain(wanted.client_name, 255)
        resumed = wanted.resume_session_id
        try:
            if resumed is None:
                session_id = await self._do(_OPEN, lambda key: self._open(key, agent), reads=False)
            else:
                session_id = await self._do(_OPEN, lambda key: _resume(key, resumed), reads=True)
            attached = self._attachments.attach(session_id, self, self._call)
            try:
                await self._take_over(attached, is_new=resumed is None)
            except BaseException:
                self._attachments.detach(attached)
                raise
        except BaseException:
            self._is_opening = False
            raise
        self._attached, self._agent = attached, agent
        if self._has_left:
            self._attachments.detach(attached)
            return
        await answer.give(
            {"sessionId": str(session_id), "environmentInfo": self._paths.environment}
        )

    async def _open(self, key: ApiKey, agent: str) -> UUID:
        wanted, _ = read_query(self._admitted.query, agent)
        session = await open_session(wanted, self._caller(key))
        return session.pk

    async def _take_over(self, attached: Attachment, *, is_new: bool) -> None:
        """Note that its client is here from now on, and find what it knows from elsewhere."""
        session_id, mark = attached.session_id, uuid4()

        async def note() -> UUID | None:
            return recovery.take_over(session_id, mark)

        former = await self._call(note)
        if not is_new and (attached.mark is None or attached.mark != former):
            found = await self._call(lambda: _found_in(session_id))
            attached.begin_anew()
            attached.processes.adopt(
                found,
                partial(self._start_approved, attached),
                attached.on_session,
                self._admitted.origin,
            )
        attached.mark = mark

    def _caller(self, key: ApiKey, request_id: str = "") -> Caller:
        return Caller.of_key(
            key,
            request_id=request_id or uuid4().hex,
            client_address=self._admitted.address[:64],
        )

    async def info(self, answer: _Answer, wanted: Params) -> None:
        await answer.give(self._paths.environment)

    async def status(self, answer: _Answer, wanted: Params) -> None:
        await answer.give({"status": "ready"})

    async def start(self, answer: _Answer, wanted: Start) -> None:
        """Start a process: an execution of the session, by the rules that hold for every one."""
        attachment = self._attachment()
        command = command_of(wanted, self._paths, self._agent)
        call_id = plain(wanted.metadata.tool_call_id, 128) if wanted.metadata else ""

        async def run(session: Session, key: ApiKey) -> Started | Asked:
            if session.attachment != attachment.mark:
                # Whoever has it now would never be told of what is started here, nor end it.
                message = f"session {session.pk} is attached to another connection now"
                raise Failure(ALREADY_ATTACHED, message)
            if wanted.enforce_managed_network and session.network is not None:
                raise Failure(
                    INVALID_REQUEST,
                    "enforceManagedNetwork: The session has a network, whose list is Cofferdam's. "
                    "Open a session without a network.",
                )
            caller = self._caller(key, call_id)
            name = Name.of(wanted).new_key()
            if (asked := await ask_first(session, command, caller, name)) is not None:
                return asked
            logs: list[EventLog] = []
            execution = await cells.start_command(
                session, command, caller, key=name, on_start=logs.append, is_kept=False
            )
            return execution, logs[0]

        await answer.give(
            await attachment.processes.start(
                wanted,
                lambda: self._on_session(_RUN, run),
                partial(self._start_approved, attachment),
                attachment.on_session,
                self._admitted.origin,
            )
        )

    async def _start_approved(self, attachment: Attachment, execution_id: UUID) -> Started:
        """Start what was approved, as the key may do now. Raises Moved, and what starting does."""
        session_id, mark = attachment.session_id, attachment.mark

        async def work() -> Started:
            if mark is not None and not recovery.is_latest(session_id, mark):
                raise Moved
            key = _valid_key(self._admitted)
            _ensure_scopes(key, _RUN, self._admitted.address)
            logs: list[EventLog] = []
            execution = await start_approved(
                _session_of(key, session_id), execution_id, self._caller(key), on_start=logs.append
            )
            return execution, logs[0]

        return await self._call(work)

    async def read(self, answer: _Answer, wanted: Read) -> None:
        process = self._attachment().processes.find(wanted.process_id)
        process.resume(wanted.after_seq or 0)
        await process.wait(wanted)
        # What is read is in memory once, when its turn has come to be sent.
        await answer.give_now(lambda: process.read(wanted))

    async def write(self, answer: _Answer, wanted: Write) -> None:
        processes = self._attachment().processes
        await answer.give(await processes.write(wanted, self._with_process))

    async def signal(self, answer: _Answer, wanted: Signal) -> None:
        if wanted.signal != "interrupt":
            raise Failure(INVALID_REQUEST, "signal: Must be interrupt.")
        processes = self._attachment().processes
        process = processes.find(wanted.process_id)
        if process.is_waiting:
            await self._withdraw(process)
        else:
            await processes.signal(process, "SIGINT", self._with_process)
        await answer.give({})

    async def terminate(self, answer: _Answer, wanted: Terminate) -> None:
        processes = self._attachment().processes
        process = processes.of(wanted.process_id)
        if process is None:
            is_running = False
        elif process.is_waiting:
            is_running = await self._withdraw(process)
        else:
            is_running = await processes.signal(process, "SIGKILL", self._with_process)
        await answer.give({"running": is_running})

    async def _withdraw(self, process: Process) -> bool:
        """Have one that waits never run, or end it where it was started in this moment."""
        if (execution_id := process.execution_id) is None:
            return False
        return await self._do(
            _RUN, lambda key: withdraw(execution_id, f"key:{key.prefix}"), reads=False
        )

    async def _with_process(self, use: Callable[[Session], Coroutine[T]]) -> T:
        async def work(session: Session, key: ApiKey) -> T:
            # Whoever types into a shell runs commands.
            ensure_language(key, *COMMANDS)
            return await use(session)

        return await self._on_session(_RUN, work)

    async def open(self, answer: _Answer, wanted: Open) -> None:
        path = await self._on_session(
            _FILES,
            lambda session, _: filesystem.open_file(session, self._paths, wanted),
            reads=True,
        )
        self._handles.add(wanted.handle_id, path)
        await answer.give({"handleId": wanted.handle_id})

    async def read_block(self, answer: _Answer, wanted: ReadBlock) -> None:
        path = self._handles.path(wanted.handle_id)
        async with self._large:
            found = await self._on_session(
                _FILES, lambda session, _: filesystem.read_block(session, path, wanted), reads=True
            )
            await answer.give(found)

    async def close(self, answer: _Answer, wanted: Close) -> None:
        self._handles.remove(wanted.handle_id)
        await answer.give({})

    async def http(self, answer: _Answer, wanted: HttpRequest) -> None:
        """Have a program in the sandbox send a request."""

        async def work(session: Session, key: ApiKey) -> HttpAnswer:
            return await http_requests.send(session, wanted, self._caller(key), self._agent)

        async with self._requesting:
            found = await self._on_session(_RUN, work)
            await answer.give(found.shape(has_body=not wanted.stream_response))
            if wanted.stream_response:
                for piece in found.pieces(wanted.request_id):
                    await self.notify("http/request/bodyDelta", piece)


class _Answer:
    """The place of one answer."""

    def __init__(self, connection: Connection, request_id: int | str, size: int) -> None:
        # Of the request, in bytes: a large one counts as several.
        self.size = size
        self._connection = connection
        self._id = request_id

    async def give(self, result: Mapping[str, Any]) -> None:
        await self._connection._send({"id": self._id, "result": result})

    async def give_now(self, make: Callable[[], Mapping[str, Any]]) -> None:
        async with self._connection._saying:
            await self._connection._say_now({"id": self._id, "result": make()})


Handle = Callable[[Connection, _Answer, Any], Awaitable[None]]


def _files(
    use: Callable[[Session, Paths, Any], Coroutine[filesystem.Answer]],
    *,
    reads: bool,
    is_large: bool = False,
) -> Handle:
    """A method that is one operation on files."""

    async def handle(connection: Connection, answer: _Answer, wanted: Any) -> None:
        async def do() -> None:
            found = await connection._on_session(
                _FILES,
                lambda session, _: use(session, connection._paths, wanted),
                reads=reads,
                size=answer.size,
            )
            await answer.give(found)

        if not is_large:
            await do()
            return
        # One at a time, until it was sent.
        async with connection._large:
            await do()

    return handle


_METHODS: Mapping[str, tuple[type[Params], Handle]] = {
    "initialize": (Initialize, Connection.initialize),
    "environment/info": (Params, Connection.info),
    "environment/status": (Params, Connection.status),
    "process/start": (Start, Connection.start),
    "process/read": (Read, Connection.read),
    "process/write": (Write, Connection.write),
    "process/signal": (Signal, Connection.signal),
    "process/terminate": (Terminate, Connection.terminate),
    "fs/open": (Open, Connection.open),
    "fs/readBlock": (ReadBlock, Connection.read_block),
    "fs/close": (Close, Connection.close),
    "fs/readFile": (OnePath, _files(filesystem.read_file, reads=True, is_large=True)),
    "fs/writeFile": (WriteFile, _files(filesystem.write_file, reads=False)),
    "fs/createDirectory": (Create, _files(filesystem.create_directory, reads=False)),
    "fs/getMetadata": (OnePath, _files(filesystem.get_metadata, reads=True)),
    "fs/canonicalize": (OnePath, _files(filesystem.canonicalize, reads=True)),
    "fs/readDirectory": (OnePath, _files(filesystem.read_directory, reads=True, is_large=True)),
    "fs/walk": (Walk, _files(filesystem.walk, reads=True, is_large=True)),
    "fs/remove": (Remove, _files(filesystem.remove, reads=False)),
    "fs/copy": (Copy, _files(filesystem.copy, reads=False, is_large=True)),
    "http/request": (HttpRequest, Connection.http),
}


def _valid_key(admitted: Admitted) -> ApiKey:
    key = keys.of_id(admitted.key_id)
    try:
        if key is None:
            raise keys.Unauthenticated
        keys.ensure_valid(key, admitted.address)
    except keys.Unauthenticated:
        raise Failure(INVALID_REQUEST, "The API key is not valid any more.") from None
    return key


def _ensure_scopes(key: ApiKey, scopes: tuple[Scope, ...], address: str) -> None:
    if missing := [scope.value for scope in scopes if not key.has_scope(scope)]:
        needed = " and ".join(missing)
        keys.note_refusal(key, "scope", detail=f"codex needs {needed}", address=address)
        raise Failure(INVALID_REQUEST, f"The API key lacks the required scope: {needed}.")


def _session_of(key: ApiKey, session_id: UUID) -> Session:
    """The key's session. One of another key is as one that is not there."""
    session = living_session_of(key.tenant, session_id)
    if session.api_key_id != key.pk:
        raise NoSuchSession("Session not found.")
    return session


async def _resume(key: ApiKey, text: str) -> UUID:
    try:
        session_id = UUID(text)
    except ValueError:
        raise Failure(INVALID_REQUEST, f"unknown session id {plain(text, 64)}") from None
    if not recovery.resumable(key, session_id):
        raise Failure(INVALID_REQUEST, f"unknown session id {plain(text, 64)}")
    return session_id


async def _found_in(session_id: UUID) -> list[Found]:
    return recovery.find(session_id)
