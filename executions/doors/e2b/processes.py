"""The processes of the E2B API, and their streams."""

from __future__ import annotations

import time
from base64 import b64decode, b64encode
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any
from uuid import UUID

from django.http import HttpResponse
from django.http.response import HttpResponseBase
from rest_framework.request import Request

from executions.doors.e2b.connect import (
    STREAM_TYPE,
    Refused,
    display_path,
    end,
    invalid,
    message,
    messages_in,
    to_folder,
    unimplemented,
)
from executions.doors.e2b.frame import SandboxView, ensure_basic_user
from executions.doors.native.deferred import EventStream
from executions.doors.native.frame import deferred
from executions.kernel.coroutines import wait_for
from executions.kernel.text import storable
from executions.runs import event_log, event_stream
from executions.runs.advice import advice_text
from executions.runs.event_log import STREAMS, EventLog, RunEvent
from executions.runs.event_stream import EventBuffer, Listener, first_of, follow, recorded_events
from executions.runs.models import Execution
from executions.runs.results import executions_of
from executions.runs.routing import COMMANDS, ensure_language
from executions.sessions import cells
from executions.sessions.background_commands import record_if_ended
from executions.sessions.models import Session
from executions.sessions.queries import has_ended
from executions.sessions.requests import CommandRequest, TerminalSize
from providers import draining
from providers.errors import InvalidConfiguration
from providers.sandbox import Process
from providers.slices import decoded
from providers.waiting import within

_LOOK_SECONDS = 2.0
_ASK_SECONDS = 0.5
# What E2B's clients say themselves where it is their connection that breaks.
_GONE = "The sandbox was killed or reached its end of life while the request was in flight."
_LEFT_OUT = "\n[output truncated: there was more than is kept]\n"
# Who asks a sandbox whether a command has ended that nobody follows.
_askers: dict[UUID, object] = {}
_SIGNAL_NAMES = {129: "hangup", 130: "interrupt", 131: "quit", 137: "killed", 143: "terminated"}


class KeptAlive(EventStream):
    """Events in envelopes, with one that says nothing where nothing has come for a while."""

    keepalive: bytes
    content_type = STREAM_TYPE
    keepalive_seconds = 30.0

    def __init__(self, opening: bytes, **options: Any) -> None:
        super().__init__(self.content_type, **options)
        self._opening = opening
        self._said_at = time.monotonic()

    def take(self) -> tuple[bytes, bool]:
        body, more = super().take()
        if self.has_begun and self._opening:
            body, self._opening = self._opening + body, b""
        if body:
            self._said_at = time.monotonic()
        elif more and self.has_begun and time.monotonic() - self._said_at >= self.keepalive_seconds:
            self._said_at = time.monotonic()
            return self.keepalive, more
        return body, more

    def next_change(self) -> Future[None]:
        changed: Future[None] = Future()
        # Whichever comes first: something happened, or it is time to say that nothing has.
        within(self.keepalive_seconds, super().next_change()).add_done_callback(
            lambda _: changed.set_result(None)
        )
        return changed

    def render_end(self, said: Mapping[str, Any]) -> bytes:
        return end(said.get("error"))


class ProcessEvents(KeptAlive):
    keepalive = message({"event": {"keepalive": {}}})

    def __init__(self, pid: int, *, is_terminal: bool, after: int = 0) -> None:
        self.is_terminal = is_terminal
        super().__init__(b"", after=after)
        self.set_pid(pid)

    def set_pid(self, pid: int) -> None:
        self._opening = message({"event": {"start": {"pid": pid}}}) if pid else b""

    def line(self, entry: RunEvent) -> bytes:
        if entry.type not in STREAMS:
            return b""
        data = entry.data
        if not data and entry.said:
            # One that was kept as JSON.
            data = _bytes_of(entry.said)
        return self._data(entry.type, data)

    def render_end(self, said: Mapping[str, Any]) -> bytes:
        left_out = self._data("stderr", _LEFT_OUT.encode()) if said.get("left_out") else b""
        advice = self._data("stderr", said["advice"].encode()) if self._takes(said) else b""
        last = message({"event": {"end": said["end"]}}) if "end" in said else b""
        return left_out + advice + last + super().render_end(said)

    def _takes(self, said: Mapping[str, Any]) -> bool:
        # Who sits at a terminal reads what it shows.
        return bool(said.get("advice")) and not self.is_terminal

    def _data(self, stream: str, data: bytes) -> bytes:
        name = "pty" if self.is_terminal else stream
        return message({"event": {"data": {name: b64encode(data).decode()}}})


