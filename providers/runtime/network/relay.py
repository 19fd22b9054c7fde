"""Bytes go from one connection to another inside the kernel, without a copy in this process."""

from __future__ import annotations

import asyncio
import os
import socket
from collections import deque
from collections.abc import Callable
from typing import cast

# What a pipe holds.
PIPE_BYTES = 64 * 1024
# So many bytes pass before other connections have their turn.
TURN_BYTES = 1024 * 1024
# What connections may have together in a second when several have turns: programs that read faster
# would take the processors from runs that use no network.
SHARED_BYTES = 256 * 1024 * 1024
_RECENT_SECONDS = 0.1
# Pipes that wait for their next use. One in use is held only while there is something in it.
MOST_SPARE = 64


class Pipes:
    """The pipes of a process, which all its connections share."""

    def __init__(self) -> None:
        self._spare: deque[tuple[int, int]] = deque()

    def take(self) -> tuple[int, int]:
        """An empty pipe, its end for reading first. Raises OSError."""
        if self._spare:
            return self._spare.pop()
        return os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def give_back(self, ends: tuple[int, int], *, is_empty: bool) -> None:
        if is_empty and len(self._spare) < MOST_SPARE:
            self._spare.append(ends)
        else:
            for fd in ends:
                os.close(fd)


_pipes = Pipes()
# When each relay that has had a turn had its last.
_turns: dict[object, float] = {}


async def relay(
    source: socket.socket,
    target: socket.socket,
    count: Callable[[int], None],
) -> None:
    """Pass on what comes until the source ends.

    Both are without blocking, and of no transport. `count` is given the size of each piece, before
    it passes; what it raises ends the relay. Raises OSError.
    """
    own = object()
    turn = 0
    try:
        while piece := await _pass_piece(source, target, count):
            turn += piece
            if turn >= TURN_BYTES:
                turn = 0
                await asyncio.sleep(_pause(own))
    finally:
        _turns.pop(own, None)


def _pause(own: object) -> float:
    """How long a relay waits after a turn: 0 where it is the only one."""
    now = asyncio.get_running_loop().time()
    _turns[own] = now
    recent = sum(now - each < _RECENT_SECONDS for each in _turns.values())
    return 0 if recent == 1 else recent * TURN_BYTES / SHARED_BYTES


async def _pass_piece(
    source: socket.socket, target: socket.socket, count: Callable[[int], None]
) -> int:
    loop = asyncio.get_running_loop()
    flags = os.SPLICE_F_MOVE | os.SPLICE_F_NONBLOCK
    left = 0
    while True:
        ends = _pipes.take()
        try:
            try:
                piece = left = os.splice(source.fileno(), ends[1], PIPE_BYTES, flags=flags)
            except BlockingIOError:
                # Whoever waits holds no pipe.
                piece = -1
            else:
                count(piece)
                while left:
                    try:
                        left -= os.splice(ends[0], target.fileno(), left, flags=flags)
                    except BlockingIOError:
                        await _ready(loop.add_writer, loop.remove_writer, target)
        finally:
            _pipes.give_back(ends, is_empty=not left)
        if piece >= 0:
            return piece
        await _ready(loop.add_reader, loop.remove_reader, source)


async def _ready(
    add: Callable[..., None], remove: Callable[[int], object], end: socket.socket
) -> None:
    ready = asyncio.Event()
    add(end.fileno(), ready.set)
    try:
        await ready.wait()
    finally:
        remove(end.fileno())


async def detach(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> tuple[bytes, socket.socket]:
    """Take a connection from its streams: what they had read already, and a socket to go on with.

    The transport reads no more; before the socket is written to, it has to be drained. Whoever
    closes the connection closes both. Raises OSError.
    """
    transport = cast("asyncio.Transport", writer.transport)
    transport.set_write_buffer_limits(high=0)
    transport.pause_reading()
    reader.feed_eof()
    first = await reader.read()
    # To read the rest may have it read on.
    transport.pause_reading()
    end: socket.socket = writer.get_extra_info("socket").dup()
    end.setblocking(False)
    return first, end
