"""Requests and answers as lines on two descriptors that nothing else in the process writes to."""

from __future__ import annotations

import json
import os
import select
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

_READ_BYTES = 256 * 1024


class TooLong(Exception):
    """More than the bound, in a line or in all."""


def take_standard_streams() -> tuple[int, int]:
    """Descriptors of standard input and output, for the protocol alone. Raises OSError.

    From now on whoever prints in this process writes to standard error, and whoever reads finds
    the end; so do the processes that it starts.
    """
    requests, answers = os.dup(0), os.dup(1)
    for descriptor in (requests, answers):
        os.set_blocking(descriptor, True)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    try:
        os.dup2(2, 1)
    except OSError:
        os.dup2(nothing, 1)
        os.dup2(nothing, 2)
    os.close(nothing)
    return requests, answers


class Answers:
    """One line of ASCII for each answer: whatever a program printed stands in a JSON string, where
    a line cannot end.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()

    def write(self, answer: Mapping[str, Any]) -> None:
        """Whole, from any thread. Raises OSError when nobody reads any more."""
        left = memoryview(json.dumps(answer, separators=(",", ":")).encode("ascii") + b"\n")
        with self._lock:
            while left:
                left = left[os.write(self._descriptor, left) :]

    def is_read(self) -> bool:
        """Whether somebody may still read them. A file always counts as read."""
        watch = select.poll()
        watch.register(self._descriptor, 0)
        return not watch.poll(0)


def whole_of(descriptor: int, most: int) -> bytes:
    """All there is to read. Raises TooLong for more than `most` bytes, of which no more is kept."""
    held = bytearray()
    while data := os.read(descriptor, _READ_BYTES):
        held += data
        if len(held) > most:
            raise TooLong
    return bytes(held)


def lines_of(read: Callable[[int], bytes], most: int) -> Iterator[bytes | TooLong]:
    """Each line that is not blank, the last one whether it was ended or not.

    Of one beyond `most` bytes nothing is kept, and TooLong stands in its place.
    """
    held, searched, is_too_long = bytearray(), 0, False
    while data := read(_READ_BYTES):
        held += data
        while (end := held.find(b"\n", searched)) >= 0:
            line, searched = bytes(held[:end]), 0
            del held[: end + 1]
            if is_too_long or len(line) > most:
                yield TooLong()
            elif line.strip():
                yield line
            is_too_long = False
        if is_too_long or len(held) > most:
            is_too_long = True
            held.clear()
        searched = len(held)
    if is_too_long:
        yield TooLong()
    elif held.strip():
        yield bytes(held)
