"""The kernel's word that something in a folder has changed (inotify).

Whoever has such a descriptor may watch every inode that he can open, and some of those are shared
with other sandboxes. So it is made before system calls are filtered, for process 1 and the process
that works on files, which no program reads from; programs have none (providers/pool/seccomp.py).
"""

import ctypes
import fcntl
import os
import struct

ATTRIB, CLOSE_WRITE, MODIFY = 0x4, 0x8, 0x2
MOVED_FROM, MOVED_TO, CREATE, DELETE = 0x40, 0x80, 0x100, 0x200
OVERFLOW, IS_FOLDER = 0x4000, 0x40000000
_WANTED = ATTRIB | CLOSE_WRITE | MODIFY | MOVED_FROM | MOVED_TO | CREATE | DELETE
_ONLY_FOLDERS = 0x01000000
# Above the numbers that a child's pipes and the worker's channel are given.
_LOWEST = 10
# What is read at once, and in all before it is too much: a program can fill it without end.
_PIECE_BYTES, _MOST_BYTES = 64 * 1024, 1024 * 1024
_HEAD = struct.Struct("iIII")

_libc = ctypes.CDLL(None, use_errno=True)


class TooMany(Exception):
    """Some were dropped, or there are more than are worth reading."""


def open_notices() -> int:
    """A descriptor for `Notices`, -1 where there is none to be had."""
    first = _libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
    if first < 0:
        return -1
    try:
        return fcntl.fcntl(first, fcntl.F_DUPFD_CLOEXEC, _LOWEST)
    except OSError:
        return -1
    finally:
        os.close(first)


class Notices:
    """What is told of the folders that are watched."""

    def __init__(self, fd: int, home: int) -> None:
        """`home` is the folder to be in, but for the moment in which another is watched."""
        self._fd, self._home = fd, home

    def watch(self, folder: int) -> int:
        """The number under which is told of it from now on. Raises OSError."""
        try:
            # A path could lead elsewhere by now.
            os.fchdir(folder)
            number: int = _libc.inotify_add_watch(self._fd, b".", _WANTED | _ONLY_FOLDERS)
            if number < 0:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            return number
        finally:
            os.fchdir(self._home)

    def drop(self, number: int) -> None:
        """No longer; one that is gone has none anyway."""
        _libc.inotify_rm_watch(self._fd, number)

    def read(self) -> "list[tuple[int, int, str]]":
        """All that came since: the folder's number, what happened, and the name in the folder.

        Raises TooMany and OSError; what was there is gone then.
        """
        found: "list[tuple[int, int, str]]" = []
        size = 0
        lost = False
        while True:
            try:
                data = os.read(self._fd, _PIECE_BYTES)
            except BlockingIOError:
                break
            size += len(data)
            if size > 4 * _MOST_BYTES:
                # The program is quicker than we are.
                raise TooMany
            if size > _MOST_BYTES:
                lost = True
                continue
            offset = 0
            while offset < len(data):
                number, mask, _, length = _HEAD.unpack_from(data, offset)
                offset += _HEAD.size + length
                name = data[offset - length : offset].rstrip(b"\0")
                lost = lost or bool(mask & OVERFLOW)
                found.append((number, mask, os.fsdecode(name)))
        if lost:
            raise TooMany
        return found
