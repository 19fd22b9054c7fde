"""What a process has put out lately, by position, and who follows it."""

import bisect

from .protocol import EVENT_COST

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable

    from .kept import Operation

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

    def latest(self, most: int) -> bytes:
        """The last bytes of both streams together."""
        found = b""
        for _, piece in reversed(self._pieces):
            found = bytes(piece) + found
            if len(found) >= most:
                break
        return found[-most:]

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
