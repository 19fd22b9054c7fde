"""Many streams over one: what the host and a tenant's kernel say to each other.

Every run has a lane, by its number. A message is the lane's number, its kind, the length of what
follows, and that. Bytes of a lane are sent only as far as its other end has given credit for them,
so that a run whose frames nobody takes holds up itself alone. The host uses this module too.
"""

import struct

TYPE_CHECKING = False  # as in typing, which is too dear to import here
if TYPE_CHECKING:
    from collections.abc import Iterator

# From the host: START holds the template as JSON, END ends what is in the lane.
# From the kernel: ENDED says that nothing of the run is left and, as JSON, how it ended. FAILED is
# why the kernel itself is of no use.
START, END, DATA, CREDIT, ENDED, FAILED = range(1, 7)

# How many bytes may be under way in one direction of a lane.
WINDOW = 256 * 1024

# So much is read at once. A larger buffer is mapped by the C library and unmapped again, which
# under gVisor takes ten times as long as what is read.
CHUNK = 64 * 1024

HEAD = struct.Struct("!QBI")
_CREDIT = struct.Struct("!I")
MESSAGE_LIMIT = WINDOW


class LaneError(Exception):
    """The other side does not keep to the protocol."""


def pack(lane: int, kind: int, content: bytes = b"") -> bytes:
    """One message."""
    return HEAD.pack(lane, kind, len(content)) + content


def pack_credit(lane: int, count: int) -> bytes:
    """So many more bytes of this lane may be sent."""
    return pack(lane, CREDIT, _CREDIT.pack(count))


def credit(content: bytes) -> int:
    """How many more. Raises LaneError."""
    if len(content) != _CREDIT.size:
        raise LaneError("credit has 4 bytes")
    count: int = _CREDIT.unpack(content)[0]
    if not 0 < count <= WINDOW:
        raise LaneError("credit beyond the window")
    return count


class Parser:
    """Puts messages together from bytes as they arrive."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> "Iterator[tuple[int, int, bytes]]":
        """Lane, kind and content of each message completed by `data`. Raises LaneError."""
        self._buffer += data
        while len(self._buffer) >= HEAD.size:
            lane, kind, size = HEAD.unpack_from(self._buffer)
            if size > MESSAGE_LIMIT or not START <= kind <= FAILED:
                raise LaneError("an unknown message")
            if len(self._buffer) < HEAD.size + size:
                return
            content = bytes(self._buffer[HEAD.size : HEAD.size + size])
            del self._buffer[: HEAD.size + size]
            yield lane, kind, content
