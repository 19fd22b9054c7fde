"""Threads that follow background processes, so that their records end when they do.

Each has a thread for as long as it runs, which may be a day: none of those that calls of providers
are waited for in, which are everybody's. Beyond a tenant's share nobody follows, and the schedule
records the ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from uuid import UUID

from executions.kernel.background import Shares
from executions.runs.event_log import EventLog
from providers.threads import NoThreadLeft, start_thread

# Of one tenant, and of all.
MOST_OF_ONE, MOST = 32, 256

_lock = threading.Lock()
_ends: dict[UUID, Callable[[], bool]] = {}
_logs: dict[UUID, EventLog] = {}
shares = Shares(MOST, MOST_OF_ONE)


def begin(
    tenant_slug: str,
    execution_id: UUID,
    end: Callable[[], bool],
    follow: Callable[[], None],
    log: EventLog,
) -> bool:
    """Have `follow` be done in a thread of its own. Whether there was one left.

    `end` records the execution as cancelled, with the output that was seen of it so far.
    What comes of it is in `log`.
    """
    if not shares.take(tenant_slug):
        return False
    with _lock:
        _ends[execution_id] = end
        _logs[execution_id] = log

    def let_go() -> None:
        with _lock:
            _ends.pop(execution_id, None)
            _logs.pop(execution_id, None)
        shares.give_back(tenant_slug)

    try:
        start_thread("follow-process", follow, at_end=let_go)
    except NoThreadLeft:
        return False
    return True


def log_of(execution_id: UUID) -> EventLog | None:
    with _lock:
        return _logs.get(execution_id)


def ids() -> list[UUID]:
    """The executions that are followed here."""
    with _lock:
        return list(_logs)


def has(execution_id: UUID) -> bool:
    return execution_id in _ends


def take(execution_id: UUID) -> Callable[[], bool]:
    """Have it be recorded by nobody but the caller: what records it as cancelled, and says whether
    it did. Of one that this process does not follow, that does nothing.
    """
    with _lock:
        return _ends.pop(execution_id, lambda: False)
