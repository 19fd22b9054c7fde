"""One command in a kept sandbox: its process, its terminal or pipes, and its end.

What a process has put out lately, by position, and who follows it.
"""

import _signal  # type: ignore[import-not-found]  # what `signal` wraps, without enum
import bisect
import errno
import fcntl
import os
import resource
import select
import time

from . import paths, trees, wire
from .kept import Refused
from .kernel import TERMINALS, become, domain_rules, enter_domain, forbid_message_queues
from .process_tree import give_to_group, open_pipe, with_group
from .protocol import CHUNK_BYTES, EVENT_COST, KEPT_OUTPUT_BYTES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable, NoReturn

    from .kept import Loop, Operation


# How long a process may take from its fork to its program. Another of its user can stop it there.
START_SECONDS = 10.0
_SET_CONTROLLING, _SET_SIZE = 0x540E, 0x5414  # TIOCSCTTY, TIOCSWINSZ
_SET_LOCK, _OPEN_PEER = 0x40045431, 0x5441  # TIOCSPTLCK, TIOCGPTPEER
_END_OF_INPUT = b"\x04"
# What is left in the pipes of a process that has ended is read up to so much.
_LEFT_BYTES = 1024 * 1024
_KILLED = 137
# How often an input that has ended is ended again, for a process that opens it by a name.
_AGAIN_SECONDS = 0.1
# Descriptors that are left for all else that the supervisor does.
_SPARE_FILES = 48
_REPORT, _DOMAIN = 3, 4


class Wanted:
    """What is to be started, checked. `pty` is columns and rows."""

    argv: "list[str]"
    cwd: "list[str]"
    environment: "dict[str, str]"
    stdin: bool
    pty: "tuple[int, int] | None"
    timeout: "float | None"


