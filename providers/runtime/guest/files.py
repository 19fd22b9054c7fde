"""The files of a kept sandbox, as a room of its loop: hands each operation to a worker process."""

import _socket  # what `socket` wraps, which is slow to import
import os
import select
import time

from . import protocol, wire
from .files_worker import STEPS, be_worker
from .kept import Refused
from .processes import read_small

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable

    from .kept import Handler, Header, Loop, Operation, Parts

# How often a worker that has something to do is asked whether it is there, and how long it may take
# to say so on a busy machine. That a program has stopped it, as a process of its user, is seen.
ASK_SECONDS, ANSWER_SECONDS = 1.0, 20.0
# How soon it is looked whether the host has read what it was sent.
_FULL_SECONDS = 0.02


class Files:
    """Lends operations to the worker, and answers for it when it does not."""

    def __init__(self, loop: "Loop", template: "dict[str, object]") -> None:
        self._loop = loop
        self._template = template
        self._worker: "_Link | None" = None

    def operations(self) -> "dict[str, Handler]":
        return dict.fromkeys(STEPS, self._begin)

    def busy(self) -> bool:
        """Never: what it may write is bounded, and a watch may go on for days."""
        return False

    def running(self) -> "list[tuple[int, Callable[[], None]]]":
        """None: a worker holds little, and what it writes counts as files."""
        return []

    def forget(self) -> None:
        """The worker was killed with everything else."""
        if self._worker is not None:
            self._worker.has_ended = True
            self._worker.fail("The sandbox was reset.")

    def _begin(self, operation: "Operation", header: "Header", parts: "Parts") -> None:
        if self._worker is None:
            self._worker = _Link(self._loop, self._template, self._lost)
        self._worker.begin(operation, header, parts)

    def _lost(self, link: "_Link") -> None:
        if self._worker is link:
            self._worker = None
            # What it was writing may still be there.
            self._template = {**self._template, "sweeps": True}


