"""The tools that run something, and those that read what it put out."""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import mcp_types as types
from django.http import Http404

from executions.api.errors import known_to_run
from executions.api.mcp.door import Door, Run, tenant_of
from executions.api.mcp.results import MOST_CHARACTERS, Call, answered, run_answer
from executions.capabilities.policies.enforcement import languages_of
from executions.kernel.coroutines import Waits
from executions.kernel.declarations import refuse
from executions.kernel.text import to_json
from executions.runs.event_log import Entry, EventLog, Moment, Source
from executions.runs.event_stream import Listener, first_of, following
from executions.runs.models import Execution
from executions.runs.record import Outcome
from executions.runs.requests import CELL, RUN, ExecutionRequest
from executions.runs.routing import allowed_languages, languages_for
from executions.runs.service import running
from executions.sessions import commands
from executions.sessions.background_commands import record_if_ended
from executions.sessions.models import Session
from executions.sessions.queries import living_session_of
from executions.sessions.requests import SIGNAL, START
from executions.tenants.tenant_scope import executions_of
from providers.waiting import within

# How often progress is told at most, how much of the output a notification has, and how much of it
# is read at once.
TELL_SECONDS = 0.1
MOST_TOLD_CHARACTERS = 2_000
_READ_BYTES = 32 * 1024
MOST_WAIT_SECONDS = 30

Begin = Callable[[EventLog], Waits[Outcome]]


def languages(door: Door) -> Waits[list[str]]:
    """What the client's code can be in now, as `GET /api/v1/languages` tells it. Raises
    SandboxError where no provider can be asked."""
    slug, key = tenant_of(door).slug, door.caller.api_key
    if key is None:
        found, _ = yield from languages_for(slug)
        return languages_of(slug, found)
    found, _ = yield from languages_for(slug, partial(key.allows, "providers"))
    return languages_of(slug, allowed_languages(key, found))


async def run_code(call: Call) -> types.CallToolResult:
    given = call.given
    files = given.pop("files", None)
    if files is not None:
        given["files"] = _as_sent(files)
    return await _told(
        call, lambda log: running(RUN.read(given), call.door.caller, log=log, waits=True)
    )


async def session_run(call: Call) -> types.CallToolResult:
    session_id = call.id("session_id")
    given = call.given

    def begin(log: EventLog) -> Waits[Outcome]:
        wanted: ExecutionRequest = CELL.read(given, session=session_id)
        return (yield from running(wanted, call.door.caller, log=log, waits=True))

    return await _told(call, begin)


async def command_run(call: Call) -> types.CallToolResult:
    session_id, body = call.id("session_id"), _command(call)

    def begin(log: EventLog) -> Waits[Outcome]:
        session = living_session_of(tenant_of(call.door), session_id)
        wanted = START.read(body)
        return (yield from commands.commanding(session, wanted, call.door.caller, log))

    return await _told(call, begin)


async def command_start(call: Call) -> types.CallToolResult:
    session_id, body = call.id("session_id"), _command(call)

    def work() -> Waits[Execution]:
        session = living_session_of(tenant_of(call.door), session_id)
        wanted = START.read({**body, "background": True})
        return (yield from commands.starting(session, wanted, call.door.caller))

    started = await call.door.do(work)
    return answered({"pid": started.pid, "execution_id": str(started.pk)})


async def command_signal(call: Call) -> types.CallToolResult:
    session_id, pid = call.id("session_id"), _pid(call)
    body = call.given

    def work() -> Waits[bool]:
        session = living_session_of(tenant_of(call.door), session_id)
        if not commands.is_there(session, pid):
            raise Http404
        return (yield from commands.signalling(session, pid, SIGNAL.read(body).signal))

    return answered({"signalled": await call.door.do(work)})


async def command_output(call: Call) -> types.CallToolResult:
    """What a command in the background has put out since `after`, waiting a little for more."""
    session_id, pid = call.id("session_id"), _pid(call)
    after = call.whole("after", 0, 0, 10**15)
    seconds = call.whole("wait", 1, 0, MOST_WAIT_SECONDS)

    def work() -> Waits[dict[str, Any]]:
        session = living_session_of(tenant_of(call.door), session_id)
        execution_id = commands.execution_of(session, pid)
        if execution_id is None:
            raise Http404
        reader = _Reader(seconds)
        yield from following(execution_id, reader, after, _listener(call))
        entries = reader.read(after)
        execution = executions_of(tenant_of(call.door)).get(pk=execution_id)
        yield from _recorded(session, execution, seconds)
        return _output_of(execution, entries, after)

    return answered(await call.door.do(work))


