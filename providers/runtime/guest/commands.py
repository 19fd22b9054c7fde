"""The commands of a kept sandbox, as a room of its loop: started, followed, fed, signalled."""

import _signal  # type: ignore[import-not-found]
import os
import pwd
import sys

from . import network, paths, protocol
from .command import Command, Wanted
from .kept import Refused
from .kernel import domain_rules

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable

    from .kept import Handler, Header, Loop, Operation, Parts

# How many that have ended are remembered, and what is kept of all outputs together.
MOST_ENDED, ALL_OUTPUT_BYTES = 64, 16 * 1024 * 1024
# The highest number that Linux gives a process.
MOST_KERNEL_PID = 1 << 22
_LONGEST_TIMEOUT = 10 * 365 * 86400.0


class Commands:
    """Every command by its number, which is never used twice.

    It is that of its process, as the sandbox sees it. A kernel begins with low numbers again when
    it is out of them: a command that would get one a second time has one that no process can have.
    """

    def __init__(
        self, loop: "Loop", template: "dict[str, object]", environment: "dict[str, str]"
    ) -> None:
        """`environment` is set for all commands, beside what each brings."""
        # What all but those with a terminal have is made once.
        self._template = {**template, "domain": domain_rules()}
        self._loop, self._environment = loop, environment
        self._commands: "dict[int, Command]" = {}
        self._starting: "dict[Command, Operation]" = {}
        self._used: "set[int]" = set()
        self._beyond = MOST_KERNEL_PID

    def operations(self) -> "dict[str, Handler]":
        return {
            "spawn": self._spawn,
            "follow": self._follow,
            "process.list": self._list,
            "stdin": self._stdin,
            "signal": self._signal,
            "resize": self._resize,
        }

    def busy(self) -> bool:
        return any(each.exit_code is None for each in [*self._commands.values(), *self._starting])

    def running(self) -> "list[tuple[int, Callable[[], None]]]":
        return [
            (each.kernel_pid, lambda each=each: each.end("memory"))  # type: ignore[misc]
            for each in [*self._commands.values(), *self._starting]
            if each.exit_code is None
        ]

    def forget(self) -> None:
        for operation in self._starting.values():
            operation.failed("The sandbox was reset.")
        for each in [*self._commands.values(), *self._starting]:
            each.forget()
        self._commands.clear()
        self._starting.clear()

    def _spawn(self, operation: "Operation", header: "Header", parts: "Parts") -> None:
        wanted = _checked(header, self._template)
        wanted.environment = {**self._environment, **wanted.environment}
        if wanted.pty is not None:
            wanted.environment.setdefault("TERM", "xterm-256color")
        running = sum(each.exit_code is None for each in self._commands.values())
        if running + len(self._starting) >= protocol.MOST_PROCESSES:
            raise Refused("Too many processes run in this sandbox.", code="exhausted")
        command = Command(self._loop, self._template, wanted, self._changed)
        self._starting[command] = operation
        operation.when_stopped = command.end

    def _changed(self, command: Command) -> None:
        """It has started, put something out, or ended."""
        operation = self._starting.pop(command, None)
        if operation is not None:
            if command.refusal is not None:
                refusal = command.refusal
                operation.failed(refusal.reason, refusal.field, refusal.code)
                command.forget()
            else:
                command.pid = self._number(command.kernel_pid)
                self._commands[command.pid] = command
                operation.done({"pid": command.pid})
        ended = [each for each in self._commands.values() if each.exit_code is not None]
        for each in ended[: max(0, len(ended) - MOST_ENDED)]:
            del self._commands[each.pid]
            each.forget()
        outputs = [each.output for each in self._commands.values()]
        while sum(output.held for output in outputs) > ALL_OUTPUT_BYTES:
            max(outputs, key=lambda output: output.held).drop()

    def _number(self, kernel_pid: int) -> int:
        number = kernel_pid
        if number in self._used:
            self._beyond += 1
            number = self._beyond
        self._used.add(number)
        return number

    def _follow(self, operation: "Operation", header: "Header", parts: "Parts") -> None:
        after = header.get("after", 0)
        if type(after) is not int or after < 0:
            raise Refused("Must be a whole number from 0.", "after")
        if header.get("credit") is None:
            # Who may be sent nothing waits for the end.
            after = sys.maxsize
        self._find(header).follow(operation, after)

    def _list(self, operation: "Operation", header: "Header", parts: "Parts") -> None:
        operation.done({"processes": [each.state() for each in self._commands.values()]})

    def _stdin(self, operation: "Operation", header: "Header", parts: "Parts") -> None:
        data = parts.get("data", b"")
        if len(data) > protocol.CHUNK_BYTES:
            raise Refused(f"Must be at most {protocol.CHUNK_BYTES} bytes.", "data")
        self._find(header).take(operation, data, header.get("close") is True)

    def _signal(self, operation: "Operation", header: "Header", parts: "Parts") -> None:
        number = _signal_number(header.get("signal"))
        operation.done({"found": self._find(header).signal(number)})

    def _resize(self, operation: "Operation", header: "Header", parts: "Parts") -> None:
        size = _size((header.get("columns"), header.get("rows")), "columns")
        self._find(header).resize(*size)
        operation.done()

    def _find(self, header: "Header") -> Command:
        pid = header.get("pid")
        command = self._commands.get(pid) if type(pid) is int else None
        if command is None:
            raise Refused("There is no such process.", "pid", "missing")
        return command


