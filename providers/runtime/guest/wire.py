"""Frames between host, supervisor and child: a length, a JSON header, raw parts.

4 bytes big-endian header length, the header as UTF-8 JSON, then the bytes of every part named in
`header["parts"]`, a list of [name, size]. The host uses this module too.
"""

import errno
import os
import select

from .program import dumps as dumps
from .program import dumps_value as dumps_value
from .program import loads as loads

HEADER_LIMIT = 256 * 1024
REQUEST_LIMIT = 128 * 1024 * 1024
_LET_GO_BYTES = 1024 * 1024

# Of what ended a program: bytes of all its fields as JSON.
EXCEPTION_BYTES = 192 * 1024

# The zygote's first byte on a sandbox's channel: a pidfd comes with the first, a text with the
# others. EXHAUSTED is a failure for want of what the machine may have again in a moment.
STARTED, FAILED, EXHAUSTED = b"S", b"F", b"E"
# Before all frames: the socket of `network.offer` comes with it.
LISTENER = b"N"
_EXHAUSTION = (
    *(errno.EAGAIN, errno.ENOMEM, errno.ENOBUFS, errno.EMFILE, errno.ENFILE),
    *(errno.ENOSPC, errno.EUSERS),
)


def is_exhaustion(error: BaseException) -> bool:
    """Whether it says that processes, memory, descriptors or namespaces are used up."""
    return isinstance(error, MemoryError) or (
        isinstance(error, OSError) and error.errno in _EXHAUSTION
    )


class FrameError(Exception):
    """The other side does not keep to the protocol."""


def pack(header: "dict[str, object]", parts: "list[tuple[str, bytes]]") -> bytes:
    """One frame. The parts' names and sizes are added to the header."""
    return b"".join(chunks(header, parts))


def pack_failed_start(error: BaseException) -> bytes:
    """The one frame of a sandbox that did not come to be."""
    failed: "dict[str, object]" = {
        "type": "failed",
        "reason": f"the sandbox did not start: {error!r}"[:2000],
        "exhausted": is_exhaustion(error),
    }
    return pack(failed, [])


def chunks(header: "dict[str, object]", parts: "list[tuple[str, bytes]]") -> "list[bytes]":
    """One frame as the bytes to be written one after the other, without a copy of the parts.

    Raises ValueError for a part whose name is not Unicode.
    """
    "".join(name for name, _ in parts).encode()
    named = [[name, len(content)] for name, content in parts]
    # A surrogate, as in a file's name that is not UTF-8, becomes the escape that JSON has for it.
    text = dumps({**header, "parts": named}).encode("utf-8", "backslashreplace")
    return [len(text).to_bytes(4, "big") + text, *(content for _, content in parts)]


class Parser:
    """Puts frames together from bytes as they arrive. Refuses what is over its bounds early."""

    def __init__(self, limit: int) -> None:
        """`limit` bounds the raw bytes of one frame's parts together."""
        self.limit = limit
        self._buffer = bytearray()
        self._header: "dict[str, object] | None" = None
        self._sizes: "list[tuple[str, int]]" = []
        self._needed = 4

    def feed(self, data: bytes) -> "list[tuple[dict[str, object], dict[str, bytes]]]":
        """The frames completed by `data`, as (header, parts). Raises FrameError."""
        self._buffer += data
        frames: "list[tuple[dict[str, object], dict[str, bytes]]]" = []
        while True:
            if self._header is None and not self._read_header():
                return frames
            if len(self._buffer) < self._needed:
                return frames
            frames.append(self._take())

    def _read_header(self) -> bool:
        buffer = self._buffer
        if len(buffer) < 4:
            return False
        size = int.from_bytes(buffer[:4], "big")
        if size > HEADER_LIMIT:
            raise FrameError(f"a header of {size} bytes is over the limit")
        if len(buffer) < 4 + size:
            return False
        try:
            header = loads(buffer[4 : 4 + size].decode())
        except (ValueError, RecursionError) as error:
            raise FrameError("the header is not JSON") from error
        self._sizes = _part_sizes(header)
        total = sum(part for _, part in self._sizes)
        if total > self.limit:
            raise FrameError(f"parts of {total} bytes are over the limit of {self.limit}")
        del buffer[: 4 + size]
        self._header = header  # type: ignore[assignment]  # _part_sizes has refused all but dicts
        self._needed = total
        return True

    def _take(self) -> "tuple[dict[str, object], dict[str, bytes]]":
        parts = {}
        start = end = self._needed
        # From the end on, so that what has been taken is let go of: memory is scarce in a sandbox.
        # Some at a time, because each time what is behind is moved, and there may be many parts.
        for name, size in reversed(self._sizes):
            with memoryview(self._buffer) as view:
                parts[name] = bytes(view[start - size : start])
            start -= size
            if end - start >= _LET_GO_BYTES:
                del self._buffer[start:end]
                end = start
        del self._buffer[:end]
        self._needed = 4
        header, self._header = self._header, None
        assert header is not None
        return header, dict(reversed(parts.items()))


def _part_sizes(header: object) -> "list[tuple[str, int]]":
    if not isinstance(header, dict) or not isinstance(header.get("parts"), list):
        raise FrameError("the header is not an object with parts")
    sizes = []
    for entry in header["parts"]:
        if not (
            isinstance(entry, list)
            and len(entry) == 2
            and isinstance(entry[0], str)
            and type(entry[1]) is int
            and entry[1] >= 0
        ):
            raise FrameError("a part is not [name, size]")
        sizes.append((entry[0], entry[1]))
    names = [name for name, _ in sizes]
    try:
        "".join(names).encode()
    except UnicodeEncodeError:
        raise FrameError("a part has a name that is not Unicode") from None
    if len(set(names)) != len(names):
        raise FrameError("two parts have the same name")
    return sizes


def write_all(fd: int, data: "bytes | memoryview") -> None:
    """Write everything, however long the other side takes to read."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:
            wait(fd, select.POLLOUT)


def read_frame(fd: int, parser: Parser) -> "tuple[dict[str, object], dict[str, bytes]] | None":
    """The next frame, waiting for it; None at the end of the descriptor. Raises FrameError."""
    while True:
        try:
            data = os.read(fd, 1 << 16)
        except BlockingIOError:
            wait(fd, select.POLLIN)
            continue
        if not data:
            return None
        frames = parser.feed(data)
        if frames:
            return frames[0]


def wait(fd: int, events: int, seconds: "float | None" = None) -> bool:
    """Wait until `fd` is ready for what `events` names, or has ended. False after the time."""
    # Under gVisor a blocking socket that comes from the host answers EAGAIN now and then.
    poll = select.poll()
    poll.register(fd, events)
    return bool(poll.poll(None if seconds is None else seconds * 1000))