class Command:
    """A process from its fork until it is forgotten. `changed` hears of its start and its end."""

    def __init__(
        self,
        loop: "Loop",
        template: "dict[str, object]",
        wanted: Wanted,
        changed: "Callable[[Command], None]",
    ) -> None:
        self.pid = 0
        self.argv, self.cwd = wanted.argv, paths.joined(wanted.cwd)
        self.exit_code: "int | None" = None
        self.ended_by_us = ""
        self.has_started = False
        self.refusal: "Refused | None" = None
        self.output = Output(KEPT_OUTPUT_BYTES)
        self.has_terminal = wanted.pty is not None
        self._loop, self._changed, self._wanted = loop, changed, wanted
        self._followers: "list[Follower]" = []
        self._input: "list[tuple[Operation, memoryview, bool]]" = []
        self._sources: "dict[int, str]" = {}
        self._stdin: "int | None" = None
        # The end that the process reads, where one that opens it by name waits for a writer.
        self._named_input = -1
        self._final: "int | None" = None
        self._told = b""
        self._fork(template)
        self._timer = loop.at(time.monotonic() + START_SECONDS, self.end)
        loop.on_end(self.kernel_pid, lambda code, usage: self._ended(code))
        loop.watch(self._report, select.POLLIN, lambda events: self._hear())

    def _fork(self, template: "dict[str, object]") -> None:
        """Raises OSError, with nothing left open."""
        template = with_group(template)
        theirs: "list[int]" = []
        ours: "list[int]" = []
        try:
            if self._wanted.pty is not None:
                master, slave = _open_terminal()
                ours.append(master)
                theirs += [slave, slave, slave]
                if "group" in template:
                    give_to_group(slave, template)
                set_size(master, *self._wanted.pty)
            else:
                if self._wanted.stdin:
                    end, mine = open_pipe(template)
                    ours.append(mine)
                    if "group" in template:
                        self._named_input = os.open(f"/proc/self/fd/{end}", os.O_PATH)
                else:
                    end = os.open("/dev/null", os.O_RDONLY)
                theirs.append(end)
                for _ in range(2):
                    mine, end = open_pipe(template)
                    ours.append(mine)
                    theirs.append(end)
            self._report, report = os.pipe()
            ours.append(self._report)
            theirs.append(report)
            if max(ours) > resource.getrlimit(resource.RLIMIT_NOFILE)[0] - _SPARE_FILES:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            self._mark = trees.Mark(template.get("group"))  # type: ignore[arg-type]
            self.kernel_pid = os.fork()
            if self.kernel_pid == 0:
                _become(template, self._wanted, theirs, self._mark)
        except OSError:
            for fd in ours:
                os.close(fd)
            self._let_go_of_name()
            raise
        finally:
            for fd in set(theirs):
                os.close(fd)
        for fd in ours:
            os.set_blocking(fd, False)
        if self.has_terminal:
            self._stdin = ours[0]
            self._sources = {ours[0]: "stdout"}
        else:
            if self._wanted.stdin:
                self._stdin = ours.pop(0)
            self._sources = {ours[0]: "stdout", ours[1]: "stderr"}

    # Its start and its end.

    def _hear(self) -> None:
        """What it says before it is the program; the end of that is the program's start."""
        try:
            while data := os.read(self._report, 4096):
                self._told += data
        except BlockingIOError:
            return
        self._loop.unwatch(self._report)
        os.close(self._report)
        self._loop.cancel(self._timer)
        self.has_started = True
        if self._told:
            field, code, reason = self._told.decode("utf-8", "replace").split("\n", 2)
            self.refusal = Refused(reason, field or None, code)
        elif self._wanted.timeout is not None:
            deadline = time.monotonic() + self._wanted.timeout
            self._timer = self._loop.at(deadline, lambda: self.end("timeout"))
        self._changed(self)
        self._look()

    def _ended(self, code: int) -> None:
        if not self.has_started:
            self._hear()
        self._loop.cancel(self._timer)
        self.exit_code = _KILLED if self.ended_by_us else code
        for fd in list(self._sources):
            left = _LEFT_BYTES
            while left > 0 and fd in self._sources and (count := self._read(fd)):
                left -= count
        # Whoever was started by it and is still there may put out more, for later followers.
        self._final = self.output.end
        self._drop_input()
        for follower in list(self._followers):
            follower.go_on()
        self._look()
        self._changed(self)

    def end(self, reason: str = "timeout") -> None:
        """Kill it and all that came from it, daemons as well, if it is still there."""
        if self.exit_code is None:
            self.ended_by_us = self.ended_by_us or reason
            trees.kill(self.kernel_pid, self._mark)

    def forget(self) -> None:
        """Let go of its descriptors; whoever follows it has nothing to wait for.

        One that still ran was killed with everything else.
        """
        if self.exit_code is None:
            self.exit_code, self.ended_by_us = _KILLED, "closed"
        self._loop.cancel(self._timer)
        if not self.has_started:
            self._loop.unwatch(self._report)
            os.close(self._report)
        self._drop_input()
        for fd in list(self._sources):
            self._close(fd)
        for follower in self._followers:
            follower.operation.done({"process": self.state()})
        self._followers.clear()

    def state(self) -> "dict[str, object]":
        """What is said of it. A long list of arguments is cut."""
        argv, room = [], 1000
        for argument in self.argv:
            room -= len(wire.dumps(argument)) + 1
            if room < 0:
                break
            argv.append(argument)
        return {
            "pid": self.pid,
            "argv": argv,
            "cwd": self.cwd[:80],
            "exit_code": self.exit_code,
            "ended_by_us": self.ended_by_us,
        }

    # Its output.

    def follow(self, operation: "Operation", after: int) -> None:
        follower = Follower(operation, self.output, after, self._went_on)
        self._followers.append(follower)
        operation.when_stopped = lambda: self._leave(follower)
        follower.go_on()

    def _leave(self, follower: "Follower") -> None:
        follower.operation.done({"process": self.state()})
        self._look()

    def _went_on(self, follower: "Follower") -> None:
        if self._final is not None and follower.position >= self._final:
            follower.operation.done({"process": self.state()})
        self._look()

    def _look(self) -> None:
        """Wait for what there is room for."""
        self._followers = [each for each in self._followers if not each.operation.is_over]
        waits = any(each.is_behind for each in self._followers)
        wanted = dict.fromkeys(self._sources, 0 if waits or not self.has_started else select.POLLIN)
        if self._stdin is not None:
            wanted[self._stdin] = wanted.get(self._stdin, 0)
            wanted[self._stdin] |= select.POLLOUT if self._input else 0
        for fd, events in wanted.items():
            if events:
                self._loop.watch(fd, events, lambda seen, fd=fd: self._ready(fd, seen))  # type: ignore[misc]
            else:
                self._loop.unwatch(fd)

    def _ready(self, fd: int, events: int) -> None:
        if fd == self._stdin and self._input and events & ~select.POLLIN:
            self._write()
        if fd in self._sources and events & ~select.POLLOUT:
            self._read(fd)
            for follower in list(self._followers):
                follower.go_on()
            self._changed(self)
        self._look()

    def _read(self, fd: int) -> int:
        try:
            data = os.read(fd, CHUNK_BYTES)
        except BlockingIOError:
            return 0
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            # So a terminal ends that nobody has open any more.
            data = b""
        if data:
            self.output.add(self._sources[fd], data)
        else:
            self._close(fd)
        return len(data)

    def _close(self, fd: int) -> None:
        if fd == self._stdin:
            self._stdin = None
        del self._sources[fd]
        self._loop.unwatch(fd)
        os.close(fd)

    # Its input.

    def take(self, operation: "Operation", data: bytes, close: bool) -> None:
        """Input for it; the operation is done when there was room. Raises Refused."""
        if self._stdin is None or self.exit_code is not None:
            raise Refused("Its input is closed, or it has none.", "pid")
        if close and self.has_terminal:
            data, close = data + _END_OF_INPUT, False
        self._input.append((operation, memoryview(data), close))
        operation.when_stopped = lambda: self._take_back(operation)
        self._write()
        self._look()

    def _take_back(self, operation: "Operation") -> None:
        self._input = [one for one in self._input if one[0] is not operation]
        operation.done()
        self._look()

    def _write(self) -> None:
        while self._input and self._stdin is not None:
            operation, view, close = self._input[0]
            try:
                view = view[os.write(self._stdin, view) :] if view else view
            except BlockingIOError:
                return
            except OSError:
                self._close_input()
                for each, _, _ in self._input:
                    each.failed("The process reads no more.", "pid")
                self._input.clear()
                return
            self._input[0] = (operation, view, close)
            if not view:
                del self._input[0]
                if close:
                    self._close_input()
                operation.done()

    def _drop_input(self) -> None:
        for operation, _, _ in self._input:
            operation.failed("The process has ended.", "pid", "missing")
        self._input.clear()
        self._close_input()

    def _close_input(self) -> None:
        if self._stdin is not None and self._stdin not in self._sources:
            self._loop.unwatch(self._stdin)
            os.close(self._stdin)
            self._stdin = None
            self._end_input_again()

    def _end_input_again(self) -> None:
        """Open it to write and close it. To open a named pipe waits for a writer: a process that
        opens it after the end would wait for ever."""
        if self._named_input < 0:
            return
        if self.exit_code is not None:
            self._let_go_of_name()
            return
        try:
            os.close(os.open(f"/proc/self/fd/{self._named_input}", os.O_WRONLY | os.O_NONBLOCK))
        except OSError as error:
            if error.errno == errno.ENXIO:
                # Nobody has it open any more, and so nobody can open it.
                self._let_go_of_name()
                return
            # Descriptors are used up. They may be there again the next time.
        self._loop.at(time.monotonic() + _AGAIN_SECONDS, self._end_input_again)

    def _let_go_of_name(self) -> None:
        if self._named_input >= 0:
            os.close(self._named_input)
            self._named_input = -1

    # What else is done to it.

    def signal(self, number: int) -> bool:
        """To it and its group. False when it has ended: then its number may be another's."""
        if self.exit_code is not None:
            return False
        os.killpg(self.kernel_pid, number)
        return True

    def resize(self, columns: int, rows: int) -> None:
        """Raises Refused where it has no terminal, or has it no more."""
        if not self.has_terminal or self._stdin is None:
            raise Refused("The process has no terminal.", "pid")
        set_size(self._stdin, columns, rows)
        if self.exit_code is None and os.path.exists("/proc/sentry-meminfo"):
            # gVisor tells nobody, and not who has the terminal. Who does not care ignores it.
            for pid in trees.members(self.kernel_pid):
                try:
                    os.kill(pid, _signal.SIGWINCH)
                except ProcessLookupError:
                    continue


