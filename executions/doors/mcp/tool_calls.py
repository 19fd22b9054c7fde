"""The tools of the MCP server: runs and sessions."""

from __future__ import annotations

import asyncio
import base64
import io
import time
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, get_args

import mcp_types as types
from django.http import Http404

from executions.doors.mcp.results import (
    EXECUTION,
    MOST_CHARACTERS,
    Call,
    Door,
    Tool,
    by,
    run_answer,
    tenant_of,
    tool_result,
)
from executions.doors.native.authentication import NEEDS
from executions.doors.native.frame import keep_outcome
from executions.doors.native.rendering import session_for
from executions.doors.native.session_files import at_most, entry_detail
from executions.kernel.coroutines import Coroutine, wait_for
from executions.kernel.declarations import refuse
from executions.kernel.text import to_json, to_text
from executions.runs import extensions
from executions.runs.active_runs import ClientRun
from executions.runs.advice import advice_of, importable
from executions.runs.event_log import Broadcast, EventLog, EventSource, RunEvent
from executions.runs.event_stream import Listener, first_of, follow
from executions.runs.models import Execution
from executions.runs.record import Outcome
from executions.runs.requests import CELL, RUN, ExecutionRequest, decode_base64, run_limits
from executions.runs.results import executions_of
from executions.runs.routing import allowed_languages, languages_for
from executions.runs.service import execute
from executions.sessions import cells, control, files
from executions.sessions.background_commands import record_if_ended
from executions.sessions.control import open_session
from executions.sessions.ending import close
from executions.sessions.models import Session
from executions.sessions.queries import LIST, list_sessions, living_session_of, session_of
from executions.sessions.requests import OPEN, SIGNAL, SIGNALS, START, FileListing, FileRequest
from executions.sessions.session_sandbox import OPERATION_SECONDS
from executions.tenants.quotas import ENTRY_COUNTS_AS, take_request
from providers.errors import ProviderUnavailable
from providers.network import PRESETS, Mode
from providers.sandbox import FileEntry
from providers.waiting import within

# How often progress is told at most, how much of the output a notification has, and how much of it
# is read at once.
TELL_SECONDS = 0.1
MOST_TOLD_CHARACTERS = 2_000
_READ_BYTES = 32 * 1024
MOST_WAIT_SECONDS = 30

Begin = Callable[[EventLog], Coroutine[Outcome]]


async def languages(door: Door) -> tuple[list[str], str]:
    """What the client's code can be in now, and what it can import, as `GET /api/v1/languages`
    tells it. Raises SandboxError where no provider can be asked."""
    slug, key = tenant_of(door).slug, door.caller.api_key
    if key is None:
        found, packages = await languages_for(slug)
    else:
        found, packages = await languages_for(slug, partial(key.allows, "providers"))
        found = list(allowed_languages(key, found))
    allowed = extensions.allowed_languages(slug, found)
    return allowed, importable(packages) if "python" in allowed else ""


async def run_code(call: Call) -> types.CallToolResult:
    given = call.given
    files = given.pop("files", None)
    if files is not None:
        given["files"] = _encode_files(files)
    return await _run_and_report(
        call, lambda log: execute(RUN.read(given), call.door.caller, log=log, waits=True)
    )


async def session_run(call: Call) -> types.CallToolResult:
    session_id = call.id("session_id")
    given = call.given

    async def begin(log: EventLog) -> Outcome:
        wanted: ExecutionRequest = CELL.read(given, session=session_id)
        return await execute(wanted, call.door.caller, log=log, waits=True)

    return await _run_and_report(call, begin)


async def command_run(call: Call) -> types.CallToolResult:
    session_id, body = call.id("session_id"), _command(call)

    async def begin(log: EventLog) -> Outcome:
        session = living_session_of(tenant_of(call.door), session_id)
        wanted = START.read(body)
        return await cells.run_command(session, wanted, call.door.caller, log)

    return await _run_and_report(call, begin)


