"""A provider of sandboxes that stay, for tests of what is above it: real interpreters, no walls.

Each context is a Python process with a namespace of its own, each command a process, and files are
a folder. What it does not do is isolate: nothing hostile is run in it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from providers.base import ENVIRONMENT, KEPT, Health, SandboxProvider
from providers.errors import InvalidConfiguration, KeptSandboxLost, before_the_code
from providers.network import NETWORK, Attempts, Network
from providers.sandbox import (
    DEFAULT_CONTEXT,
    Context,
    Contexts,
    KeptSandbox,
    Process,
    Processes,
    SandboxState,
)
from providers.schema import ConfigField
from providers.values import Command, Emit, Event, ExecutionResult, Job, SandboxSpec
from tests.support.folder_files import FolderFiles

# Reads code as JSON lines, and answers each with one: what it printed and how it ended.
_REPL = r"""
import contextlib, io, json, os, signal, sys, traceback
names = {"__name__": "__main__"}
answers = os.fdopen(os.dup(1), "w")
for line in sys.stdin:
    job = json.loads(line)
    os.environ.update(job["env"])
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            exec(compile(job["code"], "cell", "exec"), names)
        except KeyboardInterrupt:
            code = 130
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0
        except BaseException:
            traceback.print_exc()
            code = 1
    print(json.dumps([out.getvalue(), err.getvalue(), code]), file=answers, flush=True)
