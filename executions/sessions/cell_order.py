"""The order of cells in a session, and the notification of those who wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from uuid import UUID

from django.conf import settings
from django.db import connection
from django.db.models import OuterRef, Subquery

from executions.kernel.coroutines import wait_for
from executions.kernel.database import NOW
from executions.runs import active_runs, event_stream
from executions.runs.event_log import Broadcast, resolve
from executions.runs.models import Execution
from executions.runs.requests import Conflict
from executions.sessions.models import Session
from executions.sessions.requests import ensure_not_ended
from providers.waiting import within

# How often those look who leave it to another.
REST_SECONDS = 5.0

# Reentrant: the garbage collector may end a generator that waits with one, in any thread.
_lock = threading.RLock()
_waiting: dict[UUID, set[Future[None]]] = {}
_lookers: dict[UUID, object] = {}


@contextmanager
def waiter(session_id: UUID) -> Iterator[Future[None]]:
    """A future that is done at the next `notify`."""
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


def notify(session_id: UUID) -> None:
    with _lock:
        bells = _waiting.pop(session_id, set())
    for bell in bells:
        if bell.set_running_or_notify_cancel():
            bell.set_result(None)


@contextmanager
def poll_pause(session_id: UUID) -> Iterator[Callable[[float], float]]:
    """Give one waiter of this process the short pause between looks into the database, and the
    others REST_SECONDS. When that one has done, they are notified."""
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
            notify(session_id)


def enqueue(execution: Execution) -> None:
    """Give a new execution its place, in the transaction that inserts it.

    Raises SessionLost, SessionClosed, or Conflict for a session that is still being opened.
    """
    if (session_id := execution.session_id) is None:
        return
    taken = take_turn(session_id, execution.context)
    if taken is None:
        session = Session.objects.defer("env", "ref").get(pk=session_id)
        ensure_not_ended(session)
        raise Conflict("The session is still being opened. Try again.", retry_after=1)
    execution.turn, execution.is_held = taken


async def wait_turn(
    execution: Execution, waiting: Callable[[Future[Any]], AbstractContextManager[None]]
) -> None:
    """Wait until everything that came earlier to its context has ended.

    `waiting` surrounds the waiting, and may cancel it and raise.
    Raises Conflict after SESSION_QUEUE_TIMEOUT, and SessionLost or SessionClosed where the session
    ended meanwhile. Nothing has run then.
    """
    # What nobody held when it took its turn, nobody holds later: others come after it.
    if (session_id := execution.session_id) is None or not execution.is_held:
        return
    earlier = Execution.objects.filter(
        session=OuterRef("pk"),
        finished_at=None,
        context=execution.context,
        turn__lt=execution.turn,
        background=False,
    )
    # The last of them; those before it have ended when it has, or are waited for after it.
    last = earlier.order_by("-turn").values("pk")[:1]
    session = Session.objects.filter(pk=session_id).defer("env", "ref")
    until = time.monotonic() + settings.SESSION_QUEUE_TIMEOUT
    while True:
        with waiter(session_id) as bell:
            found = session.annotate(holder=Subquery(last)).get()
            ensure_not_ended(found)
            if not execution.context or found.holder is None:
                return
            left = until - time.monotonic()
            if left <= 0:
                raise Conflict(
                    f"Other code has been running in this context of the session {session_id} for "
                    f"{settings.SESSION_QUEUE_TIMEOUT} s. Wait for it, interrupt it, or use "
                    "another context."
                )
            # The bell rings for what this process runs, the poll sees what others do.
            record = event_stream.Waiter(found.holder, is_urgent=True)
            awaited = within(left, _first_of(bell, record.ended))
            with (
                event_stream.poll.join(record),
                active_runs.cancel_on_shutdown(awaited),
                waiting(awaited),
            ):
                await wait_for(awaited)
        active_runs.ensure_not_ending()


def _first_of(bell: Future[None], end: Broadcast) -> Future[None]:
    come: Future[None] = Future()
    bell.add_done_callback(lambda _: resolve([come]))
    end.bring(come)
    return come


def finish_turn(execution: Execution) -> None:
    """Let the next one go on, and count the session's idle time from now."""
    if execution.session_id is not None:
        use_session(execution.session_id)
        notify(execution.session_id)


_EXECUTIONS = Execution._meta.db_table
_SESSIONS = Session._meta.db_table


# Something begins or ends that may change its files.
_TOUCH = (
    "touched = touched + 1, unsaved_since ="
    " CASE WHEN saves = 'never' THEN NULL ELSE COALESCE(unsaved_since, {now}) END"
)


_TAKE_TURN = (
    f"UPDATE {_SESSIONS} SET turns = turns + 1, used_at = {{now}}, {_TOUCH}"  # noqa: S608
    " WHERE id = %s AND closed_at IS NULL AND (ref IS NOT NULL OR state = 'asleep')"
    " RETURNING turns"
)


# A statement of its own: it sees what was committed while the one above waited for the row.
_IS_HELD = (
    f"SELECT EXISTS (SELECT 1 FROM {_EXECUTIONS} WHERE session_id = %s AND finished_at IS NULL"  # noqa: S608
    " AND context = %s AND NOT background)"
)


_USE = (
    f"UPDATE {_SESSIONS} SET used_at = {{now}}, {_TOUCH}"  # noqa: S608
    " WHERE id = %s AND closed_at IS NULL"
)


def take_turn(session_id: UUID, context: str) -> tuple[int, bool] | None:
    """The next turn of an open session, and whether an earlier one still holds its context.

    Within the transaction that inserts the execution, so that nobody comes in between. None for a
    session that is not open.
    """
    key = Session._meta.pk.get_db_prep_save(session_id, connection)
    with connection.cursor() as cursor:
        cursor.execute(_TAKE_TURN.format(now=NOW[connection.vendor]), [key])
        taken = cursor.fetchone()
        if taken is None:
            return None
        if not context:
            return taken[0], False
        cursor.execute(_IS_HELD, [key, context])
        return taken[0], bool(cursor.fetchone()[0])


def use_session(session_id: UUID, wakes: int | None = None) -> bool:
    """Count the idle time of a session that is open from now; what it has may be unsaved by now.

    With `wakes` only if it has the sandbox that it has had since it was woken so often. Whether it
    was so.
    """
    key = Session._meta.pk.get_db_prep_save(session_id, connection)
    sql, values = _USE.format(now=NOW[connection.vendor]), [key]
    if wakes is not None:
        sql, values = f"{sql} AND state = 'open' AND wakes = %s", [key, wakes]
    with connection.cursor() as cursor:
        cursor.execute(sql, values)
        return bool(cursor.rowcount == 1)
