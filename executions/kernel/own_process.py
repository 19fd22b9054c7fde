"""What a process asks of the system for itself. Linux only.

Loads little: a process that only waits has this too.
"""

from __future__ import annotations

import ctypes
import os
import signal

LARGE_BYTES = 256 * 1024

_M_MMAP_THRESHOLD = -3
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process as soon as `parent`, which started it, is gone.

    Survives exec but not fork: each child has to ask for itself.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def give_back_large_blocks() -> None:
    """Have the C library give blocks of LARGE_BYTES and more back to the system as soon as they are
    free. By itself it keeps the more of them the larger they were; another C library does as it
    does."""
    if mallopt := getattr(_libc, "mallopt", None):
        mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)


def descendants_die_with_parents() -> None:
    """Have every process forked from now on, by us or by a child of ours, die with its parent."""
    parent = os.getpid()

    def ask() -> None:
        nonlocal parent
        die_with_parent(parent)
        parent = os.getpid()

    os.register_at_fork(after_in_child=ask)


def show_as(name: str) -> None:
    """Have `ps` show this process as its interpreter with the one argument `name`.

    For a forked process, which has the arguments of its parent. A `name` that is longer than these
    is cut off.
    """
    with open("/proc/self/stat") as stat:
        fields = stat.read().rpartition(") ")[2].split()
    start, end = int(fields[45]), int(fields[46])
    after_first = start + len(ctypes.string_at(start)) + 1
    # The last byte stays a zero: without it the system shows the environment too.
    text = name.encode()[: max(0, end - after_first - 1)]
    ctypes.memmove(after_first, text.ljust(end - after_first, b"\0"), end - after_first)


def adopt_orphans() -> None:
    """Have what a child leaves behind when it ends become a child of this process."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")
