"""The commands of a kept Aliyun sandbox: each is one call, which is answered when it has ended.

The service has a shell run it, ends it after 30 s, and tells what it has put out as text. It has no
input for it, no terminal and no other user. Whoever has begun a command is who can follow it.
"""

from __future__ import annotations

import shlex
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

from providers.aliyun_codeinterpreter.machine import HOME
from providers.errors import InvalidConfiguration, ProviderUnavailable, SandboxError
from providers.remote.deadline import DeadlinePassed
from providers.remote.output import KeptOutput
from providers.remote.sandbox import workspace_path
from providers.sandbox import Process, Processes
from providers.threads import start_thread
from providers.values import Command, Emit, Stream

if TYPE_CHECKING:
    from providers.aliyun_codeinterpreter.machine import AliyunMachine
    from providers.remote.service import AccountClient

MOST_SECONDS = 30
MOST_COMMANDS = 16
_SIGNALS = ("SIGHUP", "SIGINT", "SIGQUIT", "SIGKILL", "SIGUSR1", "SIGUSR2", "SIGTERM", "SIGCONT")
_PID_SECONDS = 10.0
_LOOK_SECONDS = 0.1
_LARGEST_PID = 1 << 22
_PIECE_BYTES = 16 * 1024


@dataclass
class _Known:
    process: Process
    output: KeptOutput = field(default_factory=KeptOutput)
    ended: threading.Event = field(default_factory=threading.Event)
    failure: SandboxError | None = None


class AliyunCommands(Processes):
    def __init__(self, machine: AliyunMachine, service: AccountClient) -> None:
        self._machine = machine
        self._service = service
        self._known: dict[int, _Known] = {}
        self._lock = threading.Lock()

    def start(self, command: Command) -> Process:
        seconds = _checked(command)
        self._make_room()
        words = ["bash", "-c", command.shell] if command.shell else list(command.argv)
        noted = f"/tmp/cofferdam-{uuid4().hex}.pid"  # noqa: S108  in the sandbox
        known = _Known(Process(0, words, command.cwd))
        cwd = f"{HOME}/{workspace_path(command.cwd)}".rstrip("/")
        text = _text(words, command, noted)
        start_thread("aliyun-command", partial(self._run, known, text, cwd, seconds))
        pid = self._pid(known, noted)
        with self._lock:
            # It may have ended meanwhile.
            known.process = replace(known.process, pid=pid)
            self._known[pid] = known
        return known.process

    def list(self) -> Sequence[Process]:
        """Those that were begun here: the service's own are among those that it lists."""
        with self._lock:
            return [self._known[pid].process for pid in sorted(self._known)]

    def follow(self, pid: int, emit: Emit, after: int = 0) -> Process:
        known = self._of(pid)
        known.output.hand_over(emit, after)
        known.ended.wait()
        if known.failure is not None:
            raise known.failure
        return known.process

    def write(self, pid: int, data: bytes, *, close: bool = False) -> None:
        raise InvalidConfiguration("stdin: Aliyun commands cannot have input.", field="stdin")

    def signal(self, pid: int, name: str) -> bool:
        if name not in _SIGNALS:
            raise InvalidConfiguration(
                f"signal: Must be one of: {', '.join(_SIGNALS)}.", field="signal"
            )
        if self._of(pid).ended.is_set():
            return False
        text = f"kill -s {name.removeprefix('SIG')} -- -{pid}"
        code, _, _ = self._service.ask(self._machine.command, text, HOME, _PID_SECONDS)
        return code == 0

    def resize(self, pid: int, columns: int, rows: int) -> None:
        raise InvalidConfiguration("pty: Aliyun commands cannot have a terminal.", field="pty")

    def _run(self, known: _Known, text: str, cwd: str, seconds: float) -> None:
        began = time.monotonic()
        code: int | None = None
        late = False
        try:
            code, stdout, stderr = self._service.ask(
                self._machine.command, text, cwd, seconds, running=True, seconds=seconds
            )
            _take(known.output, "stdout", stdout)
            _take(known.output, "stderr", stderr)
        except DeadlinePassed:
            late = True
        except SandboxError as error:
            late = time.monotonic() - began >= seconds
            known.failure = None if late else error
        if late:
            self._kill(known.process.pid)
        with self._lock:
            if late:
                known.process = replace(known.process, exit_code=137, ended_by_us="timeout")
            elif code is not None:
                known.process = replace(known.process, exit_code=code & 0xFF)
        known.output.close()
        known.ended.set()

    def _kill(self, pid: int) -> None:
        if not pid:
            return
        try:
            self._service.ask(self._machine.command, f"kill -9 -- -{pid}", HOME, _PID_SECONDS)
        except SandboxError:
            # The service ends it at its own bound, and the sandbox at the latest.
            return

    def _pid(self, known: _Known, noted: str) -> int:
        """The number that it has in the sandbox, which it notes there itself. Raises SandboxError.

        A claim, like all that comes from there: signals go to the number, in the sandbox alone.
        """
        until = time.monotonic() + _PID_SECONDS
        with tempfile.TemporaryDirectory(prefix="cofferdam-") as folder:
            target = Path(folder) / "pid"
            while True:
                had_ended = known.ended.is_set()
                if self._service.ask(self._machine.download, noted, target):
                    with target.open("rb") as file:
                        said = file.read(20).strip()
                    if said.isdigit() and 1 < int(said) < _LARGEST_PID:
                        self._service.ask(lambda: self._machine.data().remove_file(noted))
                        return int(said)
                if had_ended or time.monotonic() > until:
                    raise known.failure or ProviderUnavailable(
                        "Aliyun did not start the command.", started=True
                    )
                known.ended.wait(_LOOK_SECONDS)

    def _of(self, pid: int) -> _Known:
        with self._lock:
            known = self._known.get(pid)
        if known is None:
            raise InvalidConfiguration(
                f"pid: This server process did not start the process {pid}. Aliyun sends the "
                "output of a command only to the process that started it.",
                field="pid",
            )
        return known

    def _make_room(self) -> None:
        with self._lock:
            ended = [pid for pid, one in self._known.items() if one.ended.is_set()]
            for pid in ended[: max(0, len(self._known) - MOST_COMMANDS + 1)]:
                del self._known[pid]
            full = len(self._known) >= MOST_COMMANDS
        if full:
            raise InvalidConfiguration(
                f"command: {MOST_COMMANDS} commands are running. End one first.", field="command"
            )


