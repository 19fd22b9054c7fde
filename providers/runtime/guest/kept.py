"""A sandbox that stays: the loop between the host and the rooms that carry out operations.

A room is an object that knows some operations of `protocol`: contexts, processes, files. It never
waits. What it waits for it registers here, and everything happens in this one thread:

    operations()   names of operations -> handler(operation, header, parts)
    busy()         whether anything runs that somebody asked for: then memory is looked at often
    running()      (pid, end) of the trees that may have to end because memory is used up
    forget()       every process was killed: end what is under way, and be as at the start

A handler raises Refused for what it will not do, or answers later by `done` or `failed`.
"""

import os
import select
import time

from . import protocol, trees, wire
from .memory import Memory, disk_in_use
from .processes import kill_others
from .request import MEMORY_CHECK_SECONDS

TYPE_CHECKING = False  # as in typing, which is too dear to import here
if TYPE_CHECKING:
    import resource
    from collections.abc import Iterable
    from typing import Callable, NoReturn, Protocol

    Parts = dict[str, bytes]
    Header = dict[str, object]
    Handler = Callable[["Operation", Header, Parts], None]
    Ended = Callable[[int, "resource.struct_rusage"], None]

    class Room(Protocol):
        def operations(self) -> "dict[str, Handler]": ...
        def busy(self) -> bool: ...
        def running(self) -> "list[tuple[int, Callable[[], None]]]": ...
        def forget(self) -> None: ...


# How often memory is looked at where nothing runs but what a program has left behind.
IDLE_LOOK_SECONDS = 2.0
# What may wait for the host to read it before streams have to wait, too.
QUEUE_BYTES = 1024 * 1024


class Refused(Exception):
    """What the host asked for is not done. `code` is `refused`, `missing` or `exhausted`."""

    def __init__(self, reason: str, field: "str | None" = None, code: str = "refused") -> None:
        super().__init__(reason)
        self.reason = reason
        self.field = field
        self.code = code


class Operation:
    """One operation of the host, until it is `done` or `failed`.

    A handler that streams looks at `room` before it takes more from its source, and is called by
    `when_room` once there is some again. `when_stopped` has it end early, and it still says `done`.
    `when_data` is given the parts of a `data` frame of the host, None for its `end`; `when_credit`
    what the host has read, for whoever counts elsewhere.
    """

    def __init__(self, loop: "Loop", number: int, name: str, credit: "int | None") -> None:
        self.number = number
        self.name = name
        self.is_over = False
        self.when_room: "Callable[[], None] | None" = None
        self.when_stopped: "Callable[[], None] | None" = None
        self.when_data: "Callable[[Parts | None], None] | None" = None
        self.when_credit: "Callable[[int], None] | None" = None
        self._loop = loop
        self._seq = 0
        self._credit = credit

    @property
    def streams(self) -> bool:
        """Whether the host takes events of it."""
        return self._credit is not None

    @property
    def room(self) -> int:
        """Bytes that one event may hold now; 0 or less while the host has to read first."""
        if self._loop.is_full or self._credit is None:
            return 0
        return min(self._credit - protocol.EVENT_COST, protocol.CHUNK_BYTES)

    def emit(self, event: str, header: "Header | None" = None, **parts: bytes) -> None:
        """Send one event of a stream. It takes its parts and EVENT_COST from the credit."""
        self.emit_parts(event, header or {}, list(parts.items()))

    def emit_parts(self, event: str, header: "Header", parts: "list[tuple[str, bytes]]") -> None:
        """The same with parts of any names."""
        if self._credit is not None:
            self._credit -= protocol.EVENT_COST + sum(len(content) for _, content in parts)
        self._send(event, header, parts)

    def give(self, amount: int) -> None:
        """The host has read so many bytes more."""
        if self._credit is not None:
            self._credit += amount
            if self.when_credit is not None and amount:
                self.when_credit(amount)
            if self.when_room is not None and self.room > 0:
                self.when_room()

    def done(
        self, header: "Header | None" = None, parts: "Iterable[tuple[str, bytes]]" = ()
    ) -> None:
        """The operation is over, and this is what came of it."""
        self._finish("done", header or {}, list(parts))

    def failed(self, reason: str, field: "str | None" = None, code: str = "refused") -> None:
        """The operation is over, and was not done. `field` names what of it is at fault."""
        header: "Header" = {"reason": reason[:2000], "code": code}
        if field is not None:
            header["field"] = field
        self._finish("failed", header, [])

    def _finish(self, event: str, header: "Header", parts: "list[tuple[str, bytes]]") -> None:
        if self.is_over:
            return
        self._send(event, header, parts)
        self.is_over = True
        self.when_room = self.when_stopped = self.when_data = self.when_credit = None
        self._loop.forget(self.number)

    def _send(self, event: str, header: "Header", parts: "list[tuple[str, bytes]]") -> None:
        if self.is_over:
            return
        known: "Header" = {"id": self.number, "seq": self._seq, "event": event}
        self._seq += 1
        self._loop.send({**header, **known}, parts)