async def command_start(call: Call) -> types.CallToolResult:
    session_id, body = call.id("session_id"), _command(call)

    async def work() -> Execution:
        session = living_session_of(tenant_of(call.door), session_id)
        wanted = START.read({**body, "background": True})
        return await cells.start_command(session, wanted, call.door.caller)

    started = await call.door.do(work)
    return tool_result({"pid": started.pid, "execution_id": str(started.pk)})


async def command_signal(call: Call) -> types.CallToolResult:
    session_id, pid = call.id("session_id"), _pid(call)
    body = call.given

    async def work() -> bool:
        session = living_session_of(tenant_of(call.door), session_id)
        if not cells.is_there(session, pid):
            raise Http404
        return await cells.send_signal(session, pid, SIGNAL.read(body).signal)

    return tool_result({"signalled": await call.door.do(work)})


async def command_output(call: Call) -> types.CallToolResult:
    """What a command in the background has put out since `after`, waiting a little for more."""
    session_id, pid = call.id("session_id"), _pid(call)
    after = call.whole("after", 0, 0, 10**15)
    seconds = call.whole("wait", 1, 0, MOST_WAIT_SECONDS)

    async def work() -> dict[str, Any]:
        session = living_session_of(tenant_of(call.door), session_id)
        execution_id = cells.execution_of(session, pid)
        if execution_id is None:
            raise Http404
        reader = _Reader(seconds)
        await follow(execution_id, reader, after, _listener(call))
        entries = reader.read(after)
        execution = executions_of(tenant_of(call.door)).get(pk=execution_id)
        await _record_end(session, execution, seconds)
        return _output_of(execution, entries, after)

    return tool_result(await call.door.do(work))


async def execution_output(call: Call) -> types.CallToolResult:
    execution_id = call.id("execution_id")
    name = call.take("stream", "stdout")
    if name not in STREAM_NAMES:
        refuse("stream", f"Must be one of: {', '.join(STREAM_NAMES)}.")
    offset = call.whole("offset", 0, 0, 10**9)

    async def work() -> dict[str, Any]:
        execution = executions_of(tenant_of(call.door)).filter(pk=execution_id).first()
        if execution is None:
            raise Http404
        text = getattr(execution, name)
        end = min(len(text), offset + MOST_CHARACTERS)
        return {
            "status": execution.status,
            "text": text[offset:end],
            "total": len(text),
            "next_offset": end if end < len(text) else None,
        }

    return tool_result(await call.door.do(work))


STREAM_NAMES = ("stdout", "stderr", "result", "outputs")


class _Reader:
    """Follows for so many seconds, and then has what came."""

    def __init__(self, seconds: float) -> None:
        self.is_waited_for = True
        self.left = Broadcast()
        self._source: EventSource | None = None
        within(seconds, Future[None]()).add_done_callback(lambda _: self._leave())

    def begin(self, source: EventSource) -> None:
        self._source = source

    def read(self, after: int) -> Sequence[RunEvent]:
        return self._source.read(after, _READ_BYTES)[0] if self._source is not None else ()

    def _leave(self) -> None:
        if not self.left.done():
            self.left.set_result(None)


def _listener(call: Call) -> Listener:
    key = call.door.caller.api_key
    return (
        Listener("command:mcp", tenant_of(call.door).slug) if key is None else Listener.of_key(key)
    )


async def _record_end(session: Session, execution: Execution, seconds: float) -> None:
    """Its end, where it has one: who follows it writes that down a moment after its output."""
    if execution.finished_at is None:
        await wait_for(first_of(seconds=min(seconds, 0.2)))
        await record_if_ended(session, execution)
        execution.refresh_from_db()