def _take(output: KeptOutput, stream: Stream, text: str) -> None:
    """In pieces, of which the last are kept."""
    data = text.encode("utf-8", "replace")
    for at in range(0, len(data), _PIECE_BYTES):
        output.take(stream, data[at : at + _PIECE_BYTES])


def _checked(command: Command) -> float:
    """For how long it may run. Raises InvalidConfiguration for what cannot be had."""
    for name, value in (
        ("stdin", command.stdin),
        ("pty", command.pty),
        ("user", command.user),
    ):
        if value:
            raise InvalidConfiguration(f"{name}: Aliyun commands do not support it.", field=name)
    if not (command.shell or command.argv):
        raise InvalidConfiguration("command: Needs argv or shell.", field="command")
    if command.timeout is None or command.timeout > MOST_SECONDS:
        raise InvalidConfiguration(
            f"timeout: Must be at most {MOST_SECONDS} s: Aliyun ends a command then. Background "
            "commands have no timeout.",
            field="timeout",
        )
    return command.timeout


def _text(words: Sequence[str], command: Command, noted: str) -> str:
    """For the shell: in a session of its own, whose number it notes before it begins."""
    variables = [f"{name}={value}" for name, value in command.environment.items()]
    # Not by env itself, which takes a word with "=" for another variable.
    begun = ["env", "--", *variables, "bash", "-c", 'exec -- "$@"', "bash", *words]
    inner = f"echo $$ > {noted}; exec {shlex.join(begun)}"
    return f"setsid --wait bash -c {shlex.quote(inner)}"
