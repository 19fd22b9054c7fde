"""Who is next in a session: its row counts who comes, and the rows before one's own are waited for.

So the order is the database's, over all processes. Runs of different contexts do not wait for one
another, and commands wait for nobody.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any

from django.conf import settings
from django.db.models import OuterRef, Subquery

from executions.kernel.coroutines import Waits
from executions.models.session import Session
from executions.runs import active_runs, polling, statements
from executions.runs.event_log import Moment, tell
from executions.runs.models import Execution
from executions.services.sessions import bells
from executions.services.sessions.errors import Conflict, refuse_ended
from providers.waiting import within


def take(execution: Execution) -> None:
    """Give a new execution its place, in the transaction that inserts it.

    Raises SessionLost, SessionClosed, or Conflict for a session that is still being opened.
    """
    if (session_id := execution.session_id) is None:
        return
    taken = statements.take_turn(session_id, execution.context)
    if taken is None:
        session = Session.objects.defer("env", "ref").get(pk=session_id)
        refuse_ended(session)
        raise Conflict("The session is still being opened. Try again.", retry_after=1)
    execution.turn, execution.is_held = taken


def turn_of(
    execution: Execution, waiting: Callable[[Future[Any]], AbstractContextManager[None]]
) -> Waits[None]:
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
        with bells.hung(session_id) as bell:
            found = session.annotate(holder=Subquery(last)).get()
            refuse_ended(found)
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
            record = polling.Waiter(found.holder, is_urgent=True)
            awaited = within(left, _first_of(bell, record.ended))
            with (
                polling.poll.joined(record),
                active_runs.given_up_at_the_end(awaited),
                waiting(awaited),
            ):
                yield awaited
        active_runs.refuse_when_ending()


def _first_of(bell: Future[None], end: Moment) -> Future[None]:
    come: Future[None] = Future()
    bell.add_done_callback(lambda _: tell([come]))
    end.bring(come)
    return come


def ended(execution: Execution) -> None:
    """Let the next one go on, and count the session's idle time from now."""
    if execution.session_id is not None:
        statements.use_session(execution.session_id)
        bells.ring(execution.session_id)