"""

_there: dict[str, Kept] = {}


class Interpreter:
    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self.lock = threading.Lock()
        self.busy = False
        self.run_now = ""
        self.process = subprocess.Popen(
            [sys.executable, "-c", _REPL],
            cwd=folder,
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, job: Job) -> tuple[str, str, int] | None:
        """None when the process is gone."""
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None
        assert stdout is not None
        with self.lock:
            self.busy, self.run_now = True, job.run
            try:
                line = json.dumps({"code": job.code, "env": dict(job.environment)})
                print(line, file=stdin, flush=True)
                answer = stdout.readline()
            except (OSError, ValueError):
                return None
            finally:
                self.busy = False
        return tuple(json.loads(answer)) if answer else None

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            try:
                stream.close()
            except OSError:
                continue


class _Contexts(Contexts):
    def __init__(self, sandbox: Kept) -> None:
        self._sandbox = sandbox

    def create(self, language: str, cwd: str = "", context_id: str = "") -> Context:
        if language != "python":
            raise InvalidConfiguration("language: Must be one of: python.", field="language")
        context = Context(context_id or f"context-{len(self._sandbox.known) + 1}", language, cwd)
        self._sandbox.begin(context)
        return context

    def list(self) -> Sequence[Context]:
        return [context for context, _ in self._sandbox.known.values()]

    def destroy(self, context_id: str) -> bool:
        found = self._sandbox.known.pop(context_id, None)
        if found is not None:
            found[1].end()
        return found is not None

    def restart(self, context_id: str) -> Context:
        context, interpreter = self._sandbox.known[context_id]
        interpreter.end()
        self._sandbox.begin(context)
        return context


class _Processes(Processes):
    def __init__(self, sandbox: Kept) -> None:
        self._sandbox = sandbox
        self._running: dict[int, tuple[subprocess.Popen[bytes], Command]] = {}
        self._count = 0

    def start(self, command: Command) -> Process:
        self._sandbox.require_there()
        argv = list(command.argv) or ["/bin/bash", "-c", command.shell]
        try:
            started = subprocess.Popen(
                argv,
                cwd=self._sandbox.folder / command.cwd,
                env={**os.environ, **command.environment},
                stdin=subprocess.PIPE if command.stdin else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise InvalidConfiguration(f"command: {error}", field="command") from error
        self._count += 1
        self._running[self._count] = (started, command)
        return Process(self._count, argv, command.cwd)

    def list(self) -> Sequence[Process]:
        return [self._as_seen(pid) for pid in self._running]

    def follow(self, pid: int, emit: Emit, after: int = 0) -> Process:
        started, command = self._running[pid]
        assert started.stdout is not None
        timer = threading.Timer(command.timeout or 3600, started.kill)
        timer.start()
        while data := started.stdout.read1(65536):  # type: ignore[attr-defined]
            emit(Event("stdout", data))
        started.wait()
        is_late = not timer.is_alive()
        timer.cancel()
        if self._sandbox.gone:
            raise KeptSandboxLost("The sandbox was closed.", started=True)
        return Process(
            pid, [], command.cwd, _code(started), "timeout" if is_late and command.timeout else ""
        )

    def write(self, pid: int, data: bytes, *, close: bool = False) -> None:
        stdin = self._running[pid][0].stdin
        assert stdin is not None
        stdin.write(data)
        stdin.flush()
        if close:
            stdin.close()

    def signal(self, pid: int, name: str) -> bool:
        started = self._running[pid][0]
        return _signalled(started, signal.Signals[name])

    def resize(self, pid: int, columns: int, rows: int) -> None:
        raise InvalidConfiguration("pty: The process has no terminal.", field="pty")

    def of(self, pid: int) -> subprocess.Popen[bytes]:
        return self._running[pid][0]

    def end(self) -> None:
        for started, _ in self._running.values():
            _signalled(started, signal.SIGKILL)
            started.wait()

    def _as_seen(self, pid: int) -> Process:
        started, command = self._running[pid]
        code = None if started.poll() is None else _code(started)
        return Process(pid, [], command.cwd, code)


def _signalled(started: subprocess.Popen[bytes], number: signal.Signals) -> bool:
    if started.poll() is not None:
        return False
    try:
        os.killpg(started.pid, number)
    except ProcessLookupError:
        # Who follows it saw its end first.
        return False
    return True


def _code(started: subprocess.Popen[bytes]) -> int:
    code = started.returncode
    return 128 - code if code < 0 else code


class Kept(KeptSandbox):
    def __init__(self, spec: SandboxSpec, owner: str) -> None:
        self.owner = owner
        self.folder = Path(tempfile.mkdtemp(prefix="kept-here-"))
        self.ref = f"secret-ref:{self.folder.name}"
        self.metadata = {"runtime": "here", "sharing": "session"}
        self.environment = spec.environment
        self.network = spec.network
        self.attempts = Attempts()
        self.gone = False
        # Where it is set, what a run has answered comes only then.
        self.holds_answers: threading.Event | None = None
        self.renewals: list[float] = []
        self.known: dict[str, tuple[Context, Interpreter]] = {}
        self.contexts = _Contexts(self)
        self.processes = _Processes(self)
        self.files = FolderFiles(self.folder)
        self.begin(Context(DEFAULT_CONTEXT, spec.template))
        _there[self.ref] = self

    def begin(self, context: Context) -> None:
        folder = self.folder / context.cwd
        folder.mkdir(parents=True, exist_ok=True)
        self.known[context.id] = (context, Interpreter(folder, self.environment))

    def run(self, job: Job, emit: Emit | None = None) -> ExecutionResult:
        began = time.monotonic()
        self.require_there()
        for file in job.files:
            self.files.write(file.path, [file.content])
        _, interpreter = self.known[job.context]
        timer = threading.Timer(job.timeout, self.interrupt, [job.context])
        timer.start()
        answer = interpreter.run(job)
        is_late = not timer.is_alive()
        timer.cancel()
        if self.holds_answers is not None:
            self.holds_answers.wait(60)
        if answer is None:
            raise KeptSandboxLost("The sandbox is gone: it ended during a run.", started=True)
        out, err, code = answer
        taken = time.monotonic() - began
        result = ExecutionResult(out, err, code, taken, {"context_kept": True})
        if self.network is not None:
            result.metadata[NETWORK] = self.take_attempts().to_json()
        if is_late:
            result.timed_out, result.exit_code = True, None
        return result

    def interrupt(self, context_id: str = DEFAULT_CONTEXT, run: str = "") -> bool:
        _, interpreter = self.known[context_id]
        if not interpreter.busy or run not in ("", interpreter.run_now):
            return False
        interpreter.process.send_signal(signal.SIGINT)
        return True

    def change_network(self, network: Network | None) -> None:
        self.require_there()
        self.network = network

    def take_attempts(self) -> Attempts:
        self.require_there()
        taken, self.attempts = self.attempts, Attempts()
        return taken

    def reset(self) -> None:
        self.processes.end()
        for _, interpreter in self.known.values():
            interpreter.end()
        self.known.clear()
        self.begin(Context(DEFAULT_CONTEXT, "python"))

    def require_there(self) -> None:
        if self.gone:
            with before_the_code():
                raise KeptSandboxLost("There is no such sandbox any more.")

    def renew(self, seconds: float) -> None:
        self.require_there()
        self.renewals.append(seconds)

    def state(self) -> SandboxState:
        return SandboxState(self.contexts.list(), self.processes.list())

    def close(self) -> bool:
        if self.gone:
            return False
        self.gone = True
        _there.pop(self.ref, None)
        self.processes.end()
        for _, interpreter in self.known.values():
            interpreter.end()
        shutil.rmtree(self.folder, ignore_errors=True)
        return True


class KeptHere(SandboxProvider):
    id = "kept_here"
    name = "Kept here"
    isolation = "namespaces"
    holds_network = True
    capabilities = frozenset({ENVIRONMENT, KEPT, "files", "contexts", "arguments"})
    config_fields = {"mark": ConfigField("string", "Mark", required=False, default="")}

    def initialize(self, config: Mapping[str, Any]) -> bool:
        self.mark = config.get("mark", "")
        return True

    def open(self, spec: SandboxSpec, owner: str) -> Any:
        if not spec.kept:
            raise InvalidConfiguration("kept: Only sandboxes that stay.", field="kept")
        return Kept(spec, owner)

    def attach(self, ref: str) -> KeptSandbox:
        if ref not in _there:
            raise KeptSandboxLost("The sandbox is gone.")
        return _there[ref]

    def health_check(self) -> Health:
        return Health(True)

    def get_supported_languages(self) -> list[str]:
        return ["python"]


def sandboxes() -> list[Kept]:
    """Those that are there."""
    return list(_there.values())
