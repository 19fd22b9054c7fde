"""How a worker that waits learns at once that something was queued.

What is queued is a row, and the process that has committed it touches a file in DATA_DIR that the
workers of this machine watch. So an idle worker need not look at the database many times a second.
SQLite's processes are all of one machine. With another database the rows may come from machines
that share no file, and workers go on looking.
"""

from __future__ import annotations

import logging
import os
import select
from contextlib import suppress
from pathlib import Path

from django.conf import settings
from django.db import transaction

from executions.kernel.file_watch import FileWatch, touch
from providers import draining

logger = logging.getLogger(__name__)


def notify_on_commit() -> None:
    """Wake the workers of this machine as soon as the open transaction is committed."""
    transaction.on_commit(notify)


def notify() -> None:
    """Wake the workers of this machine."""
    # Without the file no worker waits for it, and what else is wrong costs a few seconds.
    with suppress(OSError):
        touch(_file())


class Waiter:
    """Waits until a worker process has something to look at. For one thread at a time."""

    def __init__(self) -> None:
        self._own = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._watch = _watch()
        self._poll = select.poll()
        for file in (self._own, draining.begun(), self._watch):
            if file is not None:
                self._poll.register(file, select.POLLIN)

    @property
    def is_notified(self) -> bool:
        """Whether `notify` of another process ends a wait."""
        return self._watch is not None

    def wake(self) -> None:
        """End a wait, from a thread of this process."""
        os.eventfd_write(self._own, 1)

    def clear(self) -> None:
        """Forget what came until now. Before the look at the queue, so that nothing is missed."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._own)
        if self._watch is not None:
            self._watch.clear()

    def wait(self, seconds: float) -> None:
        """Return when this is woken, something is queued or stopping begins, or after `seconds`."""
        self._poll.poll(seconds * 1000)


def _file() -> Path:
    return Path(settings.DATA_DIR) / "run" / "queued"


def _watch() -> FileWatch | None:
    try:
        return FileWatch(_file())
    except OSError as problem:
        logger.warning("the worker reads the queue all the time: %s", problem)
        return None
