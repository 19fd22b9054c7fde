"""One interpreter of a kept sandbox: a child that runs one cell after the other and says so.

What it says of a run is a claim, and a run that will not stop loses its interpreter and all that
descends from it.

The interpreters of a kept sandbox by their names, and what the host may do with them.
"""

import os
import re
import select
import signal
import time

from . import network, python_runner, trees, wire
from .cell import KILLED, Cell
from .child import EXHAUSTED, JOB, confine
from .job import write_files
from .kept import Refused
from .paths import NAME_BYTES, PATH_BYTES
from .process_tree import SIGSYS, Child, with_group
from .protocol import CALL_BYTES, DEFAULT_CONTEXT, MOST_CONTEXTS
from .request import END_SECONDS
from .texts import TEXTS

TYPE_CHECKING = False  # as in typing, which is too dear to import here
if TYPE_CHECKING:
    import resource
    from typing import Callable, NoReturn

    from .kept import Handler, Header, Loop, Operation, Parts


# What one report may have beside its parts.
REPORT_BYTES = 4096
# The text that an interpreter other than Python needs to become a context.
_NAME = re.compile("[A-Za-z_][A-Za-z_0-9]*")
_TEXTS = {"nodejs": "node_context.js", "bash": "bash_context.sh"}


class Context:
    """One interpreter, from its start over its cells to its end, and its next start."""

    def __init__(
        self,
        room: "ContextRoom",
        name: str,
        language: str,
        cwd: str,
        child: "Child | None" = None,
    ) -> None:
        """Start it, or take over a `child` that has rehearsed already."""
        self.loop: "Loop" = room.loop
        self.artifacts = room.artifacts
        self.name, self.language, self.cwd = name, language, cwd
        self.advised = bool(room.template.get("advise")) and language == "python"
        self.pid = -1
        self.cell: "Cell | None" = None
        self.waiting: "list[Operation]" = []
        # Nothing of it is to start again.
        self.is_dropped = False
        self._room = room
        self._is_ready = False
        self._has_rehearsed = self._is_late = False
        self._was_lost = False
        self._pending: "list[memoryview]" = []
        self._reports = wire.Parser(REPORT_BYTES)
        self._child: "Child | None" = None
        self._timer = 0
        self._writer = 0
        self._take_over(child or self._fork())
        if child is not None:
            self._has_rehearsed = True
            self._be_context()

    @property
    def described(self) -> "dict[str, object]":
        return {"id": self.name, "language": self.language, "cwd": self.cwd}

    @property
    def is_alive(self) -> bool:
        return self._child is not None

    # A cell.

    def run(self, operation: "Operation", header: "Header", parts: "Parts") -> None:
        """Begin a cell. Raises Refused."""
        if self.cell is not None:
            raise Refused("this context is already running code", "context")
        environment: "dict[str, str]" = header.get("environment") or {}  # type: ignore[assignment]
        if self.language == "bash" and not all(map(_NAME.fullmatch, environment)):
            raise Refused("bash does not allow variables with such names", "environment")
        if self.language == "bash" and header.get("tools"):
            raise Refused("only code in Python and JavaScript can call tools", "tools")
        if self._child is None:
            self._take_over(self._fork())
        assert self._child is not None
        self.cell = Cell(operation, self, header, parts)
        self._reports.limit = REPORT_BYTES + max(
            self.cell.limits["result_bytes"],
            self.cell.limits["rich_output_bytes"],
            CALL_BYTES,
            wire.EXCEPTION_BYTES,
        )
        self.cell.attach(self._child.stdout, self._child.stderr)
        for fd in (self._child.stdout, self._child.stderr):
            self.loop.watch(fd, select.POLLIN, lambda _, fd=fd: self._read_output(fd))  # type: ignore[misc]
        files = {name: part for name, part in parts.items() if name.startswith("file:")}
        if files:
            try:
                self._write_files(files)
            except OSError:
                # Processes are used up, by whom it may be. The next run tries again.
                self._forget_cell()
                raise
        elif self._is_ready:
            self._feed_cell()

    def _write_files(self, files: "dict[str, bytes]") -> None:
        """As the program's user, who may have put anything in the way, and not in our time."""
        told, tell = os.pipe()
        try:
            self._writer = os.fork()
            if self._writer == 0:
                write_as_program(self._room.template, files, tell)
        except OSError:
            os.close(told)
            raise
        finally:
            os.close(tell)
        self.loop.on_end(self._writer, lambda code, _: self._files_written(code, told))

    def _files_written(self, code: int, told: int) -> None:
        self._writer = 0
        complaint = os.read(told, 2000).decode("utf-8", "replace").strip()
        os.close(told)
        if self.cell is None:
            return
        if code:
            if not self.cell.timed_out and not self.cell.interrupted:
                self.cell.refuse(complaint, "files")
            self._end_cell(context_kept=True)
        elif self._is_ready:
            self._feed_cell()

    def _feed_cell(self) -> None:
        assert self.cell is not None
        self._feed(self.cell.job)
        self.cell.job = []

    def _forget_cell(self) -> None:
        """It has not begun, and whoever asked for it is told so."""
        assert self.cell is not None
        assert self._child is not None
        self.loop.unwatch(self._child.stdout)
        self.loop.unwatch(self._child.stderr)
        self.cell.cancel_timers()
        self.cell = None

    def _end_cell(self, *, context_kept: bool, cpu_seconds: "float | None" = None) -> None:
        cell, self.cell = self.cell, None
        if cell is None:
            return
        if self._writer:
            trees.kill(self._writer)
        if self._child is not None:
            self.loop.unwatch(self._child.stdout)
            self.loop.unwatch(self._child.stderr)
        cell.finish(context_kept=context_kept and not self._was_lost, cpu_seconds=cpu_seconds)
        if not cell.is_given_up:
            self._was_lost = False

    def answer(self, call: int, answer: bytes) -> None:
        """Hand the interpreter what a call of a tool is answered with."""
        if self._child is not None:
            self._feed(wire.chunks({"type": "answer", "call": call}, [("answer", answer)]))

    def signal(self) -> None:
        """Interrupt what runs in the foreground, as a terminal would."""
        if self.cell is not None and self._child is not None and self._child.stop >= 0:
            # What runs behind an await in JavaScript is stopped by another thread, which reads it.
            try:
                os.write(self._child.stop, self.cell.number.to_bytes(8, "big"))
            except (BlockingIOError, BrokenPipeError):
                pass
        try:
            os.killpg(self.pid, signal.SIGINT)
        except (ProcessLookupError, PermissionError):
            return

    def lose(self) -> None:
        """End the interpreter and all that descends from it. The next one starts at its end."""
        if self._writer:
            # The interpreter has not begun, and has nothing to lose.
            trees.kill(self._writer)
        elif self._child is not None:
            trees.kill(self.pid)

    def _be_late(self) -> None:
        """It takes longer to be ready than it may, most likely because the machine is busy."""
        self._is_late = True
        self.lose()

    def use_too_much(self) -> None:
        """It is the largest of those that use up the memory."""
        if self.cell is not None:
            self.cell.out_of_memory = True
        self.lose()

    # The interpreter.

    def _fork(self) -> Child:
        return Child(with_group(self._room.template_of(self.language)))

    def _take_over(self, child: Child) -> None:
        self._child, self.pid = child, child.pid
        self._is_ready = self._has_rehearsed = self._is_late = False
        self._reports = wire.Parser(REPORT_BYTES)
        self._pending = []
        for fd in (child.job, child.report, child.stop):
            if fd >= 0:
                os.set_blocking(fd, False)
        self.loop.watch(child.report, select.POLLIN, lambda _: self._read_reports())
        self.loop.on_end(child.pid, lambda code, usage: self._ended(child, code, usage))
        self._timer = self.loop.at(time.monotonic() + self._room.start_seconds, self._be_late)

    def _be_context(self) -> None:
        """Say to an interpreter that has rehearsed what it is to be."""
        text = TEXTS.get(_TEXTS.get(self.language, ""), "")
        header: "dict[str, object]" = {
            "type": "context",
            "environment": self._room.environment,
            "cwd": os.path.join(self._room.home, self.cwd) if self.cwd else self._room.home,
        }
        self._feed(wire.chunks(header, [("runner", text.encode())]))

    def _read_output(self, fd: int) -> None:
        if self.cell is not None:
            of = self.cell.stdout if fd == self.cell.stdout.fd else self.cell.stderr
            if not of.read():
                self.loop.unwatch(fd)

    def _read_reports(self) -> None:
        assert self._child is not None
        try:
            data = os.read(self._child.report, 1 << 16)
        except BlockingIOError:
            return
        if not data:
            # Its end, or a program that has closed what was not its own: nothing more is said.
            self.loop.unwatch(self._child.report)
            return
        try:
            for header, parts in self._reports.feed(data):
                self._report(header, parts)
        except wire.FrameError:
            # Whatever is said here from now on cannot be told apart.
            self.loop.unwatch(self._child.report)
            self.lose()

    def _report(self, header: "Header", parts: "Parts") -> None:
        if self._is_ready:
            if self.cell is not None and self.cell.report(header, parts):
                self._end_cell(context_kept=True)
        elif header.get("type") == "ready":
            if not self._has_rehearsed:
                self._has_rehearsed = True
                self._be_context()
                return
            self._is_ready = True
            self.loop.cancel(self._timer)
            for operation in self.waiting:
                is_first = operation.name == "keep"
                operation.done(
                    {"contexts": [self.described]} if is_first else {"context": self.described}
                )
            self.waiting = []
            if self.cell is not None and not self._writer:
                self._feed_cell()

    def _feed(self, chunks: "list[bytes]") -> None:
        self._pending += [memoryview(chunk) for chunk in chunks if chunk]
        self._write_job()

    def _write_job(self) -> None:
        """Write what the pipe has room for, and let go of it."""
        assert self._child is not None
        try:
            while self._pending:
                self._pending[0] = self._pending[0][os.write(self._child.job, self._pending[0]) :]
                if not self._pending[0]:
                    del self._pending[0]
            self.loop.unwatch(self._child.job)
        except BlockingIOError:
            self.loop.watch(self._child.job, select.POLLOUT, lambda _: self._write_job())
        except BrokenPipeError:
            self._pending = []
            self.loop.unwatch(self._child.job)
            self.lose()

    def _ended(self, child: Child, code: int, usage: "resource.struct_rusage") -> None:
        """The interpreter is no more, whoever ended it. What it has started ends with it."""
        self.loop.cancel(self._timer)
        trees.kill(child.pid)
        self.loop.unwatch(child.report)
        self.loop.unwatch(child.job)
        had_cell = self.cell is not None
        told = self.cell is not None and not self.cell.is_given_up
        was_ready = self._is_ready
        if self.cell is not None:
            self._take_last_reports(child)
            self.cell.sigsys = int(self.loop.ending_signal == SIGSYS)
            if self.cell.code is None:
                self.cell.code = code
            seconds = usage.ru_utime + usage.ru_stime
            self._end_cell(context_kept=False, cpu_seconds=seconds)
        complaint = "" if was_ready else _complaint(child)
        if self._is_late:
            complaint = (
                f"it was not ready within {self._room.start_seconds:g} s. {complaint}".strip()
            )
        child.close()
        self._child = None
        kind = "exhausted" if self._is_late or code == EXHAUSTED else "refused"
        for operation in self.waiting:
            operation.failed(f"the interpreter did not start: {complaint}", code=kind)
            if operation.name == "context.create":
                self._room.drop(self)
        self.waiting = []
        # What did not even start is tried again by the next run, and by nobody before.
        if was_ready or had_cell:
            self._start_again(told=told)

    def _take_last_reports(self, child: Child) -> None:
        """What it said before it ended; a `done` among it has an exit code and a result."""
        try:
            while self.cell is not None and (data := os.read(child.report, 1 << 16)):
                for header, parts in self._reports.feed(data):
                    self.cell.report(header, parts)
        except (BlockingIOError, wire.FrameError):
            return

    def _start_again(self, *, told: bool) -> None:
        self._was_lost = not told
        try:
            self._take_over(self._fork())
        except OSError:
            # Processes are used up, by whom it may be. The next run tries again.
            self._child = None

    def restart(self, operation: "Operation") -> None:
        """End the interpreter, and answer when an empty one is ready."""
        self.end(lambda: self._restarted(operation))

    def _restarted(self, operation: "Operation") -> None:
        if self.is_dropped:
            operation.failed("the context was ended")
            return
        self._was_lost = False
        try:
            if self._child is None:
                self._take_over(self._fork())
            if self._is_ready:
                # A run has come meanwhile, and has had an empty one.
                operation.done({"context": self.described})
            else:
                self.waiting.append(operation)
        except OSError as error:
            # Processes are used up, by whom it may be.
            operation.failed(f"the interpreter did not start: {error}", code="exhausted")

    def end(self, then: "Callable[[], None]") -> None:
        """Let the interpreter end as a program does, for a moment, and go on with `then`.

        One that runs something, or is not ready, is ended at once.
        """
        child = self._child
        if child is None or self.cell is not None or not self._is_ready:
            self.close()
            then()
            return
        self._child = None
        self.loop.unwatch(child.report)
        self.loop.unwatch(child.job)
        os.close(child.job)
        child.job = -1
        timer = self.loop.at(time.monotonic() + END_SECONDS, lambda: trees.kill(child.pid))

        def ended(*_: object) -> None:
            self.loop.cancel(timer)
            trees.kill(child.pid)
            child.close()
            then()

        self.loop.on_end(child.pid, ended)

    def close(self) -> None:
        """End the interpreter and what runs in it, and let go of its pipes."""
        child = self._child
        if child is None:
            return
        self.loop.cancel(self._timer)
        self.loop.on_end(child.pid, lambda *_: None)
        self.lose()
        for fd in (child.report, child.job):
            self.loop.unwatch(fd)
        if self.cell is not None:
            self.cell.code = KILLED
            self._end_cell(context_kept=False)
        child.close()
        self._child = None
        for operation in self.waiting:
            operation.failed("the context was ended")
        self.waiting = []