def _output_of(execution: Execution, entries: Sequence[RunEvent], after: int) -> dict[str, Any]:
    texts = {"stdout": "", "stderr": ""}
    for entry in entries:
        if entry.type in texts:
            texts[entry.type] += entry.body().get("text", "")
    return {
        **texts,
        "state": "running" if execution.finished_at is None else "exited",
        "exit_code": execution.exit_code,
        "advice": advice_of(execution),
        "next": entries[-1].seq if entries else after,
    }


def _command(call: Call) -> dict[str, Any]:
    """A command of bash, in the words of the native API."""
    return {"shell": call.text("command"), **call.given}


def _pid(call: Call) -> int:
    return call.whole("pid", 0, 1, 2**31 - 1)


def _encode_files(files: Any) -> list[dict[str, str]]:
    if not isinstance(files, dict) or not all(isinstance(each, str) for each in files.values()):
        refuse("files", "Must be an object with the text of each file by its path.")
    return [
        {"path": path, "content_base64": b64encode(text.encode("utf-8", "replace")).decode()}
        for path, text in files.items()
    ]


async def _run_and_report(call: Call, begin: Begin) -> types.CallToolResult:
    """Run it, tell what it puts out, and end it when the call is cancelled."""
    run = ClientRun(EventLog(run_limits()), "its client, which cancelled the call or left")

    async def work() -> types.CallToolResult:
        outcome = await begin(run.log)
        with keep_outcome(outcome):
            return run_answer(outcome.execution)

    call.door.note(run)
    done = asyncio.ensure_future(call.door.do(work))
    try:
        await _progress(call, run.log, done)
        return await done
    except asyncio.CancelledError:
        run.cancel()
        raise


async def _progress(call: Call, log: EventLog, done: asyncio.Future[Any]) -> None:
    """Tell what has come, now and then, and the rest when it is done, which nothing delays."""
    after = told = 0
    while True:
        changed = asyncio.wrap_future(log.next_change(after))
        await asyncio.wait({done, changed}, return_when=asyncio.FIRST_COMPLETED)
        changed.cancel()
        entries, _ = log.read(after, _READ_BYTES)
        if entries:
            after = entries[-1].seq
            told += sum(len(entry.data) for entry in entries)
            if text := _text_of(entries):
                await call.tell(float(told), text[-MOST_TOLD_CHARACTERS:])
        elif done.done():
            return
        await asyncio.wait({done}, timeout=TELL_SECONDS)


def _text_of(entries: Sequence[RunEvent]) -> str:
    parts = []
    for entry in entries:
        if entry.type == "output":
            shown = (entry.said or {}).get("data") or {}
            parts.append(str(shown.get("text/plain", "")) or to_json(list(shown)))
        else:
            parts.append(entry.data.decode("utf-8", "replace"))
    return "".join(parts)


MOST_READ_BYTES = 64 * 1024
MOST_LISTED, MOST_SESSIONS = 200, 20
_PAUSE_SECONDS = 0.02
_SHOWN = ("name", "state", "language", "provider", "isolation", "created_at", "expires_at")


async def session_open(call: Call) -> types.CallToolResult:
    given = call.given

    async def work() -> dict[str, Any]:
        return _session_detail((await open_session(OPEN.read(given), call.door.caller)), call.door)

    return tool_result(await call.door.do(work))


async def session_list(call: Call) -> types.CallToolResult:
    query = {name: str(value) for name, value in call.given.items() if value is not None}

    async def work() -> dict[str, Any]:
        wanted = LIST.read({"limit": str(MOST_SESSIONS), **query})
        page = list_sessions(tenant_of(call.door), wanted)
        return {
            "sessions": [_session_detail(session, call.door) for session in page.sessions],
            "next": page.next_cursor or None,
        }

    return tool_result(await call.door.do(work))


async def session_reset(call: Call) -> types.CallToolResult:
    session_id = call.id("session_id")

    async def work() -> dict[str, Any]:
        tenant = tenant_of(call.door)
        session = living_session_of(tenant, session_id)
        # The message itself was counted as one request.
        take_request(tenant, counts_as=ENTRY_COUNTS_AS - 1).require()
        return _session_detail((await control.reset(session, by(call.door))), call.door)

    return tool_result(await call.door.do(work))