def _checked(header: "Header", template: "dict[str, object]") -> Wanted:
    """What `spawn` asks for. Raises Refused."""
    wanted = Wanted()
    argv, shell = header.get("argv") or [], header.get("shell") or ""
    if bool(argv) == bool(shell):
        raise Refused("One of `argv` and `shell` must be given.", "argv")
    if not isinstance(argv, list) or not all(map(_is_text, argv)) or (argv and not argv[0]):
        raise Refused("Must be a list of texts without NUL.", "argv")
    if not _is_text(shell):
        raise Refused("Must be text without NUL.", "shell")
    wanted.argv = argv or ["bash", "-c", str(shell)]
    wanted.cwd = paths.parse_anywhere(header.get("cwd") or "", "cwd")
    wanted.environment = network.complete(_environment(header.get("environment") or {}))
    _check_user(header.get("user") or "", template)
    wanted.stdin = header.get("stdin") is True
    pty = header.get("pty")
    wanted.pty = None
    if pty is not None:
        wanted.pty = _size(pty, "pty")
    timeout = header.get("timeout")
    if timeout is not None and not (
        type(timeout) in (int, float) and 0 < timeout <= _LONGEST_TIMEOUT  # type: ignore[operator]
    ):
        raise Refused("Must be a number of seconds above 0.", "timeout")
    wanted.timeout = timeout  # type: ignore[assignment]
    return wanted


def _is_text(value: object) -> bool:
    if not isinstance(value, str) or "\0" in value:
        return False
    try:
        os.fsencode(value)
    except UnicodeEncodeError:
        return False
    return True


def _environment(given: object) -> "dict[str, str]":
    if not isinstance(given, dict) or not all(
        _is_text(name) and _is_text(value) and name and "=" not in name
        for name, value in given.items()
    ):
        raise Refused("Must be texts by name, without NUL.", "environment")
    return dict(given)


def _check_user(user: object, template: "dict[str, object]") -> None:
    """Nobody but the sandbox's own user is to be had, by name or number."""
    uid = template["uid"] if template["uid"] is not None else os.getuid()
    known = {"", str(uid)}
    try:
        known.add(pwd.getpwuid(uid).pw_name)  # type: ignore[arg-type]
    except KeyError:
        # An image need not know its user by a name.
        known.add("sandbox")
    if user not in known:
        raise Refused("There is no such user in the sandbox.", "user")


def _size(given: object, field: str) -> "tuple[int, int]":
    if (
        not isinstance(given, (list, tuple))
        or len(given) != 2
        or not all(type(each) is int and 0 < each < 1 << 16 for each in given)
    ):
        raise Refused("Must be columns and rows from 1 to 65535.", field)
    return given[0], given[1]


def _signal_number(given: object) -> int:
    """A signal by its number, or its name such as SIGTERM. Raises Refused."""
    if isinstance(given, str) and given.startswith("SIG") and not given.startswith("SIG_"):
        given = getattr(_signal, given, None)
    if type(given) is not int or not 0 < given <= _signal.SIGRTMAX:
        raise Refused("There is no such signal.", "signal")
    return given