class _Link:
    """A worker, and the operations that it carries out. Raises Refused when there can be none."""

    def __init__(
        self, loop: "Loop", template: "dict[str, object]", lost: "Callable[[_Link], None]"
    ) -> None:
        self._loop, self._lost = loop, lost
        self._operations: "dict[int, Operation]" = {}
        self._untaken: "dict[int, int]" = {}
        self._parser = wire.Parser(protocol.CHUNK_BYTES)
        self._queue: "list[memoryview]" = []
        self._timer: "int | None" = None
        self._asked = self._heard = 0.0
        self.has_ended = self._is_closed = False
        try:
            self._socket, other = _socket.socketpair()
            try:
                self.pid = os.fork()
                if self.pid == 0:
                    be_worker(template, other)
            except OSError:
                self._socket.close()
                raise
            finally:
                other.close()
        except OSError as error:
            raise Refused(
                f"No process could be started for it: {error}.", None, "exhausted"
            ) from None
        loop.on_end(self.pid, self._ended)
        self._socket.setblocking(False)
        self._fd = self._socket.fileno()
        loop.watch(self._fd, select.POLLIN, self._ready)
        if template.get("sweeps"):
            self._send({"op": "sweep"})

    def _ended(self, code: int, usage: object) -> None:
        # Its end of the socket tells the rest. From now on the number may be another process's.
        self.has_ended = True

    def begin(self, operation: "Operation", header: "Header", parts: "Parts") -> None:
        number = operation.number
        self._operations[number] = operation
        self._untaken[number] = 0
        operation.when_stopped = lambda: self._stop(number)
        operation.when_data = lambda parts: self._data(number, parts)
        operation.when_credit = lambda amount: self._send(
            {"id": number, "op": "credit", "bytes": amount}
        )
        self._send({**header, "id": number}, list(parts.items()))

    def _stop(self, number: int) -> None:
        """At once: whoever stops something need not wait for the worker."""
        self._drop(number).done()

    def _drop(self, number: int) -> "Operation":
        operation = self._operations.pop(number)
        del self._untaken[number]
        self._send({"id": number, "op": "stop"})
        return operation

    def _data(self, number: int, parts: "Parts | None") -> None:
        if parts is None:
            self._send({"id": number, "op": "end"})
            return
        data = parts.get("data", b"")
        self._untaken[number] += 1
        if len(data) > protocol.CHUNK_BYTES or self._untaken[number] > protocol.AHEAD:
            operation = self._drop(number)
            operation.failed("More data was sent than this operation can take.", "data")
            return
        self._send({"id": number, "op": "data"}, [("data", data)])

    def _send(self, header: "Header", parts: "list[tuple[str, bytes]] | None" = None) -> None:
        self._queue += map(memoryview, wire.chunks(header, parts or []))
        self._write()
        self._keep_asking()

    def _write(self) -> None:
        try:
            while self._queue:
                count = self._socket.send(self._queue[0])
                self._queue[0] = self._queue[0][count:]
                if not self._queue[0]:
                    del self._queue[0]
        except BlockingIOError:
            self._loop.watch(self._fd, select.POLLIN | select.POLLOUT, self._ready)
            return
        except OSError:
            # Its end is seen where it is read from.
            self._queue.clear()
        self._loop.watch(self._fd, select.POLLIN, self._ready)

    def _ready(self, events: int) -> None:
        if events & select.POLLOUT:
            self._write()
        if not events & (select.POLLIN | select.POLLHUP | select.POLLERR):
            return
        if self._loop.is_full:
            self._loop.unwatch(self._fd)
            self._loop.at(time.monotonic() + _FULL_SECONDS, self._go_on)
            return
        try:
            data = self._socket.recv(1 << 18)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.fail("The process that works on files was ended.")
            return
        self._heard = time.monotonic()
        try:
            for header, parts in self._parser.feed(data):
                self._take(header, parts)
        except wire.FrameError:
            self.fail("The process that works on files broke the protocol.")

    def _go_on(self) -> None:
        """The host may have read: look again at what the worker says."""
        self._heard = time.monotonic()
        if not self._is_closed:
            self._write()

    def _take(self, header: "Header", parts: "Parts") -> None:
        number, event = header.pop("id", None), header.pop("event", None)
        header.pop("parts", None)
        operation = self._operations.get(number) if type(number) is int else None
        if operation is None or type(number) is not int:
            return
        if event in ("done", "failed"):
            del self._operations[number], self._untaken[number]
            if event == "done":
                operation.done(header)
            else:
                field: "str | None" = header.get("field")  # type: ignore[assignment]
                operation.failed(str(header.get("reason")), field, str(header.get("code")))
        else:
            if event == "taken":
                self._untaken[number] -= 1
            operation.emit_parts(str(event), header, list(parts.items()))

    def _keep_asking(self) -> None:
        """While something is under way: is it there?"""
        if self._timer is None:
            self._timer = self._loop.at(time.monotonic() + ASK_SECONDS, self._ask)

    def _ask(self) -> None:
        self._timer = None
        if not self._operations:
            return
        now = time.monotonic()
        if self._is_stopped():
            self.fail("The process that works on files was stopped.")
            return
        if self._heard >= self._asked:
            self._asked = now
            self._queue += map(memoryview, wire.chunks({"op": "ping"}, []))
            self._write()
        elif now - self._asked > ANSWER_SECONDS:
            self.fail("The process that works on files did not answer in time.")
            return
        self._keep_asking()

    def _is_stopped(self) -> bool:
        try:
            state = read_small(f"/proc/{self.pid}/stat").rpartition(b")")[2].split()[0]
        except OSError:
            return False
        return state in (b"T", b"t")

    def fail(self, reason: str) -> None:
        """End the worker, and what it had to do. The next operation has another."""
        self.close()
        self._lost(self)
        for operation in self._operations.values():
            operation.failed(reason)

    def close(self) -> None:
        """End it; it is waited for by the loop."""
        self._is_closed = True
        if self._timer is not None:
            self._loop.cancel(self._timer)
        self._loop.unwatch(self._fd)
        self._socket.close()
        if not self.has_ended:
            os.kill(self.pid, 9)