async def session_close(call: Call) -> types.CallToolResult:
    session_id = call.id("session_id")

    async def work() -> None:
        session = session_of(tenant_of(call.door), session_id)
        if session.closed_at is None:
            await close(session, by(call.door))

    await call.door.do(work)
    return tool_result({"closed": True})


async def file_list(call: Call) -> types.CallToolResult:
    session_id = call.id("session_id")
    path, after = call.take("path", ""), call.take("after", "")
    depth = call.take("depth", 1)

    async def work() -> dict[str, Any]:
        wanted = FileListing(path=path, depth=depth, after=after)
        session = living_session_of(tenant_of(call.door), session_id)
        found, more = await files.list_files(session, wanted)
        page = found[:MOST_LISTED]
        if len(found) > MOST_LISTED:
            more = to_text(page[-1].path)
        return {"entries": [entry_detail(entry) for entry in page], "next": more or None}

    return tool_result(await call.door.do(work))


async def file_read(call: Call) -> types.CallToolResult:
    session_id, path = call.id("session_id"), call.take("path")
    offset = call.whole("offset", 0, 0, 2**53)

    async def work() -> dict[str, Any]:
        wanted = FileRequest(path=path)
        session = living_session_of(tenant_of(call.door), session_id)
        seen = await files.file_of(session, wanted.path)
        if seen is None:
            raise Http404
        length = max(0, min(MOST_READ_BYTES, seen.size - offset))
        content = b""
        if length:
            content = await _all(files.read(session, wanted.path, offset, length), length)
        return _content(content, seen, offset)

    return tool_result(await call.door.do(work))


async def file_write(call: Call) -> types.CallToolResult:
    session_id, path = call.id("session_id"), call.take("path")
    text, encoded = call.take("text"), call.take("content_base64")
    content = _bytes_of(text, encoded)

    async def work() -> FileEntry:
        wanted = FileRequest(path=path)
        session = living_session_of(tenant_of(call.door), session_id)
        sent = files.Rereadable(io.BytesIO(content))
        return await files.write_file(session, wanted.path, sent)

    return tool_result(entry_detail(await call.door.do(work)))


def _session_detail(session: Session, door: Door) -> dict[str, Any]:
    detail: Mapping[str, Any] = session_for(door.caller.api_key, session)
    contexts = [each["id"] for each in detail["contexts"]]
    return {
        "session_id": detail["id"],
        **{name: detail[name] for name in _SHOWN},
        "contexts": contexts,
    }


def _bytes_of(text: Any, encoded: Any) -> bytes:
    if (text is None) == (encoded is None):
        refuse("text", "Send either text or content_base64.")
    if text is not None:
        if not isinstance(text, str):
            refuse("text", "Must be a string.")
        return text.encode("utf-8", "replace")
    try:
        return decode_base64(encoded)
    except ValueError as error:
        refuse("content_base64", str(error))


async def _all(pieces: Iterator[bytes], length: int) -> bytes:
    """Read it without holding a thread: a guest may take its time, but not all there is."""
    until = time.monotonic() + OPERATION_SECONDS
    parts = []
    for piece in at_most(pieces, length):
        parts.append(piece)
        if not piece:
            if time.monotonic() > until:
                raise ProviderUnavailable("The sandbox did not send the file in time.")
            await wait_for(within(_PAUSE_SECONDS, Future[None]()))
    return b"".join(parts)