def _open_terminal() -> "tuple[int, int]":
    """Both ends of one that no other program can open, where the sandbox has a place for those.

    Raises Refused where it has as many as it may have, and OSError.
    """
    try:
        master = os.open(f"{TERMINALS}/ptmx", os.O_RDWR | os.O_NOCTTY)
    except FileNotFoundError:
        return os.openpty()
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise Refused("Too many commands have a terminal.", "pty", "exhausted") from None
        raise
    try:
        fcntl.ioctl(master, _SET_LOCK, bytes(4))
        flags = os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC
        return master, fcntl.ioctl(master, _OPEN_PEER, flags)
    except OSError:
        os.close(master)
        raise


def set_size(terminal: int, columns: int, rows: int) -> None:
    size = rows.to_bytes(2, "little") + columns.to_bytes(2, "little") + bytes(4)
    fcntl.ioctl(terminal, _SET_SIZE, size)


def _become(
    template: "dict[str, object]", wanted: Wanted, fds: "list[int]", mark: trees.Mark
) -> "NoReturn":
    """Turn this freshly forked process into the command.

    It can be neither read nor changed by others until it is the program.
    """
    field, code = "", "refused"
    try:
        os.setsid()
        _signal.set_wakeup_fd(-1)
        for each in (_signal.SIGCHLD, _signal.SIGINT, _signal.SIGPIPE, _signal.SIGXFSZ):
            _signal.signal(each, _signal.SIG_DFL)
        if wanted.pty is not None:
            fcntl.ioctl(fds[0], _SET_CONTROLLING, 0)
        for number, fd in enumerate(fds[:3]):
            os.dup2(fd, number)
        os.dup2(fds[3], _REPORT, inheritable=False)
        domain: int = template["domain"]  # type: ignore[assignment]
        if domain >= 0:
            os.dup2(domain, _DOMAIN, inheritable=False)
        os.closerange(_REPORT + 1 if domain < 0 else _DOMAIN + 1, 4096)
        if template["uid"] is not None:
            become(template["uid"], template.get("group"))  # type: ignore[arg-type]
        for kind, bound in template["bounds"]:  # type: ignore[attr-defined]
            resource.setrlimit(kind, (bound, bound))
        forbid_message_queues()
        mark.put_on()
        if domain >= 0:
            enter_domain(_DOMAIN if wanted.pty is None else domain_rules(terminal=0))
        field = "cwd"
        os.fchdir(paths.reach(os.open(".", os.O_RDONLY | os.O_DIRECTORY), wanted.cwd))
        os.closerange(_REPORT + 1, 64)
        field = "argv"
        environment = {**os.environ, "PWD": _folder(template, wanted), **wanted.environment}
        os.execvpe(wanted.argv[0], wanted.argv, environment)
    except OSError as error:
        said = paths.refusal(error, field)
        _report(said.field or "", said.code, said.reason)
    except BaseException as error:
        _report(field, code, repr(error))
    finally:
        os._exit(127)


