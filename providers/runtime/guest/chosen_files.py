"""An archive of single paths, each as it was at one moment, or left out.

A small file is read at once and looked at again. Of a larger one the host holds what comes back
until it is told whether it was the same to its end: an archive takes nothing back.
"""

import os
import time

from . import wire
from .archive import head, member_of
from .file_operations import Event
from .kept import Refused
from .paths import AT_ONCE, FILE_CLOCK, Found, named, open_file, parse, reach
from .protocol import CHOSEN_BYTES, CHUNK_BYTES, MOST_CHOSEN

TYPE_CHECKING = False
if TYPE_CHECKING:
    import tarfile
    from collections.abc import Generator
    from typing import Any

    from .file_operations import Steps

# How much of a file is read at once.
AT_ONCE_BYTES = 256 * 1024
_BLOCK = 512
# How often it is waited for its next tick, and how long.
_TICKS, _TICK_SECONDS = 10, 0.002


class _Elsewhere(Exception):
    """It is gone, cannot be read, or has changed meanwhile."""


def pack(base: int, header: "dict[str, object]") -> "Steps":
    """`data` is sure; `held` is, once `kept` is said."""
    folder = reach(base, parse(header.get("path")))
    count = skipped = 0
    sure = bytearray()
    try:
        for number, path in enumerate(_chosen(header)):
            if number % AT_ONCE == AT_ONCE - 1:
                yield None
            try:
                piece = yield from _one(folder, path, sure)
            except (_Elsewhere, Refused, OSError):
                skipped += 1
                continue
            count += 1
            sure += piece
            while len(sure) >= CHUNK_BYTES:
                yield Event("data", {}, bytes(sure[:CHUNK_BYTES]))
                del sure[:CHUNK_BYTES]
    finally:
        os.close(folder)
    sure += bytes(2 * _BLOCK)
    while sure:
        yield Event("data", {}, bytes(sure[:CHUNK_BYTES]))
        del sure[:CHUNK_BYTES]
    return {"count": count, "skipped": skipped}


def _chosen(header: "dict[str, object]") -> "list[list[str]]":
    data: bytes = header["parts"]["only"]  # type: ignore[index]
    try:
        said = wire.loads(data.decode()) if len(data) <= CHOSEN_BYTES else None
    except (ValueError, RecursionError):
        said = None
    if not isinstance(said, list) or not 0 < len(said) <= MOST_CHOSEN:
        raise Refused(f"Must be a list of 1 to {MOST_CHOSEN} paths.", "only")
    return [named(path, "only") for path in said]


def _one(
    base: int, path: "list[str]", sure: bytearray
) -> "Generator[Event | float | None, Any, bytes]":
    """The member of one path, as far as it was not sent as `held` after all that is `sure`."""
    folder = reach(base, path[:-1])
    try:
        found = Found("/".join(path), folder, path[-1], os.lstat(path[-1], dir_fd=folder))
        member = member_of(found)
        if member is None:
            raise _Elsewhere
        if member.type != b"0":
            return head(member)
        fd, status = open_file(folder, path[-1])
    finally:
        os.close(folder)
    try:
        status = yield from _settled(fd, status)
        member.size, member.mtime = status.st_size, int(status.st_mtime)
        if member.size <= AT_ONCE_BYTES:
            content = os.pread(fd, member.size, 0)
            _check(fd, status, len(content))
            return head(member) + content + bytes(-member.size % _BLOCK)
        if sure:
            yield Event("data", {}, bytes(sure))
            sure.clear()
        yield from _send(fd, status, member)
        return b""
    finally:
        os.close(fd)


def _settled(fd: int, status: os.stat_result) -> "Generator[float, Any, os.stat_result]":
    """Its state once the clock has ticked since it changed: from then on a change is seen."""
    for _ in range(_TICKS):
        if status.st_ctime_ns < time.clock_gettime_ns(FILE_CLOCK):
            return status
        yield _TICK_SECONDS
        status = os.fstat(fd)
    raise _Elsewhere


def _send(
    fd: int, status: os.stat_result, member: "tarfile.TarInfo"
) -> "Generator[Event, Any, None]":
    yield Event("held", {}, head(member))
    offset = 0
    try:
        while offset < status.st_size:
            data = os.pread(fd, min(CHUNK_BYTES, status.st_size - offset), offset)
            if not data:
                break
            offset += len(data)
            yield Event("held", {}, data)
        _check(fd, status, offset)
    except (_Elsewhere, OSError):
        yield Event("dropped", {})
        raise _Elsewhere from None
    if padding := bytes(-status.st_size % _BLOCK):
        yield Event("held", {}, padding)
    yield Event("kept", {})


def _check(fd: int, before: os.stat_result, read: int) -> None:
    now = os.fstat(fd)
    if read != before.st_size or any(
        getattr(now, name) != getattr(before, name)
        for name in ("st_size", "st_mtime_ns", "st_ctime_ns", "st_mode")
    ):
        raise _Elsewhere
