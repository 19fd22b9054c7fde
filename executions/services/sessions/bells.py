"""Telling those of this process who wait for something of a session that it has happened.

What another process does rings no bell here. For that one of those who wait looks into the
database, and rings for the others.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from uuid import UUID

# How often those look who leave it to another.
REST_SECONDS = 5.0

# Reentrant: the garbage collector may end a generator that waits with one, in any thread.
_lock = threading.RLock()
_waiting: dict[UUID, set[Future[None]]] = {}
_lookers: dict[UUID, object] = {}


@contextmanager
def hung(session_id: UUID) -> Iterator[Future[None]]:
    """A future that is done at the next `ring`."""
    bell: Future[None] = Future()
    with _lock:
        _waiting.setdefault(session_id, set()).add(bell)
    try:
        yield bell
    finally:
        with _lock:
            bells = _waiting.get(session_id, set())
            bells.discard(bell)
            if not bells:
                _waiting.pop(session_id, None)


def ring(session_id: UUID) -> None:
    with _lock:
        bells = _waiting.pop(session_id, set())
    for bell in bells:
        if bell.set_running_or_notify_cancel():
            bell.set_result(None)


@contextmanager
def looking(session_id: UUID) -> Iterator[Callable[[float], float]]:
    """Say after how many seconds one who waits looks into the database again: those that are given
    for one of this process, REST_SECONDS for the others. When that one has done, they are rung.
    """
    me = object()

    def pause(seconds: float) -> float:
        with _lock:
            is_mine = _lookers.setdefault(session_id, me) is me
        return seconds if is_mine else REST_SECONDS

    try:
        yield pause
    finally:
        with _lock:
            was_mine = _lookers.get(session_id) is me
            if was_mine:
                del _lookers[session_id]
        if was_mine:
            ring(session_id)
