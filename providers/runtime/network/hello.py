"""The server name in a TLS ClientHello (RFC 8446, section 4.1.2; RFC 6066, section 3)."""

from __future__ import annotations

from dataclasses import dataclass

# What the records of one ClientHello may have together. Post-quantum keys take 2 KiB.
MOST_BYTES = 32 * 1024
# Each is looked at anew when bytes come. Clients that part a hello at all part it in a few.
MOST_RECORDS = 64
_HANDSHAKE, _CLIENT_HELLO, _SERVER_NAME, _HOST_NAME = 22, 1, 0, 0


class Malformed(ValueError):
    """It is no ClientHello."""


@dataclass
class _Reader:
    data: bytes
    at: int = 0

    def take(self, size: int) -> bytes:
        """Raises Malformed."""
        if size < 0 or self.at + size > len(self.data):
            raise Malformed("it is cut off")
        self.at += size
        return self.data[self.at - size : self.at]

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "big")

    def block(self, size: int) -> _Reader:
        """What follows a length of so many bytes."""
        return _Reader(self.take(self.number(size)))

    @property
    def is_empty(self) -> bool:
        return self.at == len(self.data)


def server_name(data: bytes) -> str | int:
    """Return the name that a client asks for, "" where it names none. While more is needed, return
    how many bytes there must be at least: to look again earlier would be work for nothing.

    Raises Malformed.
    """
    message = bytearray()
    at = records = 0
    while len(message) < 4 or len(message) < 4 + int.from_bytes(message[1:4], "big"):
        if len(data) > MOST_BYTES or records == MOST_RECORDS:
            raise Malformed("it is too long")
        if len(data) < at + 5:
            return at + 5
        kind, version, size = data[at], data[at + 1], int.from_bytes(data[at + 3 : at + 5], "big")
        if kind != _HANDSHAKE or version != 3 or not 0 < size <= 1 << 14:
            raise Malformed("it is no handshake")
        if len(data) < at + 5 + size:
            return at + 5 + size
        message += data[at + 5 : at + 5 + size]
        at += 5 + size
        records += 1
        if message[0] != _CLIENT_HELLO:
            raise Malformed("it is no ClientHello")
    return _name_of(_Reader(bytes(message[4 : 4 + int.from_bytes(message[1:4], "big")])))


def _name_of(hello: _Reader) -> str:
    hello.take(2 + 32)
    hello.block(1)
    hello.block(2)
    hello.block(1)
    if hello.is_empty:
        return ""
    extensions = hello.block(2)
    if not hello.is_empty:
        raise Malformed("it has more than its extensions")
    found: str | None = None
    while not extensions.is_empty:
        kind = extensions.number(2)
        content = extensions.block(2)
        if kind != _SERVER_NAME:
            continue
        if found is not None:
            raise Malformed("it has two server names")
        names = content.block(2)
        if names.number(1) != _HOST_NAME:
            raise Malformed("its server name is of an unknown kind")
        name = names.block(2).data
        if not (names.is_empty and content.is_empty):
            raise Malformed("it has two server names")
        try:
            found = name.decode("ascii")
        except UnicodeDecodeError:
            raise Malformed("its server name is not ASCII") from None
    return found or ""
