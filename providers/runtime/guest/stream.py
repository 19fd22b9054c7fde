"""The events of a single run that is asked to say what it puts out while it runs."""

import os

from . import wire
from .capture import STDOUT
from .protocol import CHUNK_BYTES


class Stream:
    """What its host has not read yet waits here, as much as the limits of its output allow."""

    def __init__(self, channel: int, request_id: object) -> None:
        # Of one descriptor a poll can only be told once what to look for.
        self.fd = os.dup(channel)
        os.set_blocking(self.fd, False)
        self._id = request_id
        self._seq = 0
        self._queue: "list[memoryview]" = []

    def take(self, stream: int, data: bytes) -> None:
        """What was read of stdout or stderr."""
        for start in range(0, len(data), CHUNK_BYTES):
            part = data[start : start + CHUNK_BYTES]
            self.send("stdout" if stream == STDOUT else "stderr", [("data", part)])

    def send(self, event: str, parts: "list[tuple[str, bytes]]") -> None:
        header: "dict[str, object]" = {"id": self._id, "seq": self._seq, "event": event}
        self._seq += 1
        self.put(header, parts)

    def put(self, header: "dict[str, object]", parts: "list[tuple[str, bytes]]") -> None:
        """Queue a frame that is not counted."""
        self._queue += [memoryview(chunk) for chunk in wire.chunks(header, parts) if chunk]
        self.write()

    @property
    def waits(self) -> bool:
        """Whether the host has to read before the rest can be written."""
        return bool(self._queue)

    def write(self) -> None:
        """Write what the host has room for."""
        try:
            while self._queue:
                self._queue[0] = self._queue[0][os.write(self.fd, self._queue[0]) :]
                if not self._queue[0]:
                    del self._queue[0]
        except BlockingIOError:
            return
        except BrokenPipeError:
            os._exit(0)

    def finish(self) -> None:
        """Write all that is left, however long the host takes to read."""
        for rest in self._queue:
            wire.write_all(self.fd, rest)
        os.close(self.fd)
