"""Closing a listening socket without losing whom the kernel has let in."""

from __future__ import annotations

import ctypes
import logging
import socket
import struct
from typing import Protocol

logger = logging.getLogger("sandbox_site.web")

_SO_ATTACH_FILTER = 26
_TCP_FLAGS, _SYN, _SYN_ACK = 13, 0x02, 0x12

# Of a packet to a TCP socket a filter sees the TCP header first. A first SYN is dropped, and
# everything else passes: (operation, jump if true, jump if false, operand).
_DROP_SYN = (
    (0x30, 0, 0, _TCP_FLAGS),  # load the byte
    (0x54, 0, 0, _SYN_ACK),  # and
    (0x15, 0, 1, _SYN),  # equal
    (0x06, 0, 0, 0),  # return: drop
    (0x06, 0, 0, 0xFFFFFFFF),  # return: all of it
)


class Listener(Protocol):
    @property
    def family(self) -> int: ...

    def setsockopt(self, level: int, option: int, value: bytes, /) -> None: ...


def turn_away(listener: Listener) -> None:
    """Let nobody new into the queue of a TCP socket, in whichever process it is used.

    Whoever has begun to connect still gets in. Others hear nothing, ask again after a second, and
    are refused when the socket is closed by then. Without this, who gets in between the last
    accept and the close is cut off, and may have sent his request.
    """
    if listener.family not in (socket.AF_INET, socket.AF_INET6):
        return
    code = b"".join(struct.pack("=HBBI", *each) for each in _DROP_SYN)
    kept = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("@HP", len(_DROP_SYN), ctypes.addressof(kept))
    try:
        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
    except OSError as error:
        logger.info(
            "graceful drain is not available on this socket, a stop may cut a connection: %s", error
        )