def _content(content: bytes, seen: FileEntry, offset: int) -> dict[str, Any]:
    """As text where it is UTF-8; a character that is cut at the end belongs to the next part."""
    end = offset + len(content)
    text, encoded = None, None
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        if end < seen.size and error.start > 0 and error.start >= len(content) - 3:
            content = content[: error.start]
            end = offset + len(content)
            text = content.decode()
        else:
            encoded = base64.b64encode(content).decode()
    return {
        "text": text,
        "content_base64": encoded,
        "size_bytes": seen.size,
        "next_offset": end if content and end < seen.size else None,
    }


TEXT: Mapping[str, Any] = {"type": "string"}
MAYBE_TEXT: Mapping[str, Any] = {"type": ["string", "null"]}
WHOLE: Mapping[str, Any] = {"type": "integer", "minimum": 0}


def _text(description: str) -> dict[str, Any]:
    return {**TEXT, "description": description}


def _object(description: str, **values: Any) -> dict[str, Any]:
    return {"type": "object", "description": description, **values}


SESSION_ID = _text("The id that session_open returned.")
PID = {"type": "integer", "description": "The pid that command_start returned."}
TIMEOUT = {
    "type": "number",
    "exclusiveMinimum": 0,
    "description": "In seconds; the default is the service's. Code that runs longer is ended.",
}
CODE = _text("The program, as text. Print what you want to see.")
PATH = _text("Relative to the session's working folder, without '..'.")
CWD = _text("Folder below the working folder.")
ENVIRONMENT = _object("Environment variables.", additionalProperties=TEXT)
NETWORK = _object(
    "The hosts that the code may reach, within what the service allows; without it mostly none.",
    properties={
        "mode": {**TEXT, "enum": list(get_args(Mode))},
        "allow": {
            "type": "array",
            "items": TEXT,
            "description": "Rules, such as pypi.org or *.example.com:443.",
        },
        "preset": {
            **TEXT,
            "enum": list(PRESETS),
            "description": "packages adds the package registries.",
        },
    },
)
TEMPLATE = _text(
    "The name of a template, whose packages and files the sandbox has; without it the usual ones."
)
COMMAND = _text("A bash command, such as `ls -la | head`.")
SESSION = {
    "properties": {
        "session_id": TEXT,
        "name": MAYBE_TEXT,
        "state": _text("open, asleep (files are kept, the next call resumes it), closed, lost."),
        "language": TEXT,
        "provider": TEXT,
        "isolation": TEXT,
        "created_at": TEXT,
        "expires_at": TEXT,
        "contexts": {"type": "array", "items": TEXT},
    },
    "required": ["session_id", "state", "expires_at"],
}
ENTRY = {
    "properties": {
        "path": TEXT,
        "type": {**TEXT, "enum": ["file", "directory", "symlink", "other"]},
        "size_bytes": WHOLE,
        "modified_at": MAYBE_TEXT,
    },
    "required": ["path", "type", "size_bytes"],
}

