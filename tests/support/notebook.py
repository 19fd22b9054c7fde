"""What a machine of a code interpreter's service does: kernels with state, files and commands.

All of it runs for real, each process in a bubblewrap of its own: the machine's folder is its home,
the rest is this machine's, read only and without a network.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HOME = "/home/user"

# As they are now: tests empty the path to see what a service does of itself.
BWRAP, NODE = shutil.which("bwrap") or "bwrap", shutil.which("node") or "node"
PATH = os.environ["PATH"]
# The one beneath any virtual environment, whose folder a machine may hide beneath its own.
PYTHON = os.path.realpath(sys.executable)

Emit = Callable[[str, str], None]


def _folders() -> Iterator[str]:
    """This machine's, to be read. Not where engines mount things and unmount them meanwhile."""
    for path in sorted(Path("/").iterdir()):
        if path.is_symlink():
            yield from ("--symlink", os.readlink(path), str(path))
        elif path.is_dir() and path.name not in {"dev", "home", "run", "sys", "tmp", "var"}:
            yield from ("--ro-bind", str(path), str(path))


FOLDERS = tuple(_folders())

KERNEL = r"""
import ast, io, json, os, signal, sys, traceback, types

reports = os.fdopen(int(sys.argv[1]), "w")
cells = os.fdopen(int(sys.argv[2]))
signal.signal(signal.SIGINT, signal.default_int_handler)
module = types.ModuleType("__main__")
sys.modules["__main__"] = module
names = module.__dict__
names["__builtins__"] = __builtins__
sys.argv[:] = [""]
sys.path.insert(0, "")
stdout, stderr = sys.stdout, sys.stderr

def run(cell):
    text = error = None
    try:
        tree = ast.parse(cell, "cell")
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, "cell", "exec"), names)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
            text = None if value is None else repr(value)
    except BaseException as problem:
        trace = problem.__traceback__.tb_next or problem.__traceback__
        lines = traceback.format_exception(type(problem), problem, trace)
        error = {"name": type(problem).__name__, "value": str(problem), "traceback": "".join(lines)}
    return {"text": text, "error": error}

while True:
    try:
        line = cells.readline()
        if not line:
            break
        asked = json.loads(line)
        os.environ.update(asked["environment"])
        told = run(asked["code"])
        for name in asked["environment"]:
            os.environ.pop(name, None)
        for stream in (stdout, stderr):
            stream.flush()
            os.write(stream.fileno(), asked["mark"].encode())
        reports.write(json.dumps(told) + "\n")
        reports.flush()
    except KeyboardInterrupt:
        # It came between two cells.
        continue
"""


@dataclass
class Cell:
    """What came of one cell. `error` has name, value and traceback. None died with its kernel."""

    stdout: str
    stderr: str
    text: str | None = None
    error: dict[str, str] | None = None


