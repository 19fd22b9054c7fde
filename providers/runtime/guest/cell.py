"""One run in a context: its output, its deadline, and what comes of it."""

import os
import time

from . import advice, artifacts, network, wire
from .capture import STDERR, STDOUT, Bundles, Capture, Order
from .protocol import (
    CALL_ANSWER_BYTES,
    CALL_BYTES,
    CHUNK_BYTES,
    MOST_CALLS,
    MOST_REFUSED_CALLS,
    MOST_WAITING_CALLS,
    STOP_SECONDS,
)
from .request import outcome

TYPE_CHECKING = False  # as in typing, which is too dear to import here
if TYPE_CHECKING:
    from typing import Callable

    from .context import Context
    from .kept import Operation

# The exit code of a run that was interrupted, and of one that ended with its context.
INTERRUPTED, KILLED = 130, 137
# What a pipe may hold that is still to be read when a run has ended: a program can make it so long.
PIPE_BYTES = 1024 * 1024
_TICKS = os.sysconf("SC_CLK_TCK")


class Cell:
    """A run under way. What it says is known by `number`, which no other run of the sandbox has."""

    def __init__(
        self,
        operation: "Operation",
        context: "Context",
        header: "dict[str, object]",
        parts: "dict[str, bytes]",
    ) -> None:
        limits: "dict[str, int]" = header["limits"]  # type: ignore[assignment]
        self.operation = operation
        self.language = context.language
        self.limits = limits
        self.number = int.from_bytes(os.urandom(6), "big")
        self.timed_out = False
        self.out_of_memory = False
        self.interrupted = False
        # Nobody hears what comes of it.
        self.is_given_up = False
        self.began = False
        self.memory_peak = 0
        # Whether that ended its interpreter. Of other processes nobody knows whose run they are of.
        self.sigsys = 0
        self.code: "int | None" = None
        self.done_parts: "dict[str, bytes]" = {}
        self.order = Order()
        self.outputs = Bundles(limits)
        self.remarks: "list[list[object]] | None" = None
        self.remarks_dropped = 0
        self.stdout: Capture
        self.stderr: Capture
        self.tools: "list[str]" = header.get("tools") or []  # type: ignore[assignment]
        self._calls = self._refused_calls = 0
        self._unanswered: "set[int]" = set()
        self._context = context
        self._loop = context.loop
        self._events: "list[tuple[str, list[tuple[str, bytes]]]]" = []
        self._answer: "Callable[[], None] | None" = None
        self._began_at = time.monotonic()
        self._cpu_before = _tree_seconds(context.pid)
        self._cpu_after: "float | None" = None
        self._timers = [
            self._loop.at(
                self._began_at + float(header["timeout"]),  # type: ignore[arg-type]
                self._expire,
            )
        ]
        self._before = artifacts.look(context.artifacts)
        environment = network.complete(header.get("environment") or {})  # type: ignore[arg-type]
        given = {name: part for name, part in parts.items() if not name.startswith("file:")}
        self.job = (
            _shell_job(self.number, environment, given)
            if context.language == "bash"
            else self._job(environment, given)
        )
        operation.when_stopped = self.give_up
        operation.when_data = self._answer_call
        if operation.streams:
            operation.when_room = self._pass_on

    def _job(self, environment: "dict[str, str]", parts: "dict[str, bytes]") -> "list[bytes]":
        header: "dict[str, object]" = {
            "type": "cell",
            "number": self.number,
            "result_bytes": self.limits["result_bytes"],
            "rich_output_bytes": self.limits["rich_output_bytes"],
            "environment": environment,
        }
        if self.tools:
            header["tools"], header["call_bytes"] = self.tools, CALL_BYTES
        return wire.chunks(header, list(parts.items()))

    def attach(self, stdout: int, stderr: int) -> None:
        """Take what comes from these pipes from now on."""
        bound, take = self.limits["output_bytes"], self._take if self.operation.streams else None
        self.stdout = Capture(stdout, bound, STDOUT, self.order, take)
        self.stderr = Capture(stderr, bound, STDERR, self.order, take)

    @property
    def is_over(self) -> bool:
        return self.code is not None or self.out_of_memory

    @property
    def exit_code(self) -> "int | None":
        if self.timed_out or self.out_of_memory:
            return None
        return INTERRUPTED if self.interrupted else self.code

    @property
    def cpu_seconds(self) -> float:
        """Of the context and those it has waited for, as the kernel counts: 10 ms at a time."""
        after = self._cpu_after
        return 0.0 if after is None else max(0.0, after - self._cpu_before)

    def report(self, header: "dict[str, object]", parts: "dict[str, bytes]") -> bool:
        """Take in what the context says. Whether that was the end of the run.

        What bears another run's number is of a thread or a fork that has outlived it.
        """
        if header.get("number") != self.number:
            return False
        kind = header.get("type")
        if kind in ("output", "call"):
            # Its text up to here stands in the pipes, and comes first.
            self.stdout.read()
            self.stderr.read()
        if kind == "began" and not self.began:
            self.began = True
            if self.interrupted or self.timed_out:
                self._context.signal()
        elif kind == "output":
            if self.outputs.add(parts, header) and self.operation.streams:
                self._events.append(("output", list(parts.items())))
                self._pass_on()
        elif kind == "call":
            self._call(header, parts)
        elif kind == "advice":
            if self._context.advised and self.remarks is None:
                self.remarks, self.remarks_dropped = advice.checked(header.get("remarks"))
            else:
                self.remarks_dropped += 1
        elif kind == "done":
            code = header.get("exit_code")
            self.code = code & 0xFF if type(code) is int else 1
            self.done_parts = parts
            return True
        return False

    def _call(self, header: "dict[str, object]", parts: "dict[str, bytes]") -> None:
        """Pass a call of a tool on, or answer it here with why not."""
        call, name = header.get("call"), header.get("name")
        arguments = parts.get("arguments", b"")
        if type(call) is not int or not 0 < call < 2**53 or call in self._unanswered:
            # Nobody waits for an answer to it.
            self._refuse_call(None, "")
        elif not isinstance(name, str) or name not in self.tools:
            self._refuse_call(call, "it is not a tool of this run")
        elif len(arguments) > CALL_BYTES:
            self._refuse_call(call, f"its arguments are more than {CALL_BYTES} bytes")
        elif self._calls >= MOST_CALLS:
            self._refuse_call(call, f"a run can call tools at most {MOST_CALLS} times")
        elif len(self._unanswered) >= MOST_WAITING_CALLS:
            self._refuse_call(call, f"{MOST_WAITING_CALLS} calls already wait for their answers")
        else:
            self._calls += 1
            self._unanswered.add(call)
            said = [("call", str(call).encode()), ("name", name.encode()), ("arguments", arguments)]
            self._events.append(("call", said))
            self._pass_on()

    def _refuse_call(self, call: "int | None", reason: str) -> None:
        self._refused_calls += 1
        if self._refused_calls > MOST_REFUSED_CALLS:
            # Who goes on all the same may not even read what it is told.
            self._context.lose()
        elif call is not None:
            self._context.answer(call, wire.dumps({"error": reason}).encode())

    def _answer_call(self, parts: "dict[str, bytes] | None") -> None:
        for name, answer in (parts or {}).items():
            number = name.removeprefix("answer:")
            call = int(number) if number.isdigit() else 0
            if call in self._unanswered and len(answer) <= CALL_ANSWER_BYTES:
                self._unanswered.remove(call)
                self._context.answer(call, answer)

    def interrupt(self) -> None:
        """Have it stop. What has not a moment later loses its context."""
        if not self.interrupted and not self.timed_out:
            self.interrupted = True
            self._stop()

    def give_up(self) -> None:
        """The same, of a run that nobody waits for any more."""
        self.is_given_up = True
        self.interrupt()

    def refuse(self, reason: str, field: str) -> None:
        """It cannot begin."""
        self.operation.failed(reason, field)

    def _expire(self) -> None:
        self.timed_out = True
        if not self.interrupted:
            self._stop()

    def _stop(self) -> None:
        self._timers.append(self._loop.at(time.monotonic() + STOP_SECONDS, self._context.lose))
        if self.began:
            self._context.signal()

    def cancel_timers(self) -> None:
        """From now on no deadline of it ends what runs in its context."""
        for timer in self._timers:
            self._loop.cancel(timer)

    def finish(self, *, context_kept: bool, cpu_seconds: "float | None" = None) -> None:
        """Answer the operation. Nothing more of the run is looked at."""
        seconds = time.monotonic() - self._began_at
        self.cancel_timers()
        self._cpu_after = _tree_seconds(self._context.pid) if cpu_seconds is None else cpu_seconds
        self.stdout.drain(PIPE_BYTES)
        self.stderr.drain(PIPE_BYTES)
        found = artifacts.collect_new(self._context.artifacts, self.limits, self._before)
        header, parts = outcome(self, seconds, *found)
        header["context_kept"] = context_kept
        header["sigsys"] = self.sigsys
        self._answer = lambda: self.operation.done(header, parts)
        self._pass_on()

    def _take(self, stream: int, data: bytes) -> None:
        name = "stdout" if stream == STDOUT else "stderr"
        for start in range(0, len(data), CHUNK_BYTES):
            self._events.append((name, [("data", data[start : start + CHUNK_BYTES])]))
        self._pass_on()

    def _pass_on(self) -> None:
        """Send what the host has room for. The answer comes after the last event."""
        while self._events and self.operation.room > 0:
            event, parts = self._events.pop(0)
            self.operation.emit_parts(event, {}, parts)
        if self._answer is not None and (not self._events or not self.operation.streams):
            self._answer()


def _shell_job(
    number: int, environment: "dict[str, str]", parts: "dict[str, bytes]"
) -> "list[bytes]":
    """The job as bash_context.sh reads it: a line, the code, the arguments, the environment."""
    code, arguments = parts["code"], parts.get("arguments")
    given = "-" if arguments is None else str(len(arguments))
    line = f"{number} {len(code)} {given} {len(environment)} /tmp/.context-{number}\n"
    pairs = [os.fsencode(f"{name}={value}\0") for name, value in environment.items()]
    return [line.encode(), code, arguments or b"", *pairs]


def _tree_seconds(pid: int) -> float:
    """Processor time of a process and of those it has waited for; 0 where it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            fields = stat.read().rpartition(b")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / _TICKS