def _folder(template: "dict[str, object]", wanted: Wanted) -> str:
    """Where we are. Of two names of one folder a shell takes the one that it is told."""
    path = os.path.join(str(template.get("home", "")), paths.joined(wanted.cwd))
    return (path.rstrip("/") or "/") if path.startswith("/") else os.getcwd()


def _report(field: str, code: str, reason: str) -> None:
    os.write(_REPORT, f"{field}\n{code}\n{reason}".encode("utf-8", "replace")[:1000])


# Up to so much what comes is put to what is there, so that small pieces take little room.
_PIECE_BYTES = 4096
# How far a follower may be behind before the process has to wait for it.
BEHIND_BYTES = 256 * 1024


class Output:
    """Both streams of one process in the order in which they came. Positions count their bytes."""

    def __init__(self, bound: int) -> None:
        self.end = 0
        self.held = 0
        self._bound = bound
        self._starts: "list[int]" = []
        self._pieces: "list[tuple[str, bytearray]]" = []

    @property
    def start(self) -> int:
        """The first byte that is still there."""
        return self._starts[0] if self._starts else self.end

    def add(self, stream: str, data: bytes) -> None:
        if self._pieces:
            last, piece = self._pieces[-1]
            if last == stream and len(piece) + len(data) <= _PIECE_BYTES:
                piece += data
                self.end += len(data)
                self.held += len(data)
                self._trim()
                return
        self._starts.append(self.end)
        self._pieces.append((stream, bytearray(data)))
        self.end += len(data)
        self.held += len(data) + EVENT_COST
        self._trim()

    def _trim(self) -> None:
        while self.held > self._bound and len(self._pieces) > 1:
            self.drop()

    def drop(self) -> None:
        """Let go of the oldest piece."""
        _, piece = self._pieces.pop(0)
        del self._starts[0]
        self.held -= len(piece) + EVENT_COST

    def at(self, position: int, most: int) -> "tuple[str, bytes]":
        """Stream and bytes from `position` on, which lies between `start` and `end`."""
        index = bisect.bisect_right(self._starts, position) - 1
        stream, piece = self._pieces[index]
        skip = position - self._starts[index]
        return stream, bytes(piece[skip : skip + most])


class Follower:
    """An operation that is sent the output from a position on, as far as it has room."""

    def __init__(
        self,
        operation: "Operation",
        output: Output,
        position: int,
        went_on: "Callable[[Follower], None]",
    ) -> None:
        self.operation, self._output, self.position = operation, output, position
        self._went_on = went_on
        operation.when_room = self.go_on

    @property
    def is_behind(self) -> bool:
        return self._output.end - self.position >= BEHIND_BYTES

    def go_on(self) -> None:
        """Send what there is room for."""
        output, operation = self._output, self.operation
        while not operation.is_over:
            self.position = max(self.position, output.start)
            room = operation.room
            if self.position >= output.end or room <= 0:
                break
            stream, data = output.at(self.position, room)
            at, self.position = self.position, self.position + len(data)
            operation.emit(stream, {"at": at}, data=data)
        self._went_on(self)