class Context:
    """A kernel of one language. Only Python's keeps its variables."""

    def __init__(self, notebook: Notebook, language: str, cwd: str = HOME) -> None:
        self.language = language
        self.cwd = cwd or HOME
        self._notebook = notebook
        self._turn = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def run(
        self,
        code: str,
        *,
        emit: Emit = lambda stream, text: None,
        environment: Mapping[str, str] | None = None,
        is_gone: Callable[[], bool] = lambda: False,
    ) -> Cell:
        """Run a cell; it is interrupted when whoever asked for it has gone."""
        turn = self._turn
        with turn:
            if self._turn is not turn:
                # The kernel that it waited for was ended.
                return Cell("", "", error=_error("KernelDied", ""))
            if self.language != "python":
                return self._notebook.run_javascript(code, emit, is_gone, environment)
            if self._process is None:
                self._start()
            if is_gone():
                # He may have had the kernel restarted meanwhile: this would run in the new one.
                return Cell("", "", error=_error("KeyboardInterrupt", ""))
            return self._run(code, emit, environment or {}, is_gone)

    def restart(self) -> None:
        """An empty kernel, whatever the former one is busy with."""
        process, self._process = self._process, None
        if process is not None:
            os.killpg(process.pid, signal.SIGKILL)
        self._turn = threading.Lock()

    def _start(self) -> None:
        reports, told = os.pipe()
        asked, cells = os.pipe()
        self._process = self._notebook.popen(
            [PYTHON, "-c", KERNEL, str(told), str(asked)], self.cwd, pass_fds=(told, asked)
        )
        os.close(told)
        os.close(asked)
        # Files, so that they are closed with the machine they belong to.
        self._reports, self._cells = os.fdopen(reports, "rb", 0), os.fdopen(cells, "w")

    def _run(
        self, code: str, emit: Emit, environment: Mapping[str, str], is_gone: Callable[[], bool]
    ) -> Cell:
        # Held until the end: after a restart another kernel has its number, were it closed.
        reports = self._reports
        process, mark = self._process, f"\0{secrets.token_hex(8)}\0"
        assert process is not None
        assert process.stdout is not None
        assert process.stderr is not None
        asked = {"code": code, "mark": mark, "environment": dict(environment)}
        self._cells.write(json.dumps(asked) + "\n")
        self._cells.flush()
        names = {process.stdout.fileno(): "stdout", process.stderr.fileno(): "stderr"}
        held = {"stdout": b"", "stderr": b"", "report": b""}
        texts = {"stdout": "", "stderr": ""}
        pending = {**names, reports.fileno(): "report"}
        poll = select.poll()
        for fd in pending:
            poll.register(fd, select.POLLIN)
        interrupted = False
        while pending:
            ready = poll.poll(50)
            if not interrupted and is_gone():
                interrupted = True
                signal_inside(process, signal.SIGINT)
            for fd, _ in ready:
                name = pending[fd]
                data = os.read(fd, 65536)
                held[name] += data
                if name == "report":
                    ended = not data or held[name].endswith(b"\n")
                else:
                    before, found, _ = held[name].partition(mark.encode())
                    ended = bool(found) or not data
                    begun = -1 if ended else before.rfind(b"\0", -len(mark))
                    text = _whole(before if begun < 0 else before[:begun], ended)
                    held[name] = before[len(text) :]
                    if text:
                        texts[name] += text.decode("utf-8", "replace")
                        if not interrupted:
                            emit(name, text.decode("utf-8", "replace"))
                if ended:
                    poll.unregister(fd)
                    del pending[fd]
        if not held["report"]:
            if self._process is process:
                self._process = None
            return Cell(texts["stdout"], texts["stderr"], error=_error("KernelDied", ""))
        told = json.loads(held["report"])
        return Cell(texts["stdout"], texts["stderr"], told["text"], told["error"])


def _whole(data: bytes, ended: bool) -> bytes:
    """As much of it as ends with a whole character."""
    if not ended:
        for back in range(1, min(4, len(data)) + 1):
            if data[-back] >= 0xC0:
                return data[:-back]
            if data[-back] < 0x80:
                break
    return data


