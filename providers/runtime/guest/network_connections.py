"""The network where no descriptor can be handed to the host: connections go there as lanes.

Programs connect to `network.ADDRESS`. Each connection is a lane (lanes.py), and the bytes of all
lanes are the `data` of one operation, in both directions. Nothing here reads what passes: what a
program may reach is for the host to decide.
"""

import select
import socket

from . import lanes
from .network import ADDRESS

TYPE_CHECKING = False  # as in typing, which is too dear to import here
if TYPE_CHECKING:
    from typing import Callable, Protocol

    Parts = dict[str, bytes]


# More connections wait until one of these has ended: descriptors are needed for other work too.
MOST_CONNECTIONS = 64


if TYPE_CHECKING:

    class Watch(Protocol):
        """Of a loop what is used here."""

        def watch(self, fd: int, events: int, ready: "Callable[[int], None]") -> None: ...
        def unwatch(self, fd: int) -> None: ...

    class Carrier(Protocol):
        """Of an operation what is used here."""

        when_room: "Callable[[], None] | None"
        when_stopped: "Callable[[], None] | None"
        when_data: "Callable[[Parts | None], None] | None"

        @property
        def room(self) -> int: ...
        def emit(self, event: str, **parts: bytes) -> None: ...
        def done(self) -> None: ...


class _Connection:
    """A program's connection, and what is under way in both directions."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self.end = end
        self.pending = bytearray()
        self.credit = lanes.WINDOW
        # What the host has sent and this side has not given credit for again.
        self.owed = 0
        self.has_ended_here = self.has_ended_there = False


class NetworkConnections:
    """Carries the connections of programs, from `open` until that is stopped."""

    def __init__(self, loop: "Watch") -> None:
        self._loop = loop
        self._operation: "Carrier | None" = None
        self._listener: "socket.socket | None" = None
        self._connections: "dict[int, _Connection]" = {}
        self._next = 1
        self._parser = lanes.Parser()
        self._out = bytearray()

    @property
    def is_open(self) -> bool:
        return self._operation is not None

    def open(self, operation: "Carrier") -> None:
        """Listen, and carry connections from now on. Raises OSError."""
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(ADDRESS)
            listener.listen(128)
            listener.setblocking(False)
        except OSError:
            listener.close()
            raise
        self._operation, self._listener = operation, listener
        self._parser = lanes.Parser()
        operation.when_data = self._take
        operation.when_stopped = self._close
        operation.when_room = self._go_on
        self._loop.watch(listener.fileno(), select.POLLIN, self._accept)
        operation.emit("ready")

    def _close(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            self._loop.unwatch(listener.fileno())
            listener.close()
        for number in list(self._connections):
            self._drop(number)
        operation, self._operation = self._operation, None
        self._out.clear()
        if operation is not None:
            operation.done()

    def _accept(self, events: int) -> None:
        if self._listener is None:
            return
        try:
            end, _ = self._listener.accept()
        except OSError:
            # It has gone, or descriptors are short for now.
            return
        number, self._next = self._next, self._next + 1
        self._connections[number] = _Connection(end)
        if len(self._connections) >= MOST_CONNECTIONS:
            self._loop.unwatch(self._listener.fileno())
        self._send(lanes.pack(number, lanes.START))
        self._watch(number)

    def _take(self, parts: "Parts | None") -> None:
        """Bytes of the host. What is not in order ends the network, not the sandbox."""
        if parts is None:
            self._close()
            return
        try:
            for number, kind, content in self._parser.feed(parts.get("data", b"")):
                connection = self._connections.get(number)
                # It may have ended, which the host has not heard yet.
                if connection is None:
                    continue
                if kind == lanes.DATA:
                    connection.owed += len(content)
                    connection.pending += content
                    self._feed(number)
                elif kind == lanes.CREDIT:
                    connection.credit += lanes.credit(content)
                    self._watch(number)
                elif kind == lanes.END:
                    connection.has_ended_there = True
                    self._feed(number)
        except lanes.LaneError:
            self._close()

    def _feed(self, number: int) -> None:
        """Give the program what its socket has room for, and the host credit for that."""
        connection = self._connections[number]
        try:
            while connection.pending:
                del connection.pending[: connection.end.send(connection.pending)]
        except BlockingIOError:
            pass
        except OSError:
            connection.pending.clear()
        given = connection.owed - len(connection.pending)
        if given and (given >= lanes.WINDOW // 2 or not connection.pending):
            connection.owed -= given
            self._send(lanes.pack_credit(number, given))
        if connection.has_ended_there and not connection.pending:
            self._drop(number)
            return
        self._watch(number)

    def _serve(self, number: int, events: int) -> None:
        if events & select.POLLOUT:
            self._feed(number)
        connection = self._connections.get(number)
        if connection is None or not events & (select.POLLIN | select.POLLHUP | select.POLLERR):
            return
        size = min(lanes.CHUNK, connection.credit, self._room - lanes.HEAD.size)
        if size <= 0:
            self._watch(number)
            return
        try:
            data = connection.end.recv(size)
        except BlockingIOError:
            return
        except OSError:
            self._end(number)
            return
        if data:
            connection.credit -= len(data)
            self._send(lanes.pack(number, lanes.DATA, data))
            self._watch(number)
        else:
            self._end(number)

    def _end(self, number: int) -> None:
        """The program sends no more. The connection goes when the host says so, too."""
        connection = self._connections[number]
        connection.has_ended_here = True
        self._send(lanes.pack(number, lanes.END))
        self._watch(number)

    def _drop(self, number: int) -> None:
        connection = self._connections.pop(number)
        self._loop.unwatch(connection.end.fileno())
        connection.end.close()
        if self._listener is not None:
            self._loop.watch(self._listener.fileno(), select.POLLIN, self._accept)

    def _watch(self, number: int) -> None:
        """Look only for what can be passed on."""
        connection = self._connections[number]
        fd, wanted = connection.end.fileno(), 0
        if connection.credit and not connection.has_ended_here and self._room > lanes.HEAD.size:
            wanted |= select.POLLIN
        if connection.pending:
            wanted |= select.POLLOUT
        if wanted:
            self._loop.watch(fd, wanted, lambda events: self._serve(number, events))
        else:
            # Asked for nothing, a socket whose other end has closed would still say so, for ever.
            self._loop.unwatch(fd)

    @property
    def _room(self) -> int:
        """Bytes that can be sent now: none before what waits."""
        if self._operation is None or self._out:
            return 0
        return self._operation.room

    def _send(self, message: bytes) -> None:
        self._out += message
        self._flush()

    def _flush(self) -> None:
        operation = self._operation
        while self._out and operation is not None and operation.room > 0:
            piece = bytes(self._out[: operation.room])
            del self._out[: len(piece)]
            operation.emit("data", data=piece)

    def _go_on(self) -> None:
        """The host has read: send what waits, then look at the programs again."""
        self._flush()
        if not self._out:
            for number in list(self._connections):
                self._watch(number)
