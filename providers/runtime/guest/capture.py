"""What a program puts out, as far as the limits of its run allow."""

import os

from .names import Omissions, too_large, too_many

TYPE_CHECKING = False  # as in typing, which is too dear to import here
if TYPE_CHECKING:
    from typing import Callable

# Longest name and most representations of one rich output.
MIME_LIMIT, BUNDLE_LIMIT = 100, 12
# Of all representations' names together: they stand in the header of an answer.
NAMES_BYTES = 32 * 1024
# How many turns between stdout and stderr are told.
ORDER_LIMIT = 1000
STDOUT, STDERR = 1, 2


class Order:
    """In which order the bytes of both streams were read: [[1 or 2, bytes], ...]."""

    def __init__(self) -> None:
        self.entries: "list[list[int]]" = []
        self.is_cut = False

    def add(self, stream: int, count: int) -> None:
        entries = self.entries
        if entries and entries[-1][0] == stream and not self.is_cut:
            entries[-1][1] += count
        elif len(entries) < ORDER_LIMIT:
            entries.append([stream, count])
        else:
            self.is_cut = True


class Capture:
    """The first `limit` bytes of a pipe; the rest is read and dropped, and counted as truncated.

    `take` is called with what was kept, as it comes.
    """

    def __init__(
        self,
        fd: int,
        limit: int,
        stream: int,
        order: Order,
        take: "Callable[[int, bytes], None] | None" = None,
    ) -> None:
        self.fd = fd
        self.stream = stream
        self.truncated = False
        self._room = limit
        self._order = order
        self._take_on = take
        self._chunks: "list[bytes]" = []
        os.set_blocking(fd, False)

    def read(self) -> bool:
        """Take what is there. False at the end of the pipe."""
        try:
            return self._take() > 0
        except BlockingIOError:
            return True

    def drain(self, most: "int | None" = None) -> None:
        """Everything that is left; only when no writer is alive any more, or with a bound.

        The pipe's end is not waited for: in a message that nobody will receive, its other end may
        outlive every process.
        """
        try:
            while (count := self._take()) and (most is None or most > 0):
                most = None if most is None else most - count
        except BlockingIOError:
            return

    def _take(self) -> int:
        data = os.read(self.fd, 1 << 16)
        self.add(data)
        return len(data)

    def add(self, data: bytes) -> None:
        """Take what the program has put out, or what we put to it."""
        kept = data[: self._room]
        if len(data) > len(kept):
            self.truncated = True
        if kept:
            self._chunks.append(kept)
            self._room -= len(kept)
            self._order.add(self.stream, len(kept))
            if self._take_on is not None:
                self._take_on(self.stream, kept)

    @property
    def content(self) -> bytes:
        return b"".join(self._chunks)


class Bundles:
    """The rich outputs of a run, as far as its limits allow, and what was left out of them."""

    def __init__(self, limits: "dict[str, int]") -> None:
        self.kept: "list[dict[str, bytes]]" = []
        self.skipped = Omissions()
        self._number = 0
        self._room = self._most = limits["rich_output_bytes"]
        self._count = limits["rich_output_count"]
        self._names = NAMES_BYTES

    def add(self, parts: "dict[str, bytes]", header: "dict[str, object]") -> bool:
        """Whether it was kept. `header` says what was left out of it: `cut`, as [what, why]."""
        self._number += 1
        name = f"output {self._number}"
        self.skipped.add_claimed(header.get("cut"), name)
        reason = self._problem(parts)
        if reason:
            self.skipped.add(name, reason)
            return False
        self._room -= sum(map(len, parts.values()))
        self._names -= sum(map(len, parts))
        self.kept.append(parts)
        return True

    def _problem(self, parts: "dict[str, bytes]") -> str:
        if not parts:
            # It was too large to be sent here at all.
            return too_large(self._most, "outputs")
        if len(parts) > BUNDLE_LIMIT:
            return too_many(BUNDLE_LIMIT, "representations")
        if not all(len(mime) <= MIME_LIMIT and mime.isascii() for mime in parts):
            return "the name of a representation is not a MIME type"
        if len(self.kept) >= self._count:
            return too_many(self._count, "outputs")
        if sum(map(len, parts.values())) > self._room:
            return too_large(self._most, "outputs")
        if sum(map(len, parts)) > self._names:
            return "the names of the representations are too long in total"
        return ""