def write_as_program(
    template: "dict[str, object]", files: "dict[str, bytes]", tell: int
) -> "NoReturn":
    """Be the program's user in this fork, write the files, and end."""
    try:
        os.setsid()
        os.dup2(tell, 2)
        # Nobody whose user we share may find the channel here, or another context's pipes.
        os.closerange(JOB, 1024)
        confine(template)
        write_files(files)
        os._exit(0)
    finally:
        os._exit(1)


def _complaint(child: Child) -> str:
    os.set_blocking(child.stderr, False)
    try:
        return os.read(child.stderr, 2000).decode("utf-8", "replace").strip()
    except BlockingIOError:
        return ""


NAME_LIMIT = 100
# How long a new interpreter may take to be ready, where the host does not say.
START_SECONDS = 10.0


class ContextRoom:
    """All contexts of a sandbox. The first is the child that was warm already."""

    def __init__(
        self, loop: "Loop", template: "dict[str, object]", header: "Header", child: Child
    ) -> None:
        self.loop = loop
        self.template = template
        self.environment = network.complete(header.get("environment") or {})  # type: ignore[arg-type]
        self.start_seconds: float = header.get("start_seconds") or START_SECONDS  # type: ignore[assignment]
        self.artifacts = os.path.abspath("artifacts")
        self.home = str(template.get("home", ""))
        self._commands: "dict[str, list[str]]" = header.get("commands") or {}  # type: ignore[assignment]
        self._commands.setdefault(str(template["language"]), template["command"])  # type: ignore[arg-type]
        self._commands.setdefault("python", [])
        if template["language"] != "python":
            python_runner.prepare()
        self._contexts: "dict[str, Context]" = {}
        self._made = 0
        if template["uid"] is not None:
            # Its pipes belong to its user, who is to have other programs.
            child.kill_all()
            child.close()
        given = child if template["uid"] is None else None
        self._add(DEFAULT_CONTEXT, str(template["language"]), "", given)

    def operations(self) -> "dict[str, Handler]":
        return {
            "run": self._run,
            "interrupt": self._interrupt,
            "context.create": self._create,
            "context.destroy": self._destroy,
            "context.restart": self._restart,
            "context.list": self._list,
        }

    def busy(self) -> bool:
        return any(context.cell is not None for context in self._contexts.values())

    def running(self) -> "list[tuple[int, Callable[[], None]]]":
        return [
            (context.pid, context.use_too_much)
            for context in self._contexts.values()
            if context.is_alive
        ]

    def forget(self) -> None:
        for context in self._contexts.values():
            context.is_dropped = True
            context.close()
        self._contexts.clear()
        self._add(DEFAULT_CONTEXT, str(self.template["language"]), "")

    def template_of(self, language: str) -> "dict[str, object]":
        """The template for a child of this language."""
        return {**self.template, "language": language, "command": self._commands[language]}

    def when_ready(self, operation: "Operation") -> None:
        """Answer `operation` with all contexts once the first is ready."""
        self._contexts[DEFAULT_CONTEXT].waiting.append(operation)

    def drop(self, context: Context) -> None:
        """It has never been there."""
        self._contexts.pop(context.name, None)

    def _add(self, name: str, language: str, cwd: str, child: "Child | None" = None) -> Context:
        context = Context(self, name, language, cwd, child)
        self._contexts[name] = context
        return context

    def _named(self, header: "Header", field: str = "context") -> Context:
        context = self._contexts.get(str(header.get(field) or DEFAULT_CONTEXT))
        if context is None:
            raise Refused("there is no such context", field, "missing")
        return context

    def _run(self, operation: "Operation", header: "Header", parts: "Parts") -> None:
        self._named(header).run(operation, header, parts)

    def _interrupt(self, operation: "Operation", header: "Header", parts: "Parts") -> None:
        cell = self._named(header, "target").cell
        if cell is not None:
            cell.interrupt()
        operation.done({"stopped": cell is not None})

    def _create(self, operation: "Operation", header: "Header", parts: "Parts") -> None:
        language, name = header.get("language"), header.get("context")
        cwd = header.get("cwd") or ""
        if not isinstance(language, str) or language not in self._commands:
            raise Refused("this sandbox does not have this language", "language")
        if not isinstance(cwd, str) or "\0" in cwd or _is_too_long(cwd):
            raise Refused("this is not a folder", "cwd")
        if not name:
            self._made += 1
            name = f"{language}-{self._made}"
        if not isinstance(name, str) or len(name) > NAME_LIMIT or not name.isprintable():
            raise Refused("this is not a valid name of a context", "context")
        if name in self._contexts:
            raise Refused("a context with this name exists already", "context")
        if len(self._contexts) >= MOST_CONTEXTS:
            raise Refused(f"a sandbox can have at most {MOST_CONTEXTS} contexts", code="exhausted")
        self._add(name, language, cwd).waiting.append(operation)

    def _destroy(self, operation: "Operation", header: "Header", parts: "Parts") -> None:
        if header.get("context") == DEFAULT_CONTEXT:
            raise Refused("the first context of a sandbox cannot be ended", "context")
        context = self._contexts.pop(str(header.get("context")), None)
        if context is None:
            operation.done({"found": False})
        else:
            context.end(lambda: operation.done({"found": True}))

    def _restart(self, operation: "Operation", header: "Header", parts: "Parts") -> None:
        self._named(header).restart(operation)

    def _list(self, operation: "Operation", header: "Header", parts: "Parts") -> None:
        operation.done({"contexts": [each.described for each in self._contexts.values()]})


def _is_too_long(folder: str) -> bool:
    """Whether no file system has such a folder."""
    names = [name.encode(errors="surrogatepass") for name in folder.split("/")]
    return max(map(len, names)) > NAME_BYTES or sum(len(n) + 1 for n in names) > PATH_BYTES
