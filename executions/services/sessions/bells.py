"""Telling those of this process who wait for their turn in a session that something has ended."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from uuid import UUID

# Reentrant: the garbage collector may end a generator that waits with one, in any thread.
_lock = threading.RLock()
_waiting: dict[UUID, set[Future[None]]] = {}


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
