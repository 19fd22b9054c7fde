"""The calls of the MCP server's tools: runs and sessions."""

from __future__ import annotations

import asyncio
import base64
import io
import time
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import mcp_types as types
from django.http import Http404

from executions.doors.mcp.results import (
    MOST_CHARACTERS,
    Call,
    Door,
    by,
    run_answer,
    tenant_of,
    tool_result,
)
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
from executions.sessions.requests import OPEN, SIGNAL, START, FileListing, FileRequest
from executions.sessions.session_sandbox import OPERATION_SECONDS
from executions.tenants.quotas import ENTRY_COUNTS_AS, take_request
from providers.errors import ProviderUnavailable
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
