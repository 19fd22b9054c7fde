"""The kernel's word that something in a folder has changed (inotify).

Whoever has such a descriptor may watch every inode that he can open, and some of those are shared
with other sandboxes. So it is made before system calls are filtered, for process 1 and the process
that works on files, which no program reads from; programs have none (launchers/seccomp.py).
"""

import ctypes
import fcntl
import os
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    # The folder's number, what happened, the name, and what both halves of a move have in common.
    Notice = tuple[int, int, str, int]

ATTRIB, CLOSE_WRITE, MODIFY = 0x4, 0x8, 0x2
MOVED_FROM, MOVED_TO, CREATE, DELETE = 0x40, 0x80, 0x100, 0x200
OVERFLOW, IS_GONE, IS_FOLDER = 0x4000, 0x8000, 0x40000000
_WANTED = ATTRIB | CLOSE_WRITE | MODIFY | MOVED_FROM | MOVED_TO | CREATE | DELETE
_ONLY_FOLDERS = 0x01000000
# Above the numbers that a child's pipes and the worker's channel are given.
_LOWEST = 10
# What is read at once, and in all before it is too much: a program can fill it without end.
_PIECE_BYTES, _MOST_BYTES = 64 * 1024, 1024 * 1024
# What is held of it for one listener; the kernel's own queue has as many.
_MOST_TOLD = 16 * 1024
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
    """What is told of the folders that one listener watches.

    A descriptor has one queue, from which any of its listeners takes for all: each is told of what
    happens in the folders that it watches, and of nothing else.
    """

    def __init__(self, fd: int, home: int, beside: "Notices | None" = None) -> None:
        """`home` is the folder to be in, but for the moment in which another is watched. One that
        is `beside` another has its queue."""
        self._fd, self._home = fd, home
        self._all: "list[Notices]" = [] if beside is None else beside._all
        self._all.append(self)
        self._numbers: "set[int]" = set()
        self._told: "list[Notice]" = []
        self._is_lost = False

    def beside(self) -> "Notices":
        """Another listener."""
        return Notices(self._fd, self._home, self)

    def close(self) -> None:
        """Listen no more."""
        for number in list(self._numbers):
            self.drop(number)
        self._all.remove(self)
        self._told.clear()

    @property
    def has_some(self) -> bool:
        """Whether there is something to be read that was taken from the queue already."""
        return bool(self._told) or self._is_lost

    @property
    def in_all(self) -> int:
        """How many folders all listeners together watch, each counted for itself."""
        return sum(len(each._numbers) for each in self._all)

    def begin(self) -> None:
        """Forget what happened before now. A folder may have been watched for another already, or
        for a process that is gone, and what was said of it still be in the queue."""
        for number in list(self._numbers):
            self.drop(number)
        self.take()
        self._told.clear()
        self._is_lost = False

    def watch(self, folder: int) -> int:
        """The number under which is told of it from now on. Raises OSError."""
        try:
            # A path could lead elsewhere by now.
            os.fchdir(folder)
            number: int = _libc.inotify_add_watch(self._fd, b".", _WANTED | _ONLY_FOLDERS)
            if number < 0:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            self._numbers.add(number)
            return number
        finally:
            os.fchdir(self._home)

    def drop(self, number: int) -> None:
        """No longer; one that is gone has none anyway."""
        self._numbers.discard(number)
        if not any(number in each._numbers for each in self._all):
            _libc.inotify_rm_watch(self._fd, number)

    def read(self) -> "list[Notice]":
        """All that came since: the folder's number, what happened, the name in the folder, and what
        both halves of a move have in common, 0 for all else.

        Raises TooMany and OSError; what was there is gone then.
        """
        self.take()
        told, self._told = self._told, []
        if self._is_lost:
            self._is_lost = False
            raise TooMany
        return told

    def take(self) -> None:
        """Take what there is from the queue, for all listeners. Raises OSError."""
        size = 0
        while True:
            try:
                data = os.read(self._fd, _PIECE_BYTES)
            except BlockingIOError:
                return
            size += len(data)
            if size > 4 * _MOST_BYTES:
                # The program is quicker than we are.
                self._lose_all()
                return
            offset = 0
            while offset < len(data):
                number, mask, cookie, length = _HEAD.unpack_from(data, offset)
                offset += _HEAD.size + length
                name = data[offset - length : offset].rstrip(b"\0")
                if mask & OVERFLOW:
                    self._lose_all()
                    continue
                for each in self._all:
                    if number in each._numbers:
                        each._hear((number, mask, os.fsdecode(name), cookie))

    def _hear(self, notice: "Notice") -> None:
        if notice[1] & IS_GONE:
            self._numbers.discard(notice[0])
        if len(self._told) >= _MOST_TOLD:
            self._lose()
        elif not self._is_lost:
            self._told.append(notice)

    def _lose(self) -> None:
        self._is_lost = True
        self._told.clear()

    def _lose_all(self) -> None:
        for each in self._all:
            each._lose()


class Pause:
    """Until a listener has something to read, or for so many seconds."""

    __slots__ = ("notices", "seconds")

    def __init__(self, notices: Notices, seconds: float) -> None:
        self.notices, self.seconds = notices, seconds