def _bytes_of(said: Mapping[str, Any]) -> bytes:
    if isinstance(kept := said.get("data_base64"), str):
        return b64decode(kept)
    return str(said.get("text", "")).encode(errors="replace")


async def follow_command(
    execution: Execution,
    events: ProcessEvents,
    log: EventLog | None,
    listener: Listener,
    seconds: float | None = None,
) -> dict[str, Any]:
    """Send the output of a command until it has ended, and return how it ended, as the stream is to
    say it.

    Whoever leaves, or has no more time, ends nothing. Raises RateLimited where too many follow.
    """
    if log is not None:
        with listener.hold_place(execution.pk):
            return await follow_log(execution, events, log, seconds)
    await follow(execution.pk, events, 0, listener)
    execution.refresh_from_db()
    return _end_of(execution)


async def follow_log(
    execution: Execution, events: ProcessEvents, log: EventLog, seconds: float | None = None
) -> dict[str, Any]:
    """Follow a command whose log is here as `follow_command` does, for one who has a place
    already."""
    until = None if seconds is None else time.monotonic() + seconds
    events.begin(log)
    while not (log.closed.done() or events.left.done() or draining.is_draining()):
        if until is not None and time.monotonic() >= until:
            return _late()
        await wait_for(first_of(log.closed, events.left, seconds=_LOOK_SECONDS))
    execution.refresh_from_db()
    if _is_reported(execution, log):
        return _end_of(execution)
    # There was no thread left to follow it: it is told of when it has ended.
    await _wait_until_recorded(execution, events, until)
    if execution.finished_at is None:
        is_late = until is not None and time.monotonic() >= until
        return _late() if is_late else _end_of(execution)
    if log.text_of("stdout") or log.text_of("stderr"):
        # Somebody did follow it for a while: it is not told twice.
        return _end_of(execution)
    relay = EventBuffer()
    relay.push([entry for entry in recorded_events(execution.pk) if entry.type in STREAMS])
    relay.end()
    events.begin(relay)
    return _end_of(execution)


def _is_reported(execution: Execution, log: EventLog) -> bool:
    """Whether it has ended, and what it put out was heard."""
    if execution.finished_at is None:
        return False
    is_heard = log.text_of("stdout") or log.text_of("stderr")
    return bool(is_heard) or not (execution.stdout or execution.stderr)


async def _wait_until_recorded(
    execution: Execution, events: ProcessEvents, until: float | None
) -> None:
    if execution.finished_at is not None:
        return
    record, me = event_stream.Waiter(execution.pk), object()
    with event_stream.poll.join(record):
        try:
            while not (record.ended.done() or events.left.done()):
                if until is not None and time.monotonic() >= until:
                    break
                await wait_for(first_of(record.ended, events.left, seconds=_ASK_SECONDS))
                # One of those who wait asks the sandbox; the poll tells the others.
                is_mine = _askers.setdefault(execution.pk, me) is me
                if is_mine and execution.session is not None and not record.ended.done():
                    await record_if_ended(execution.session, execution)
                    execution.refresh_from_db()
                    if execution.finished_at is not None:
                        return
        finally:
            if _askers.get(execution.pk) is me:
                del _askers[execution.pk]
    if record.ended.done():
        record.ended.result()
    execution.refresh_from_db()


def _late() -> dict[str, Any]:
    return {"error": {"code": "deadline_exceeded", "message": "The call reached its timeout."}}


def _end_of(execution: Execution) -> dict[str, Any]:
    status, left_out = execution.status, execution.stdout_truncated or execution.stderr_truncated
    if execution.finished_at is None:
        return {
            "error": {"code": "unavailable", "message": "The service is stopping. Connect again."}
        }
    if status == Execution.Status.TIMED_OUT:
        return {"left_out": left_out, **_late()}
    if execution.exit_code is None and status == Execution.Status.OUT_OF_MEMORY:
        return {"left_out": left_out, "end": _exit(137, execution.error_message)}
    if execution.exit_code is None:
        if has_ended(execution.session_id):
            return {"error": {"code": "unavailable", "message": _GONE}}
        said = execution.error_message or "The command was ended."
        return {"error": {"code": "unavailable", "message": said}}
    advice = advice_text(execution)
    return {"left_out": left_out, "advice": advice, "end": _exit(execution.exit_code)}