class Loop:
    """Waits for the host, for descriptors, for times and for the end of processes."""

    def __init__(self, channel_in: int, channel_out: int, wakeup: int) -> None:
        self.rooms: "list[Room]" = []
        self._in, self._wakeup = channel_in, wakeup
        # Of one descriptor a poll can only be told once what to look for.
        self._out = os.dup(channel_out)
        os.set_blocking(self._out, False)
        os.set_blocking(self._in, False)
        self._parser = wire.Parser(wire.REQUEST_LIMIT)
        self._poll = select.poll()
        self._poll.register(self._in, select.POLLIN)
        self._poll.register(wakeup, select.POLLIN)
        self._queue: "list[memoryview]" = []
        self._queued = 0
        self._waits_to_write = False
        self._watched: "dict[int, Callable[[int], None]]" = {}
        self._timers: "list[tuple[float, int, Callable[[], None]]]" = []
        self._timers_made = 0
        self._ends: "dict[int, Ended]" = {}
        self.ending_signal = 0
        self._handlers: "dict[str, Handler]" = {}
        self._operations: "dict[int, Operation]" = {}
        self._highest = -1
        self._soon: "list[Callable[[], None]]" = []

    @property
    def is_full(self) -> bool:
        """Whether the host has to read before more is taken from any stream."""
        return self._queued >= QUEUE_BYTES

    def watch(self, fd: int, events: int, ready: "Callable[[int], None]") -> None:
        """Call `ready` with the poll's events whenever `fd` has one. Replaces what was asked."""
        self._poll.register(fd, events)
        self._watched[fd] = ready

    def unwatch(self, fd: int) -> None:
        """No longer. To be called before `fd` is closed."""
        if self._watched.pop(fd, None) is not None:
            self._poll.unregister(fd)

    def at(self, when: float, what: "Callable[[], None]") -> int:
        """Call `what` at `when` by time.monotonic(). Returns what `cancel` takes."""
        self._timers_made += 1
        self._timers.append((when, self._timers_made, what))
        self._timers.sort(key=lambda timer: timer[:2])
        return self._timers_made

    def cancel(self, timer: int) -> None:
        """Not any more; nothing happens where it is over."""
        self._timers = [entry for entry in self._timers if entry[1] != timer]

    def soon(self, what: "Callable[[], None]") -> None:
        """Call `what` once, before the loop waits again."""
        self._soon.append(what)

    def on_end(self, pid: int, ended: "Ended") -> None:
        """Call `ended` with the exit code (128 + n for `ending_signal` n) and use of a child."""
        self._ends[pid] = ended

    def send(self, header: "Header", parts: "list[tuple[str, bytes]]") -> None:
        """Queue one frame for the host."""
        for chunk in wire.chunks(header, parts):
            if chunk:
                self._queue.append(memoryview(chunk))
                self._queued += len(chunk)
        self._write()

    def forget(self, number: int) -> None:
        """An operation is over."""
        self._operations.pop(number, None)

    def serve(self, rooms: "list[Room]", memory: "Memory | None", limit: int) -> "NoReturn":
        """Carry out what the host says until it has gone. `limit` is bytes of memory."""
        self.rooms = rooms
        self._handlers["memory"] = lambda operation, header, parts: operation.done(
            {"bytes": None if memory is None else memory.in_use(limit), **disk_in_use()}
        )
        for room in rooms:
            self._handlers.update(room.operations())
        self._handlers["reset"] = self._reset
        try:
            self._go_on(memory, limit)
        finally:
            # Whatever in here does not know what to do: nothing goes on without it.
            self._host_has_gone()

    def _go_on(self, memory: "Memory | None", limit: int) -> "NoReturn":
        looked = 0.0
        while True:
            while self._soon:
                self._soon.pop(0)()
            now = time.monotonic()
            while self._timers and self._timers[0][0] <= now:
                self._timers.pop(0)[2]()
            if self._soon:
                continue
            wait = self._timers[0][0] - now if self._timers else None
            if memory is not None:
                busy = any(room.busy() for room in self.rooms)
                pause = MEMORY_CHECK_SECONDS if busy else IDLE_LOOK_SECONDS
                if now >= looked + pause:
                    looked = now
                    self._look_at_memory(memory, limit)
                wait = pause if wait is None else min(wait, pause)
            for fd, events in self._poll.poll(None if wait is None else wait * 1000 + 1):
                self._dispatch(fd, events)

    def _dispatch(self, fd: int, events: int) -> None:
        if fd == self._in:
            self._read()
        elif fd == self._out:
            self._write()
        elif fd == self._wakeup:
            os.read(fd, 4096)
            self.reap()
        elif fd in self._watched:
            self._watched[fd](events)

    def reap(self) -> None:
        """Collect what has ended. What a program leaves behind becomes our child."""
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            ended = self._ends.pop(pid, None)
            if ended is not None:
                code = os.waitstatus_to_exitcode(status)
                self.ending_signal = max(0, -code)
                ended(code if code >= 0 else 128 - code, usage)

    def kill_everything(self) -> None:
        """End every process of the sandbox but this one, and wait until they are gone."""
        self._ends.clear()
        while kill_others():
            try:
                os.wait4(-1, 0)
            except ChildProcessError:
                return

    def _look_at_memory(self, memory: Memory, limit: int) -> None:
        """Where there is too much, end the largest tree of what runs."""
        if memory.in_use(limit) <= limit:
            return
        candidates = [one for room in self.rooms for one in room.running()]
        if candidates:
            max(candidates, key=lambda one: trees.resident_bytes(one[0]))[1]()

    def _read(self) -> None:
        try:
            data = os.read(self._in, 1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._host_has_gone()
        try:
            for header, parts in self._parser.feed(data):
                self._take(header, parts)
        except wire.FrameError:
            # Who cannot be understood cannot be answered.
            self._host_has_gone()

    def _host_has_gone(self) -> "NoReturn":
        """The kernel ends everything else when process 1 ends; elsewhere it is for us to do."""
        self.kill_everything()
        os._exit(0)

    def _take(self, header: "Header", parts: "Parts") -> None:
        name, number, target = header.get("op"), header.get("id"), header.get("target")
        if name == "close":
            self._host_has_gone()
        if name in ("credit", "stop", "data", "end"):
            if type(target) is not int:
                raise wire.FrameError(f"{name} without a target")
            # What it is for may have ended meanwhile.
            operation = self._operations.get(target)
            if operation is not None:
                self._take_further(operation, name, header, parts)
            return
        if not isinstance(name, str) or type(number) is not int:
            raise wire.FrameError("an operation without a name or an id")
        if number in self._operations:
            raise wire.FrameError("an id that is in use")
        credit = header.get("credit")
        if credit is not None and (type(credit) is not int or credit < 0):
            raise wire.FrameError("an invalid credit")
        operation = Operation(self, number, name, credit)
        handler = self._handlers.get(name)
        if handler is None:
            operation.failed(f"there is no operation {name!r}", "op")
        elif len(self._operations) >= protocol.MOST_OPERATIONS:
            operation.failed("too many operations run in this sandbox", code="exhausted")
        else:
            self._operations[number] = operation
            self._carry_out(operation, lambda: handler(operation, header, parts))

    def _take_further(
        self, operation: Operation, name: object, header: "Header", parts: "Parts"
    ) -> None:
        if name == "credit":
            amount = header.get("bytes")
            if type(amount) is not int or amount < 0:
                raise wire.FrameError("an invalid credit")
            self._carry_out(operation, lambda: operation.give(amount))
        elif name == "stop":
            if operation.when_stopped is not None:
                self._carry_out(operation, operation.when_stopped)
        elif operation.when_data is not None:
            take = operation.when_data
            self._carry_out(operation, lambda: take(parts if name == "data" else None))

    def _carry_out(self, operation: Operation, step: "Callable[[], None]") -> None:
        """One step of an operation. What is not to be done, or has not worked, is its failure."""
        try:
            step()
        except Refused as refused:
            operation.failed(refused.reason, refused.field, refused.code)
        except (OSError, MemoryError) as error:
            code = "exhausted" if wire.is_exhaustion(error) else "refused"
            operation.failed(f"{type(error).__name__}: {error}", code=code)

    def _reset(self, operation: Operation, header: "Header", parts: "Parts") -> None:
        self.kill_everything()
        for room in self.rooms:
            room.forget()
        for other in list(self._operations.values()):
            if other is not operation:
                other.failed("the sandbox was reset")
        self._handlers["context.list"](operation, header, parts)

    def _write(self) -> None:
        """Write what the host has room for; the rest when it has more."""
        was_full = self.is_full
        try:
            while self._queue:
                count = os.write(self._out, self._queue[0])
                self._queued -= count
                self._queue[0] = self._queue[0][count:]
                if not self._queue[0]:
                    del self._queue[0]
        except BlockingIOError:
            is_left = True
        except OSError:
            self._host_has_gone()
        else:
            is_left = False
        if is_left != self._waits_to_write:
            self._waits_to_write = is_left
            if is_left:
                self._poll.register(self._out, select.POLLOUT)
            else:
                self._poll.unregister(self._out)
        if was_full and not self.is_full:
            for operation in list(self._operations.values()):
                if operation.when_room is not None:
                    self.soon(lambda one=operation: one.give(0))  # type: ignore[misc]
