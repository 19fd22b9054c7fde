"""The commands of a kept E2B sandbox, by the SDK's generated client of its process service.

The SDK's own wrapper starts every command through a shell and decodes what it puts out.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from connectrpc.code import Code
from connectrpc.errors import ConnectError
from e2b.connection_config import KEEPALIVE_PING_HEADER, KEEPALIVE_PING_INTERVAL_SEC
from e2b.envd.process import process_pb as pb
from e2b.envd.utils import authentication_header, extract_start_pid
from protobuf import Oneof

from providers.e2b.machine import HOME
from providers.errors import ConnectionFailed, InvalidConfiguration, SandboxError
from providers.remote.output import KeptOutput
from providers.remote.sandbox import workspace_path
from providers.sandbox import Process, Processes
from providers.threads import start_thread
from providers.values import Command, Emit

if TYPE_CHECKING:
    from providers.e2b.machine import E2BMachine
    from providers.remote.service import AccountClient

# Those that run, and those that ended lately.
MOST_PROCESSES = 64
_SIGNALS = {"SIGTERM": pb.Signal.SIGTERM, "SIGKILL": pb.Signal.SIGKILL}
# What the service's answer calls an end by a signal.
_ENDS = {
    "signal: hangup": 129,
    "signal: interrupt": 130,
    "signal: quit": 131,
    "signal: aborted": 134,
    "signal: killed": 137,
    "signal: segmentation fault": 139,
    "signal: terminated": 143,
}


@dataclass
class _Known:
    """A process, and what it has put out since this object listens to it."""

    process: Process
    output: KeptOutput = field(default_factory=KeptOutput)
    pty: bool = False
    deadline: float | None = None
    failure: SandboxError | None = None


class E2BProcesses(Processes):
    """Output is kept from the start of what this object has started, and for what others have
    started from when it is first followed here. How one ended that nobody followed E2B does not
    tell.
    """

    def __init__(self, machine: E2BMachine, service: AccountClient) -> None:
        self._rpc = machine.sandbox.commands._rpc
        self._version = machine.sandbox.commands._envd_version
        self._service = service
        self._known: dict[int, _Known] = {}
        self._lock = threading.Lock()

    def start(self, command: Command) -> Process:
        self._make_room()
        if command.shell:
            words = ["/bin/bash", "-c", command.shell]
        elif command.argv:
            words = list(command.argv)
        else:
            raise InvalidConfiguration("command: Needs argv or shell.", field="command")
        size = None
        if command.pty is not None:
            columns, rows = command.pty
            size = pb.PTY(size=pb.PTY.Size(cols=columns, rows=rows))
        asked = pb.StartRequest(
            process=pb.ProcessConfig(
                cmd=words[0],
                args=words[1:],
                envs=dict(command.environment),
                cwd=f"{HOME}/{workspace_path(command.cwd)}".rstrip("/"),
            ),
            pty=size,
            stdin=command.stdin,
        )
        timeout = None if command.timeout is None else int(command.timeout * 1000)

        def start() -> tuple[Any, int]:
            headers = authentication_header(self._version, command.user or None)
            headers |= {KEEPALIVE_PING_HEADER: str(KEEPALIVE_PING_INTERVAL_SEC)}
            events = iter(self._rpc.start(asked, headers=headers, timeout_ms=timeout))
            return events, extract_start_pid(next(events), "start process")

        began = time.monotonic()
        events, pid = self._service.ask(start)
        known = _Known(Process(pid, words, command.cwd), pty=command.pty is not None)
        if command.timeout is not None:
            known.deadline = began + command.timeout
        return self._listen(known, events)

    def list(self) -> Sequence[Process]:
        listed = self._service.ask(lambda: self._rpc.list(pb.ListRequest()))
        with self._lock:
            found = {pid: known.process for pid, known in self._known.items()}
        for one in listed.processes:
            config = one.config or pb.ProcessConfig()
            words, cwd = [config.cmd, *config.args], config.cwd.removeprefix(HOME).strip("/")
            found.setdefault(one.pid, Process(one.pid, words, cwd))
        return [found[pid] for pid in sorted(found)]

    def follow(self, pid: int, emit: Emit, after: int = 0) -> Process:
        known = self._known.get(pid) or self._connect(pid)
        known.output.hand_over(emit, after)
        if known.failure is not None:
            raise known.failure
        return known.process

    def write(self, pid: int, data: bytes, *, close: bool = False) -> None:
        known = self._known.get(pid)
        stream = "pty" if known is not None and known.pty else "stdin"
        if data:
            given = pb.ProcessInput(input=Oneof(stream, data))  # type: ignore[arg-type]
            self._ask(pid, lambda: self._rpc.send_input(_of(pid, pb.SendInputRequest, input=given)))
        if not close:
            return
        try:
            self._ask(pid, lambda: self._rpc.close_stdin(_of(pid, pb.CloseStdinRequest)))
        except _NotThere:
            # What was written may have been all that it waited for.
            if not data:
                raise

    def signal(self, pid: int, name: str) -> bool:
        if name not in _SIGNALS:
            raise InvalidConfiguration(
                f"signal: E2B sends {' and '.join(_SIGNALS)} only.", field="signal"
            )
        known = self._known.get(pid)
        if known is not None and known.process.exit_code is not None:
            return False
        request = _of(pid, pb.SendSignalRequest, signal=_SIGNALS[name])
        try:
            self._ask(pid, lambda: self._rpc.send_signal(request))
        except _NotThere:
            return False
        return True

    def resize(self, pid: int, columns: int, rows: int) -> None:
        size = pb.PTY(size=pb.PTY.Size(cols=columns, rows=rows))
        self._ask(pid, lambda: self._rpc.update(_of(pid, pb.UpdateRequest, pty=size)))

    def _connect(self, pid: int) -> _Known:
        def connect() -> Any:
            headers = {KEEPALIVE_PING_HEADER: str(KEEPALIVE_PING_INTERVAL_SEC)}
            asked = _of(pid, pb.ConnectRequest)
            events = iter(self._rpc.connect(asked, headers=headers, timeout_ms=None))
            extract_start_pid(next(events), "connect to process")
            return events

        self._make_room()
        running = {one.pid: one for one in self.list()}
        if pid not in running:
            raise _NotThere(pid)
        known = _Known(running[pid])
        self._listen(known, self._ask(pid, connect))
        return known

    def _listen(self, known: _Known, events: Any) -> Process:
        with self._lock:
            start_thread("e2b-command", partial(self._read, known, events))
            self._known[known.process.pid] = known
        return known.process

    def _read(self, known: _Known, events: Any) -> None:
        code: int | None = None
        try:
            with self._service.translated():
                code = _taken(events, known.output)
        except SandboxError as error:
            known.failure = error
        late = known.deadline is not None and time.monotonic() >= known.deadline
        if late and code in (None, 137):
            # The service kills a command at its deadline, and may end its stream before it says so.
            known.failure = None
            known.process = replace(known.process, exit_code=137, ended_by_us="timeout")
        elif code is not None:
            known.process = replace(known.process, exit_code=code)
        elif known.failure is None:
            known.failure = ConnectionFailed("E2B's stream ended before the command.")
        known.output.close()

    def _make_room(self) -> None:
        with self._lock:
            ended = [pid for pid, one in self._known.items() if one.process.exit_code is not None]
            for pid in ended[: max(0, len(self._known) - MOST_PROCESSES + 1)]:
                del self._known[pid]
            full = len(self._known) >= MOST_PROCESSES
        if full:
            raise InvalidConfiguration(
                f"command: {MOST_PROCESSES} processes are running. End one first.", field="command"
            )

    def _ask(self, pid: int, call: Callable[[], Any]) -> Any:
        def asked() -> Any:
            try:
                return call()
            except ConnectError as error:
                if error.code is Code.NOT_FOUND:
                    raise _NotThere(pid) from None
                raise

        return self._service.ask(asked)


class _NotThere(InvalidConfiguration):
    def __init__(self, pid: int) -> None:
        super().__init__(f"pid: No process {pid} is running.", field="pid")


def _of(pid: int, request: Callable[..., Any], **options: Any) -> Any:
    selector: Oneof[Any, int] = Oneof("pid", pid)
    return request(process=pb.ProcessSelector(selector=selector), **options)


def _taken(events: Any, output: KeptOutput) -> int | None:
    """Take what comes until the end; the exit code, None where the stream ends without one."""
    for event in events:
        match event.event.event if event.event is not None else None:
            case Oneof(field="data", value=data):
                output.take(
                    "stderr" if data.output.field == "stderr" else "stdout", data.output.value
                )
            case Oneof(field="end", value=end):
                return _ENDS.get(end.status, 137) if end.exit_code < 0 else end.exit_code & 0xFF
    return None
