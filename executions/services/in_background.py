"""Work that a task of the schedule begins and nobody waits for, once at a time in a process."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from django.db import connections

logger = logging.getLogger(__name__)

_going_on: set[str] = set()
_lock = threading.Condition()


def begin_alone(name: str, work: Callable[[], object]) -> threading.Thread | None:
    """Have a thread do it; None while one does it already, or the process has no thread left.

    It may end with its process at any moment: what it does must be found undone by the next one.
    """
    with _lock:
        if name in _going_on:
            return None
        _going_on.add(name)

    def run() -> None:
        try:
            work()
        except Exception:
            logger.exception("%s was aborted", name)
        finally:
            connections.close_all()
            with _lock:
                _going_on.discard(name)
                _lock.notify_all()

    thread = threading.Thread(target=run, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        logger.error("no thread for %s: %s", name, error)
        with _lock:
            _going_on.discard(name)
        return None
    return thread


def wait_until_idle(seconds: float) -> bool:
    """Wait until nothing that was begun goes on. Return whether that is so."""
    with _lock:
        return _lock.wait_for(lambda: not _going_on, seconds)