_ALL = (
    Tool(
        "run_code",
        "Run code",
        "Run one program in a new sandbox, which is deleted afterwards: no variables and no files "
        "are kept. Use session_run for steps that build on each other. There is no network access "
        "but to hosts that network names and the service allows. Files that the program writes to "
        "artifacts/ are returned as resources.",
        {
            "code": CODE,
            "language": _text("The language of the code; the default is python."),
            "arguments": _object(
                "If given, main(**arguments) of the code is called, and result is its return value."
            ),
            "timeout": TIMEOUT,
            "files": _object(
                "Text files for the program: the text of each file by its relative path.",
                additionalProperties=TEXT,
            ),
            "env": ENVIRONMENT,
            "network": NETWORK,
            "template": TEMPLATE,
        },
        EXECUTION,
        NEEDS["executions"]["POST"],
        run_code,
        requires=("code",),
    ),
    Tool(
        "session_open",
        "Open a session",
        "Open a persistent sandbox: it keeps variables, files and processes between calls, until "
        "it is closed or its time is over. Close it when you are done.",
        {
            "name": _text("Unique among open sessions."),
            "language": _text("The language of the cells; the default is python."),
            "idle_seconds": {
                "type": "integer",
                "description": "The idle time after which it sleeps; the default is 600.",
            },
            "max_seconds": {
                "type": "integer",
                "description": "The age at which it is closed; the default is 1800.",
            },
            "env": ENVIRONMENT,
            "network": NETWORK,
            "template": TEMPLATE,
        },
        SESSION,
        NEEDS["sessions"]["POST"],
        session_open,
    ),
    Tool(
        "session_list",
        "List sessions",
        "List the sessions, newest first, 20 at a time.",
        {
            "state": {**TEXT, "enum": ["open", "asleep", "closed", "lost"]},
            "cursor": _text("The value of next in the previous page."),
        },
        {
            "properties": {
                "sessions": {"type": "array", "items": {"type": "object", **SESSION}},
                "next": MAYBE_TEXT,
            },
            "required": ["sessions"],
        },
        NEEDS["sessions"]["GET"],
        session_list,
        only_reads=True,
    ),
    Tool(
        "session_run",
        "Run a cell",
        "Run code in a session, after the code that ran there before: variables, imports and "
        "files are kept. The value of the last expression is in outputs. After an error, a "
        "timeout or an interrupt the variables are kept if context_kept is true.",
        {
            "session_id": SESSION_ID,
            "code": CODE,
            "context": _text("The interpreter of the session; without it, the one named default."),
            "timeout": TIMEOUT,
        },
        EXECUTION,
        NEEDS["session-executions"]["POST"],
        session_run,
        requires=("session_id", "code"),
    ),
    Tool(
        "session_reset",
        "Reset a session",
        "Reset a session: variables and processes are deleted, files are kept.",
        {"session_id": SESSION_ID},
        SESSION,
        NEEDS["session-reset"]["POST"],
        session_reset,
        requires=("session_id",),
        destroys=True,
    ),
    Tool(
        "session_close",
        "Close a session",
        "End a session and everything that runs in it. It is no error to close a session twice.",
        {"session_id": SESSION_ID},
        {"properties": {"closed": {"type": "boolean"}}, "required": ["closed"]},
        NEEDS["session"]["DELETE"],
        session_close,
        requires=("session_id",),
        destroys=True,
    ),
    Tool(
        "command_run",
        "Run a command",
        "Run a shell command in a session and wait for its end. The command can use the session's "
        "files, but not the variables of its cells. For a server or another long program use "
        "command_start.",
        {
            "session_id": SESSION_ID,
            "command": COMMAND,
            "cwd": CWD,
            "env": ENVIRONMENT,
            "timeout": TIMEOUT,
        },
        EXECUTION,
        NEEDS["session-processes"]["POST"],
        command_run,
        requires=("session_id", "command"),
    ),
    Tool(
        "command_start",
        "Start a command",
        "Start a shell command in the background of a session, and return at once. It runs until "
        "it ends, gets a signal, or the session ends. Read its output with command_output.",
        {"session_id": SESSION_ID, "command": COMMAND, "cwd": CWD, "env": ENVIRONMENT},
        {
            "properties": {"pid": {"type": "integer"}, "execution_id": TEXT},
            "required": ["pid", "execution_id"],
        },
        NEEDS["session-processes"]["POST"],
        command_start,
        requires=("session_id", "command"),
    ),
    Tool(
        "command_output",
        "Read a command's output",
        "Read the output of a background command since `after`, and wait up to `wait` seconds for "
        "new output. For later output call it again with `after` set to `next`.",
        {
            "session_id": SESSION_ID,
            "pid": PID,
            "after": {
                **WHOLE,
                "description": "The value of next in the previous call; 0 for all output.",
            },
            "wait": {
                **WHOLE,
                "maximum": MOST_WAIT_SECONDS,
                "description": "In seconds; the default is 1.",
            },
        },
        {
            "properties": {
                "stdout": TEXT,
                "stderr": TEXT,
                "state": {**TEXT, "enum": ["running", "exited"]},
                "exit_code": {"type": ["integer", "null"]},
                "advice": {"type": "array", "items": TEXT},
                "next": WHOLE,
            },
            "required": ["stdout", "stderr", "state", "exit_code", "next"],
        },
        NEEDS["session-process-events"]["GET"],
        command_output,
        requires=("session_id", "pid"),
        only_reads=True,
    ),
    Tool(
        "command_signal",
        "Signal a command",
        "Send a signal to a command and all processes that it started. SIGTERM asks it to end, "
        "SIGKILL ends it.",
        {"session_id": SESSION_ID, "pid": PID, "signal": {**TEXT, "enum": list(SIGNALS)}},
        {
            "properties": {
                "signalled": {
                    "type": "boolean",
                    "description": "false if the command had already ended.",
                }
            },
            "required": ["signalled"],
        },
        NEEDS["session-process-signal"]["POST"],
        command_signal,
        requires=("session_id", "pid", "signal"),
        destroys=True,
    ),
    Tool(
        "file_list",
        "List files",
        "List a folder of a session, at most 200 entries at a time.",
        {
            "session_id": SESSION_ID,
            "path": _text("The folder; the default is the working folder."),
            "depth": {
                "type": "integer",
                "minimum": 1,
                "description": "The number of levels; the default is 1.",
            },
            "after": _text("The value of next in the previous page."),
        },
        {
            "properties": {
                "entries": {"type": "array", "items": {"type": "object", **ENTRY}},
                "next": MAYBE_TEXT,
            },
            "required": ["entries"],
        },
        NEEDS["session-files"]["GET"],
        file_list,
        requires=("session_id",),
        only_reads=True,
    ),
    Tool(
        "file_read",
        "Read a file",
        "Read up to 64 KiB of a file in a session, from `offset`: as text, or as content_base64 "
        "if it is not UTF-8. For the rest call it again with offset set to next_offset.",
        {
            "session_id": SESSION_ID,
            "path": PATH,
            "offset": {**WHOLE, "description": "In bytes from the start; the default is 0."},
        },
        {
            "properties": {
                "text": MAYBE_TEXT,
                "content_base64": MAYBE_TEXT,
                "size_bytes": WHOLE,
                "next_offset": {"type": ["integer", "null"]},
            },
            "required": ["text", "content_base64", "size_bytes", "next_offset"],
        },
        NEEDS["session-file-content"]["GET"],
        file_read,
        requires=("session_id", "path"),
        only_reads=True,
    ),
    Tool(
        "file_write",
        "Write a file",
        "Write a file in a session. An existing file is replaced, missing parent folders are "
        "created.",
        {
            "session_id": SESSION_ID,
            "path": PATH,
            "text": _text("The content as text."),
            "content_base64": _text("The content in base64, if it is not text."),
        },
        ENTRY,
        NEEDS["session-file-content"]["PUT"],
        file_write,
        requires=("session_id", "path"),
        destroys=True,
    ),
    Tool(
        "execution_output",
        "Read the rest of an output",
        f"Read up to {MOST_CHARACTERS} characters of an output of a run, from `offset`. Use it for "
        "the fields that are named in cut.",
        {
            "execution_id": TEXT,
            "stream": {
                **TEXT,
                "enum": list(STREAM_NAMES),
                "description": "The default is stdout.",
            },
            "offset": {**WHOLE, "description": "In characters from the start; the default is 0."},
        },
        {
            "properties": {
                "status": TEXT,
                "text": TEXT,
                "total": WHOLE,
                "next_offset": {"type": ["integer", "null"]},
            },
            "required": ["status", "text", "total", "next_offset"],
        },
        NEEDS["execution"]["GET"],
        execution_output,
        requires=("execution_id",),
        only_reads=True,
    ),
)
TOOLS: Mapping[str, Tool] = {tool.name: tool for tool in _ALL}