async def execution_output(call: Call) -> types.CallToolResult:
    execution_id = call.id("execution_id")
    name = call.take("stream", "stdout")
    if name not in STREAM_NAMES:
        refuse("stream", f"Must be one of: {', '.join(STREAM_NAMES)}.")
    offset = call.whole("offset", 0, 0, 10**9)

    def work() -> Waits[dict[str, Any]]:
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
        yield

    return answered(await call.door.do(work))


STREAM_NAMES = ("stdout", "stderr", "result", "outputs")


class _Reader:
    """Follows for so many seconds, and then has what came."""

    def __init__(self, seconds: float) -> None:
        self.is_waited_for = True
        self.left = Moment()
        self._source: Source | None = None
        within(seconds, Future[None]()).add_done_callback(lambda _: self._leave())

    def begin(self, source: Source) -> None:
        self._source = source

    def read(self, after: int) -> Sequence[Entry]:
        return self._source.read(after, _READ_BYTES)[0] if self._source is not None else ()

    def _leave(self) -> None:
        if not self.left.done():
            self.left.set_result(None)


def _listener(call: Call) -> Listener:
    key = call.door.caller.api_key
    return (
        Listener("command:mcp", tenant_of(call.door).slug) if key is None else Listener.of_key(key)
    )


def _recorded(session: Session, execution: Execution, seconds: float) -> Waits[None]:
    """Its end, where it has one: who follows it writes that down a moment after its output."""
    if execution.finished_at is None:
        yield first_of(seconds=min(seconds, 0.2))
        yield from record_if_ended(session, execution)
        execution.refresh_from_db()


def _output_of(execution: Execution, entries: Sequence[Entry], after: int) -> dict[str, Any]:
    texts = {"stdout": "", "stderr": ""}
    for entry in entries:
        if entry.type in texts:
            texts[entry.type] += entry.body().get("text", "")
    return {
        **texts,
        "state": "running" if execution.finished_at is None else "exited",
        "exit_code": execution.exit_code,
        "next": entries[-1].seq if entries else after,
    }


def _command(call: Call) -> dict[str, Any]:
    """A command of bash, in the words of the native API."""
    return {"shell": call.text("command"), **call.given}


def _pid(call: Call) -> int:
    return call.whole("pid", 0, 1, 2**31 - 1)


def _as_sent(files: Any) -> list[dict[str, str]]:
    if not isinstance(files, dict) or not all(isinstance(each, str) for each in files.values()):
        refuse("files", "Must be an object with the text of each file by its path.")
    return [
        {"path": path, "content_base64": b64encode(text.encode("utf-8", "replace")).decode()}
        for path, text in files.items()
    ]


async def _told(call: Call, begin: Begin) -> types.CallToolResult:
    """Run it, tell what it puts out, and end it when the call is cancelled."""
    run = Run()

    def work() -> Waits[types.CallToolResult]:
        outcome = yield from begin(run.log)
        with known_to_run(outcome):
            return run_answer(outcome.execution)

    call.door.note(run)
    done = asyncio.ensure_future(call.door.do(work))
    try:
        await _progress(call, run.log, done)
        return await done
    except asyncio.CancelledError:
        run.end()
        raise


async def _progress(call: Call, log: EventLog, done: asyncio.Future[Any]) -> None:
    """Tell what has come, now and then, and the rest when it is done, which nothing delays."""
    after = told = 0
    while True:
        changed = asyncio.wrap_future(log.changed(after))
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


def _text_of(entries: Sequence[Entry]) -> str:
    parts = []
    for entry in entries:
        if entry.type == "output":
            shown = (entry.said or {}).get("data") or {}
            parts.append(str(shown.get("text/plain", "")) or to_json(list(shown)))
        else:
            parts.append(entry.data.decode("utf-8", "replace"))
    return "".join(parts)
