"""Saving behind the answer: by a few threads of this process, and each session once at a time.

Nothing is remembered here. What a process leaves unsaved when it dies is in the database, and the
schedule takes it up.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future
from uuid import UUID

from executions.kernel import background
from executions.kernel.coroutines import wait_for
from executions.runs import active_runs
from executions.runs.models import Execution
from executions.runs.requests import Conflict
from executions.sessions.ending import mark_lost
from executions.sessions.models import Session
from executions.sessions.storage.file_saves import Saved, save
from providers.errors import KeptSandboxLost, SandboxError
from providers.waiting import within

logger = logging.getLogger(__name__)

# An answer waits so long for its save, which then goes on behind it.
ANSWER_SECONDS = 60.0


def save_soon(session_id: UUID, tenant_slug: str, *, first: bool = False) -> Future[Saved | None]:
    """A save of the session that begins after this; None where it could not be saved now, which
    its workspace says, and the schedule tries again.
    """
    return background.submit_keyed(session_id, tenant_slug, lambda: saved(session_id), first=first)


async def saved_after(execution: Execution, session: Session) -> None:
    """What is to be saved when something has run in a session; `execution` says whether it was."""
    execution.files_saved = False
    saved = await saved_behind(session)
    if saved is not None:
        execution.files_saved = saved.is_complete
        execution.changed_files = saved.changed


async def saved_behind(session: Session) -> Saved | None:
    """Have a session saved behind the answer; where it is to be saved before, what that did."""
    if session.saves == Session.Saves.NEVER or session.ref is None:
        return None
    is_waited_for = session.saves == Session.Saves.ANSWER
    saved = save_soon(session.pk, session.tenant_slug, first=is_waited_for)
    if not is_waited_for:
        return None
    awaited = within(ANSWER_SECONDS, saved)
    with active_runs.cancel_on_shutdown(awaited):
        await wait_for(awaited)
    if awaited.cancelled() or awaited.exception() is not None:
        return None
    return awaited.result()


def saved(session_id: UUID) -> Saved | None:
    """As `save_soon`, in this thread. A sandbox that is found to be gone is noted."""
    session = Session.objects.defer("env").filter(pk=session_id).first()
    if session is None:
        return None
    try:
        return save(session)
    except KeptSandboxLost as error:
        mark_lost(session, error.message)
    except Conflict:
        # It has ended or sleeps: there is nothing to be saved.
        return None
    except SandboxError as error:
        logger.warning("session %s was not saved: %s", session_id, error.message)
    except Exception:
        logger.exception("session %s was not saved", session_id)
    return None