def _exit(code: int, why: str = "") -> dict[str, Any]:
    signal = _SIGNAL_NAMES.get(code)
    status = f"signal: {signal}" if signal else f"exit status {code}"
    said: dict[str, Any] = {"exitCode": code, "exited": signal is None, "status": status}
    return {**said, "error": why or status} if code else said


_LOGIN_SHELL = ("-l", "-c")
_SIGNALS = {"SIGNAL_SIGKILL": "SIGKILL", "SIGNAL_SIGTERM": "SIGTERM", 9: "SIGKILL", 15: "SIGTERM"}
# What E2B's clients start in a terminal. A record does not say whether it has one.
_TERMINAL = ("/bin/bash", "-i", "-l")
_PIECE = 32 * 1024


class ProcessView(SandboxView):
    """The calls that are answered at once, and those that are answered by a stream."""

    def post(self, request: Request, method: str) -> HttpResponseBase:
        if method == "Start":
            return self._start(request)
        if method == "Connect":
            return self._connect(request)
        return self._unary(request, method)

    @deferred
    async def _unary(self, request: Request, method: str) -> HttpResponse:
        if method == "StreamInput":
            return await self._stream_input()
        calls = {
            "List": self._list,
            "SendInput": self._send_input,
            "CloseStdin": self._close,
            "SendSignal": self._signal,
            "Update": self._update,
        }
        try:
            return await self.answer_call("process.Process", method, calls)
        except InvalidConfiguration as error:
            if error.field != "pid":
                raise
            # It is in the records, and went with a sandbox that the session had before it slept.
            raise Refused(404, "not_found", error.message) from None

    def _start(self, request: Request) -> HttpResponseBase:
        session = self.session()
        wanted = command_of(self.first_message())
        ensure_basic_user(request)
        events = ProcessEvents(0, is_terminal=wanted.pty is not None)
        listener = Listener.of_key(self.api_key)

        async def work() -> None:
            logs: list[EventLog] = []
            with listener.hold_place():
                execution = await cells.start_command(
                    session, wanted, self.caller(), seconds=self.seconds, on_start=logs.append
                )
                events.set_pid(execution.pid or 0)
                events.end(await follow_log(execution, events, logs[0]))

        return self.stream_answer(events, work)

    def _connect(self, request: Request) -> HttpResponseBase:
        session = self.session()
        pid = _pid_of(self.first_message())
        execution_id = cells.execution_of(session, pid)
        if execution_id is None:
            raise _no_process(pid)
        execution = executions_of(self.api_key.tenant).get(pk=execution_id)
        log = event_log.log_of(execution_id)
        after = 0
        if log is not None and (seen := log.read(0, 2**62)[0]):
            # Whoever comes later is told what comes from now on.
            after = seen[-1].seq
        is_terminal = execution.code == " ".join(_TERMINAL)
        events = ProcessEvents(pid, is_terminal=is_terminal, after=after)
        listener = Listener.of_key(self.api_key)

        async def work() -> None:
            events.end(await follow_command(execution, events, log, listener, self.seconds))

        return self.stream_answer(events, work)

    async def _list(self, session: Session, body: Mapping[str, Any]) -> dict[str, Any]:
        found = await cells.list_processes(session)
        running = [each for each in found if each.exit_code is None]
        return {"processes": [_info(each) for each in running]}

    async def _send_input(self, session: Session, body: Mapping[str, Any]) -> dict[str, Any]:
        await self._write(session, _pid_of(body), _input_of(body))
        return {}

    async def _close(self, session: Session, body: Mapping[str, Any]) -> dict[str, Any]:
        await self._write(session, _pid_of(body), b"", close=True)
        return {}

    async def _write(self, session: Session, pid: int, data: bytes, *, close: bool = False) -> None:
        _require_process(session, pid)
        # Whoever types into a shell runs commands.
        ensure_language(self.api_key, *COMMANDS)
        pieces = [data[at : at + _PIECE] for at in range(0, len(data), _PIECE)] or [b""]
        for piece in pieces[:-1]:
            await cells.write_input(session, pid, piece, close=False)
        await cells.write_input(session, pid, pieces[-1], close=close)

    async def _stream_input(self) -> HttpResponse:
        """All of it, once all of it has come."""
        messages = messages_in(self.content())
        pid = _pid_of(_object(next(messages, {}), "start"))
        session = self.session()
        _require_process(session, pid)
        data = b"".join(_input_of(_object(each, "data")) for each in messages if "data" in each)
        if data:
            await self._write(session, pid, data)
        return HttpResponse(message({}) + end(), content_type=STREAM_TYPE)

    async def _signal(self, session: Session, body: Mapping[str, Any]) -> dict[str, Any]:
        pid = _pid_of(body)
        _require_process(session, pid)
        wanted = body.get("signal")
        name = _SIGNALS.get(wanted) if isinstance(wanted, str | int) else None
        if name is None:
            raise invalid("signal: Must be SIGNAL_SIGKILL or SIGNAL_SIGTERM.")
        if not (await cells.send_signal(session, pid, name)):
            raise _no_process(pid)
        return {}

    async def _update(self, session: Session, body: Mapping[str, Any]) -> dict[str, Any]:
        pid = _pid_of(body)
        _require_process(session, pid)
        size = _size(_object(body, "pty"))
        await cells.resize_terminal(session, pid, size.pair)
        return {}