class Notebook:
    """One machine: its files, its kernels, and the processes that run in it right now.

    `outside` is a folder of this machine that what runs may write to, for tests that count runs.
    """

    outside: Path | None = None

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self._environment = dict(environment or {})
        self._folder = tempfile.TemporaryDirectory(prefix="notebook-", ignore_cleanup_errors=True)
        self.home = Path(self._folder.name) / "home"
        self.tmp = Path(self._folder.name) / "tmp"
        self.home.mkdir()
        self.tmp.mkdir()
        self.contexts: dict[str, Context] = {}
        self.dead = False
        self._defaults: dict[str, Context] = {}
        self._processes: list[subprocess.Popen[bytes]] = []
        self._lock = threading.Lock()

    def run(self, code: str, language: str, context: Context | None = None, **options: Any) -> Cell:
        """Run a cell. Raises KeyError for a language there is no kernel for."""
        if language not in ("python", "javascript", "typescript"):
            raise KeyError(language)
        if context is None:
            with self._lock:
                context = self._defaults.setdefault(language, Context(self, language))
        return context.run(code, **options)

    def run_javascript(
        self,
        code: str,
        emit: Emit,
        is_gone: Callable[[], bool],
        environment: Mapping[str, str] | None = None,
    ) -> Cell:
        # Such kernels wait for a top-level await; Node does so in modules alone.
        waits = ("await " in code and "import(" in code) or "\n;await " in code
        suffix = "mjs" if waits else "cjs"
        program = self.tmp / f"cell-{secrets.token_hex(4)}.{suffix}"
        program.write_text(code)
        done = self.communicate([NODE, f"/tmp/{program.name}"], is_gone, environment)
        emit("stdout", done.stdout)
        if done.returncode == 0:
            emit("stderr", done.stderr)
            return Cell(done.stdout, done.stderr)
        return Cell(done.stdout, "", error=_error("Error", done.stderr))

    def communicate(
        self,
        command: Sequence[str],
        is_gone: Callable[[], bool] = lambda: False,
        environment: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        process = self.popen(command, HOME, environment)
        while True:
            try:
                out, err = process.communicate(timeout=0.1)
                break
            except subprocess.TimeoutExpired:
                if is_gone():
                    os.killpg(process.pid, signal.SIGKILL)
        if self.dead:
            raise RuntimeError("the machine was ended")
        return subprocess.CompletedProcess(
            command,
            process.returncode,
            out.decode("utf-8", "replace"),
            err.decode("utf-8", "replace"),
        )

    def popen(
        self,
        command: Sequence[str],
        cwd: str,
        environment: Mapping[str, str] | None = None,
        **options: Any,
    ) -> subprocess.Popen[bytes]:
        """Start a process of this machine, in a group of its own."""
        given = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        sandbox = (
            *(BWRAP, "--unshare-net", "--unshare-ipc", "--unshare-uts"),
            *(*FOLDERS, "--dev", "/dev"),
            *("--bind", str(self.tmp), "/tmp"),
            *(("--bind", str(self.outside), str(self.outside)) if self.outside else ()),
            *("--tmpfs", "/home", "--bind", str(self.home), HOME),
            *("--chdir", cwd, "--clearenv", "--setenv", "HOME", HOME),
            *("--setenv", "PATH", PATH, "--setenv", "PYTHONDONTWRITEBYTECODE", "1"),
            *(
                word
                for item in (self._environment | dict(environment or {})).items()
                for word in ("--setenv", *item)
            ),
        )
        process = subprocess.Popen(
            [*sandbox, "--", *command], **{**given, "start_new_session": True, **options}
        )
        with self._lock:
            self._processes.append(process)
            dead = self.dead
        if dead:
            self.kill()
        return process

    def path(self, path: str) -> Path:
        """Where a path of the machine is on this one."""
        if path.startswith("/tmp/"):
            return self.tmp / path.removeprefix("/tmp/")
        return self.home / path.removeprefix(HOME).lstrip("/")

    def kill(self) -> None:
        """End all that runs in it, and drop its files."""
        with self._lock:
            self.dead = True
            processes = list(self._processes)
        for process in processes:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        shutil.rmtree(self._folder.name, ignore_errors=True)


def signal_inside(process: subprocess.Popen[bytes], number: int) -> None:
    """Signal the one process that bubblewrap has started, or is about to, and waits for."""
    while process.poll() is None:
        try:
            listed = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
        except FileNotFoundError:
            return
        if children := listed.split():
            for child in children:
                os.kill(int(child), number)
            return
        time.sleep(0.005)


def _error(name: str, traceback: str) -> dict[str, str]:
    lines = traceback.strip().splitlines()
    return {"name": name, "value": lines[-1] if lines else name, "traceback": traceback}
