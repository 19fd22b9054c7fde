"""`process.Process`: commands of a sandbox. Each is an execution from before it starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.http import HttpResponse
from django.http.response import HttpResponseBase
from rest_framework.request import Request

from executions.api.base import answered_later
from executions.api.e2b.base import SandboxView, require_basic_user
from executions.api.e2b.envelopes import STREAM_TYPE, end, message, messages_in
from executions.api.e2b.errors import Refused, invalid, unimplemented
from executions.api.e2b.paths import shown, to_folder
from executions.api.e2b.process_stream import ProcessEvents, followed, told_of
from executions.kernel.coroutines import Waits
from executions.kernel.text import storable
from executions.runs.event_log import EventLog
from executions.runs.event_stream import Listener
from executions.runs.routing import COMMANDS, require_language
from executions.sessions import commands, output_collector
from executions.sessions.models import Session
from executions.sessions.requests import CommandRequest, TerminalSize
from executions.tenants.tenant_scope import executions_of
from providers.errors import InvalidConfiguration
from providers.sandbox import Process
from providers.slices import decoded

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

    @answered_later
    def _unary(self, request: Request, method: str) -> Waits[HttpResponse]:
        if method == "StreamInput":
            return (yield from self._stream_input())
        calls = {
            "List": self._list,
            "SendInput": self._send_input,
            "CloseStdin": self._close,
            "SendSignal": self._signal,
            "Update": self._update,
        }
        try:
            return (yield from self.called("process.Process", method, calls))
        except InvalidConfiguration as error:
            if error.field != "pid":
                raise
            # It is in the records, and went with a sandbox that the session had before it slept.
            raise Refused(404, "not_found", error.message) from None

    def _start(self, request: Request) -> HttpResponseBase:
        session = self.session()
        wanted = command_of(self.first_message())
        require_basic_user(request)
        events = ProcessEvents(0, is_terminal=wanted.pty is not None)
        listener = Listener.of_key(self.api_key)

        def work() -> Waits[None]:
            logs: list[EventLog] = []
            with listener.counted():
                execution = yield from commands.starting(
                    session, wanted, self.caller(), seconds=self.seconds, following=logs.append
                )
                events.told_of(execution.pid or 0)
                events.end((yield from told_of(execution, events, logs[0])))

        return self.streamed(events, work)

    def _connect(self, request: Request) -> HttpResponseBase:
        session = self.session()
        pid = _pid_of(self.first_message())
        execution_id = commands.execution_of(session, pid)
        if execution_id is None:
            raise _no_process(pid)
        execution = executions_of(self.api_key.tenant).get(pk=execution_id)
        log = output_collector.log_of(execution_id)
        after = 0
        if log is not None and (seen := log.read(0, 2**62)[0]):
            # Whoever comes later is told what comes from now on.
            after = seen[-1].seq
        is_terminal = execution.code == " ".join(_TERMINAL)
        events = ProcessEvents(pid, is_terminal=is_terminal, after=after)
        listener = Listener.of_key(self.api_key)

        def work() -> Waits[None]:
            events.end((yield from followed(execution, events, log, listener, self.seconds)))

        return self.streamed(events, work)

    def _list(self, session: Session, body: Mapping[str, Any]) -> Waits[dict[str, Any]]:
        found = yield from commands.seen(session)
        running = [each for each in found if each.exit_code is None]
        return {"processes": [_info(each) for each in running]}

    def _send_input(self, session: Session, body: Mapping[str, Any]) -> Waits[dict[str, Any]]:
        yield from self._write(session, _pid_of(body), _input_of(body))
        return {}

    def _close(self, session: Session, body: Mapping[str, Any]) -> Waits[dict[str, Any]]:
        yield from self._write(session, _pid_of(body), b"", close=True)
        return {}

    def _write(
        self, session: Session, pid: int, data: bytes, *, close: bool = False
    ) -> Waits[None]:
        _require_process(session, pid)
        # Whoever types into a shell runs commands.
        require_language(self.api_key, *COMMANDS)
        pieces = [data[at : at + _PIECE] for at in range(0, len(data), _PIECE)] or [b""]
        for piece in pieces[:-1]:
            yield from commands.writing(session, pid, piece, close=False)
        yield from commands.writing(session, pid, pieces[-1], close=close)

    def _stream_input(self) -> Waits[HttpResponse]:
        """All of it, once all of it has come."""
        messages = messages_in(self.content())
        pid = _pid_of(_object(next(messages, {}), "start"))
        session = self.session()
        _require_process(session, pid)
        data = b"".join(_input_of(_object(each, "data")) for each in messages if "data" in each)
        if data:
            yield from self._write(session, pid, data)
        return HttpResponse(message({}) + end(), content_type=STREAM_TYPE)

    def _signal(self, session: Session, body: Mapping[str, Any]) -> Waits[dict[str, Any]]:
        pid = _pid_of(body)
        _require_process(session, pid)
        wanted = body.get("signal")
        name = _SIGNALS.get(wanted) if isinstance(wanted, str | int) else None
        if name is None:
            raise invalid("signal: Must be SIGNAL_SIGKILL or SIGNAL_SIGTERM.")
        if not (yield from commands.signalling(session, pid, name)):
            raise _no_process(pid)
        return {}

    def _update(self, session: Session, body: Mapping[str, Any]) -> Waits[dict[str, Any]]:
        pid = _pid_of(body)
        _require_process(session, pid)
        size = _size(_object(body, "pty"))
        yield from commands.resizing(session, pid, size.pair)
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
    if not commands.is_there(session, pid):
        raise _no_process(pid)


def _no_process(pid: int) -> Refused:
    return Refused(404, "not_found", f"process with pid {pid} not found")


def _info(process: Process) -> dict[str, Any]:
    argv = [storable(each) for each in process.argv]
    if argv[:2] == ["bash", "-c"]:
        argv = ["/bin/bash", *_LOGIN_SHELL, *argv[2:]]
    config = {"cmd": argv[0] if argv else "", "args": argv[1:], "cwd": shown(process.cwd)}
    return {"pid": process.pid, "config": {**config, "envs": {}}}