def command_of(body: Mapping[str, Any]) -> CommandRequest:
    """What is to be started. Raises Refused and InvalidConfiguration."""
    config = _object(body, "process")
    program, arguments = config.get("cmd"), config.get("args") or []
    if not isinstance(program, str) or not isinstance(arguments, list):
        raise invalid("process: Must have cmd, a string, and args, a list.")
    # As the shell's own text a command is looked at and recorded as such.
    is_shell = program in ("/bin/bash", "bash") and tuple(arguments[:2]) == _LOGIN_SHELL
    is_script = is_shell and len(arguments) == 3 and bool(arguments[2])
    script = arguments[2] if is_script else ""
    return CommandRequest(
        command=[] if is_script else [program, *arguments],
        shell=script,
        cwd=to_folder(config.get("cwd") or ""),
        env=config.get("envs") or {},
        # Clients that are older than the field mean that there is one.
        stdin=body.get("stdin", True) is not False and "pty" not in body,
        pty=_size(_object(body, "pty")) if body.get("pty") else None,
        background=True,
    )


def _size(body: Mapping[str, Any]) -> TerminalSize:
    size = _object(body, "size")
    try:
        return TerminalSize(cols=size.get("cols", 0), rows=size.get("rows", 0))
    except ValueError:
        raise invalid("size: Must be cols and rows from 1 to 1000.") from None


def _object(body: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    if not isinstance(found := body.get(name), dict):
        raise invalid(f"{name}: Must be an object.")
    return found


def _pid_of(body: Mapping[str, Any]) -> int:
    selector = _object(body, "process")
    pid = selector.get("pid")
    if type(pid) is int and pid > 0:
        return pid
    if "tag" in selector:
        raise unimplemented("Selecting a process by its tag")
    raise invalid("process: Must be selected by its pid.")


def _input_of(body: Mapping[str, Any]) -> bytes:
    given = _object(body, "input")
    text = given.get("stdin", given.get("pty"))
    try:
        return decoded(text if isinstance(text, str) else "?")
    except ValueError as error:
        raise invalid(f"input: {error}") from None


def _require_process(session: Session, pid: int) -> None:
    if not cells.is_there(session, pid):
        raise _no_process(pid)


def _no_process(pid: int) -> Refused:
    return Refused(404, "not_found", f"process with pid {pid} not found")


def _info(process: Process) -> dict[str, Any]:
    argv = [storable(each) for each in process.argv]
    if argv[:2] == ["bash", "-c"]:
        argv = ["/bin/bash", *_LOGIN_SHELL, *argv[2:]]
    config = {"cmd": argv[0] if argv else "", "args": argv[1:], "cwd": display_path(process.cwd)}
    return {"pid": process.pid, "config": {**config, "envs": {}}}
