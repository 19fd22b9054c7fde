"""What a container says on its attach stream.

Without a terminal the engine puts an 8-byte header before each piece of output: the stream (1 is
stdout, 2 is stderr) and the piece's size. They are taken off here.
"""

from __future__ import annotations

STDERR = 2
COMPLAINT_BYTES = 2000
_HEADER_BYTES = 8


class Demultiplexer:
    """Takes the engine's headers off: stdout is passed on, the beginning of stderr is kept."""

    def __init__(self) -> None:
        self.stderr = b""
        self._header = b""
        self._left = 0
        self._stream = 0

    @property
    def complaint(self) -> str:
        """The beginning of what was written to stderr, as text."""
        return self.stderr.decode("utf-8", "replace").strip()

    def feed(self, data: bytes) -> bytes:
        """The part of `data` that is stdout."""
        out = []
        view = memoryview(data)
        while view:
            if self._left == 0:
                taken = _HEADER_BYTES - len(self._header)
                self._header += view[:taken]
                view = view[taken:]
                if len(self._header) < _HEADER_BYTES:
                    break
                self._stream = self._header[0]
                self._left = int.from_bytes(self._header[4:], "big")
                self._header = b""
                continue
            piece, view = view[: self._left], view[self._left :]
            self._left -= len(piece)
            if self._stream != STDERR:
                out.append(piece)
            elif len(self.stderr) < COMPLAINT_BYTES:
                self.stderr += piece[: COMPLAINT_BYTES - len(self.stderr)]
        return b"".join(out)


class After:
    """Passes on what comes after `mark`, and at once where that is empty.

    What comes before it is dropped as it comes: the rest of a frame that was said to another.
    """

    def __init__(self, mark: bytes) -> None:
        self._mark = mark
        self._last = b""
        self.is_found = not mark

    def feed(self, data: bytes) -> bytes:
        if self.is_found:
            return data
        _, found, after = (self._last + data).partition(self._mark)
        if found:
            self.is_found = True
            self._last = b""
            return after
        self._last = (self._last + data)[1 - len(self._mark) :]
        return b""
