"""The network of a single run whose launcher hands over no descriptors: frames of its channel."""

import os

from . import wire
from .network_connections import NetworkConnections
from .protocol import CHUNK_BYTES

TYPE_CHECKING = False  # as in typing, which is too dear to import here
if TYPE_CHECKING:
    import select
    from typing import Callable

    Parts = dict[str, bytes]
    from .stream import Stream


class RunNetwork:
    """For the connections both the loop and the operation, in the loop of one run.

    Frames of the host have the `op` network and a part `data`, those to the host the `event`
    network and the same.
    """

    def __init__(self, poll: "select.poll", stream: "Stream") -> None:
        """Raises OSError."""
        self.when_room: "Callable[[], None] | None" = None
        self.when_stopped: "Callable[[], None] | None" = None
        self.when_data: "Callable[[Parts | None], None] | None" = None
        self._poll = poll
        self._stream = stream
        self._watched: "dict[int, Callable[[int], None]]" = {}
        self._parser = wire.Parser(wire.REQUEST_LIMIT)
        NetworkConnections(self).open(self)

    def serves(self, fd: int) -> bool:
        """Whether a descriptor is one of a program's connections, or of their listener."""
        return fd in self._watched

    def serve(self, fd: int, events: int) -> None:
        self._watched[fd](events)

    def hear(self, channel: int) -> bool:
        """Read what the host says. False where it has gone, or does not keep to the protocol."""
        data = os.read(channel, 1 << 16)
        try:
            for header, parts in self._parser.feed(data):
                if header.get("op") != "network":
                    return False
                if self.when_data is not None:
                    self.when_data(parts)
        except wire.FrameError:
            return False
        return bool(data)

    def go_on(self) -> None:
        """The host has read what was written so far."""
        if self.when_room is not None and not self._stream.waits:
            self.when_room()

    def close(self) -> None:
        """End every connection."""
        if self.when_stopped is not None:
            self.when_stopped()

    # The loop.

    def watch(self, fd: int, events: int, ready: "Callable[[int], None]") -> None:
        self._poll.register(fd, events)
        self._watched[fd] = ready

    def unwatch(self, fd: int) -> None:
        if self._watched.pop(fd, None) is not None:
            self._poll.unregister(fd)

    # The operation.

    @property
    def room(self) -> int:
        return 0 if self._stream.waits else CHUNK_BYTES

    def emit(self, event: str, **parts: bytes) -> None:
        if parts:
            self._stream.put({"event": "network"}, list(parts.items()))

    def done(self) -> None:
        self.when_room = self.when_stopped = self.when_data = None
