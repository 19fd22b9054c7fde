"""A session lets its sandbox go, and keeps its files: only when all of them are saved."""

from __future__ import annotations

import logging
from uuid import UUID

from django.db import transaction
from django.db.models import Q

from executions.kernel import background
from executions.kernel.coroutines import run_sync, wait_for
from executions.ledger.append import enter_row, look_at
from executions.runs.models import Execution
from executions.sessions import cell_order
from executions.sessions.ending import (
    OVER_AGE,
    OVER_IDLE,
    busy,
    detach,
    end_leftovers,
    in_background,
    mark_lost,
)
from executions.sessions.models import Session
from executions.sessions.storage.file_saves import Saved, save
from executions.sessions.storage.models import Workspace
from providers.errors import KeptSandboxLost

logger = logging.getLogger(__name__)

# What is to sleep by its age; others are closed.
TIRED = (
    Q(state=Session.State.OPEN, ref__isnull=False, tenant__isnull=False)
    & ~Q(saves=Session.Saves.NEVER)
    & OVER_IDLE
    & ~OVER_AGE
)


def suspend(session_id: UUID, because: str, *, only_if: Q | None = None) -> bool:
    """Save all of a session's files and end its sandbox, unless something runs in it or begins to.

    Whether this call did. Waits, in the calling thread. Raises what `save` does; the sandbox is
    then still there.
    """
    condition = only_if or Q()
    found = Session.objects.filter(condition, pk=session_id, state=Session.State.OPEN)
    session = found.defer("env").first()
    if session is None or busy([session_id]):
        return False
    try:
        saved = save(session, thorough=True)
    except KeptSandboxLost as error:
        mark_lost(session, error.message)
        return False
    if not saved.is_complete:
        return False
    left = _fallen_asleep(session, saved, because, condition)
    if left is None:
        return False
    logger.info("session %s is asleep: %s", session_id, because)
    run_sync(detach(session))
    # It may have been woken meanwhile, and more be running in its next sandbox.
    end_leftovers(session, only=left, because="Its session went to sleep.")
    cell_order.notify(session_id)
    return True


async def sleeping(session: Session, because: str) -> bool:
    """`suspend`, for who does something else meanwhile."""
    pk = session.pk
    slept = background.submit_keyed(
        ("sleep", pk), session.tenant_slug, lambda: suspend(pk, because), first=True
    )
    await wait_for(slept)
    return slept.result()


def _fallen_asleep(session: Session, saved: Saved, because: str, condition: Q) -> list[UUID] | None:
    """What ran in its sandbox in the background; None where it stays awake."""
    with transaction.atomic():
        # Whoever begins something in it writes its row first.
        rows = Session.objects.select_for_update().defer("env", "ref")
        mine = rows.filter(
            condition,
            pk=session.pk,
            state=Session.State.OPEN,
            touched=saved.touched,
            wakes=saved.wakes,
        )
        if mine.first() is None or busy([session.pk]):
            return None
        left = in_background(session)
        before = look_at(Session, session.pk)
        Session.objects.filter(pk=session.pk).update(
            state=Session.State.ASLEEP, ref=None, unsaved_since=None
        )
        _note_cut_off(session)
        enter_row(Session.objects.get(pk=session.pk), "asleep", before, {"because": because})
    return left


def _note_cut_off(session: Session) -> None:
    """What still runs in the background ends with the sandbox: nobody can say that the last it
    wrote is saved."""
    left = Execution.objects.filter(session=session.pk, finished_at=None, turn__isnull=False)
    if turns := list(left.values_list("turn", flat=True)):
        workspace = Workspace.objects.get(session=session.pk)
        lost = [*(workspace.lost_turns or []), *([turn, turn] for turn in turns)]
        Workspace.objects.filter(pk=workspace.pk).update(lost_turns=lost)
