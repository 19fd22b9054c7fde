"""Makes a warm sandbox one that stays: its rooms, and the loop they share.

The loop of a kept sandbox that outlives the process it is kept by (see `protocol`).

Its channel can lose its host in the middle of a frame, and another host finds it. That one says the
marker, which nobody but the supervisor has been told: all that came before it is dropped.
"""

import os
import time

from . import wire
from .commands import Commands
from .context import ContextRoom
from .files import Files
from .kept import Loop, Operation, Refused
from .memory import Memory
from .network_connections import NetworkConnections
from .process_tree import Child
from .root import HOME
from .scrub import PLACES

TYPE_CHECKING = False  # as in typing, which is too dear to import here
if TYPE_CHECKING:
    from typing import Callable, NoReturn

    from .kept import Handler, Header, Parts, Room


def keep(
    template: "dict[str, object]",
    child: Child,
    header: "Header",
    wakeup: int,
    channel_in: int,
    channel_out: int,
) -> "NoReturn":
    """Carry out what the host says until it has gone. `header` is that of `keep`."""
    lasting: "dict[str, object] | None" = header.get("lasting")  # type: ignore[assignment]
    if lasting is None:
        loop = Loop(channel_in, channel_out, wakeup)
    else:
        # Only here: most end with their channel.

        loop = LastingLoop(channel_in, channel_out, wakeup, lasting)
    template = {**template, "home": _enter_home(header)}
    # Elsewhere than in process 1 of a namespace these places are the machine's.
    places = [os.getcwd(), *PLACES] if os.getpid() == 1 else []
    memory = Memory(places) if template["watch_memory"] else None
    contexts = ContextRoom(loop, template, header, child)
    contexts.when_ready(Operation(loop, int(header["id"]), "keep", None))  # type: ignore[call-overload]
    environment = contexts.environment
    rooms: "list[Room]" = [
        contexts,
        Commands(loop, template, environment),
        Files(loop, template),
        _NetworkRoom(loop),
    ]
    loop.serve(rooms, memory, int(header["memory_bytes"]))  # type: ignore[call-overload]


class _NetworkRoom:
    """The network, where its connections go to the host as the data of an operation."""

    def __init__(self, loop: Loop) -> None:
        self._connections = NetworkConnections(loop)

    def operations(self) -> "dict[str, Handler]":
        return {"network": self._open}

    def busy(self) -> bool:
        return False

    def running(self) -> "list[tuple[int, Callable[[], None]]]":
        return []

    def forget(self) -> None:
        """The programs are gone, and the host hears so by the end of each connection."""

    def _open(self, operation: Operation, header: "Header", parts: "Parts") -> None:
        if self._connections.is_open:
            raise Refused("the network is open")
        self._connections.open(operation)  # type: ignore[arg-type]  # its events may have a header


def _enter_home(header: "Header") -> str:
    """Be in the workspace by its other name, where programs are to have that for their HOME. The
    name; "" where they are not, or it is none here."""
    environment: "dict[str, str]" = header.get("environment") or {}  # type: ignore[assignment]
    try:
        if environment.get("HOME") != HOME or not os.path.samefile(HOME, "."):
            return ""
        os.chdir(HOME)
    except OSError:
        return ""
    os.environ["PWD"] = HOME
    return HOME


# More than any operation can use: what nobody is sent needs no room.
_ROOM = 1 << 50


class LastingLoop(Loop):
    """Ends by itself when no host has said for too long that it is to live on."""

    def __init__(
        self, channel_in: int, channel_out: int, wakeup: int, lasting: "dict[str, object]"
    ) -> None:
        """`lasting` is what `keep` says of it: `marker` in hexadecimal digits, and `seconds`."""
        super().__init__(channel_in, channel_out, wakeup)
        self._marker = bytes.fromhex(str(lasting["marker"]))
        self._last = b""
        self._is_deaf = self._is_found = False
        self._abandoned: "set[int]" = set()
        self._stopping: "set[int]" = set()
        self._resuming: "tuple[Operation, Header] | None" = None
        self._end = -1
        self._live_for(lasting["seconds"])

    def _live_for(self, seconds: object) -> None:
        if type(seconds) not in (int, float):
            raise wire.FrameError("an invalid lease")
        self.cancel(self._end)
        self._end = self.at(time.monotonic() + seconds, self._host_has_gone)  # type: ignore[operator]

    def _read(self) -> None:
        try:
            data = os.read(self._in, 1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._host_has_gone()
        # What is read may hold but the end of a marker.
        seen = self._last + data
        _, marker, after = seen.rpartition(self._marker)
        if marker:
            data = after
            self._drop_everything()
        self._last = (after if marker else seen)[1 - len(self._marker) :]
        if self._is_deaf:
            return
        try:
            for header, parts in self._parser.feed(data):
                self._take(header, parts)
        except wire.FrameError:
            # It can be the rest of what a host was saying when it ended. The next one says the
            # marker; where there is none, time ends this.
            self._is_deaf = True

    def _drop_everything(self) -> None:
        """Forget what was said, what was to be said, and who asked for it."""
        self._parser = wire.Parser(wire.REQUEST_LIMIT)
        self._is_deaf, self._is_found = False, True
        self._queue.clear()
        self._queued = 0
        self._resuming = None
        for number, operation in list(self._operations.items()):
            self._abandoned.add(number)
            if operation.name == "run":
                self._stopping.add(number)
            self._carry_out(operation, lambda one=operation: one.give(_ROOM))  # type: ignore[misc]
            if operation.when_stopped is not None:
                self._carry_out(operation, operation.when_stopped)

    def send(self, header: "Header", parts: "list[tuple[str, bytes]]") -> None:
        if header.get("id") not in self._abandoned:
            super().send(header, parts)

    def forget(self, number: int) -> None:
        super().forget(number)
        self._abandoned.discard(number)
        self._stopping.discard(number)
        self._tell_when_stopped()

    def _take(self, header: "Header", parts: "Parts") -> None:
        name = header.get("op")
        if name == "lease":
            self._live_for(header.get("seconds"))
        elif name == "resume":
            self._resume(header)
        else:
            super()._take(header, parts)

    def _resume(self, header: "Header") -> None:
        number, echo = header.get("id"), header.get("echo")
        if not self._is_found or type(number) is not int or not isinstance(echo, str):
            raise wire.FrameError("no service has reconnected")
        self._is_found = False
        self._live_for(header.get("seconds"))
        said = memoryview(bytes.fromhex(echo))
        self._queue.append(said)
        self._queued += len(said)
        self._write()
        operation = Operation(self, number, "resume", None)
        self._operations[number] = operation
        self._resuming = operation, header
        self._tell_when_stopped()

    def _tell_when_stopped(self) -> None:
        """The new host is answered when no context runs what the former one had asked for."""
        if self._resuming is None or self._stopping:
            return
        operation, header = self._resuming
        self._resuming = None
        self.soon(lambda: self._handlers["context.list"](operation, header, {}))
