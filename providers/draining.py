"""Whether this process is stopping, and how far that has gone.

A service that is told to stop first says so (`begin`) and goes on; then it takes no new work
(`refuse_new`); and when its grace is over, it ends what still runs (`begin_ending`). With `for_all`
this holds for every process that was forked from the one that imported this first, or that called
`share_with_own_forks` since: a server's workers, a cluster's processes. Nothing goes back.

Safe in signal handlers: a step is one byte, and one write.
"""

from __future__ import annotations

import mmap
import os
import select
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

# What ending the runs that are left, recording them and answering may take after the grace.
ENDING_SECONDS = 10.0

_SERVING, _DRAINING, _CLOSED, _ENDING = range(4)

_own = _SERVING
_shared = mmap.mmap(-1, 1)
# Written to when `_shared` leaves its first step, and never read.
_begun = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
_is_in_time = ContextVar("is_in_time", default=False)


def share_with_own_forks() -> None:
    """Have `for_all` mean, from now on, this process and those that are forked from it.

    For a server or a cluster that was forked itself: what it stops is not what its parent has.
    """
    global _shared, _begun
    _shared = mmap.mmap(-1, 1)
    os.close(_begun)
    _begun = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)


def begin(*, for_all: bool = False) -> None:
    """Stopping has begun: /readyz says so, and workers take nothing more from the queue."""
    _go_to(_DRAINING, for_all)


def refuse_new(*, for_all: bool = False) -> None:
    """Nothing new is taken from now on."""
    _go_to(_CLOSED, for_all)


def begin_ending(*, for_all: bool = False) -> None:
    """What still runs is ended from now on."""
    _go_to(_ENDING, for_all)


def is_draining() -> bool:
    return _step() >= _DRAINING


def refuses_new() -> bool:
    """Whether what is asked for now comes too late."""
    return _step() >= _CLOSED and not _is_in_time.get()


@contextmanager
def in_time() -> Iterator[None]:
    """Have what is done here pass: it was asked for before, and waited for its turn."""
    token = _is_in_time.set(True)
    try:
        yield
    finally:
        _is_in_time.reset(token)


def begun() -> int:
    """A file descriptor that `select` finds readable once stopping has begun for all."""
    return _begun


def wait_until_begun(seconds: float) -> None:
    """Wait until stopping has begun for all, or for `seconds`."""
    select.select([_begun], [], [], seconds)


def is_ending() -> bool:
    return _step() >= _ENDING


def are_all_draining() -> bool:
    """Whether the processes that share this one's sockets are stopping too."""
    return _shared[0] >= _DRAINING


def _step() -> int:
    return max(_own, _shared[0])


def _go_to(step: int, for_all: bool) -> None:
    global _own
    _own = max(_own, step)
    if for_all:
        _shared[0] = max(_shared[0], step)
        os.eventfd_write(_begun, 1)
