"""The end of a session, whatever brought it: decided once, in the database, and entered."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable
from typing import Any
from uuid import UUID

from django.conf import settings
from django.db import transaction
from django.db.models import DateTimeField, DurationField, ExpressionWrapper, F, Func, Q
from django.db.models.functions import Now

from executions.kernel import background
from executions.kernel.coroutines import wait_for
from executions.ledger.append import enter_row, look_at
from executions.runs import event_log, event_stream
from executions.runs.models import Execution
from executions.runs.orphaned_runs import log_once
from executions.runs.record import complete_externally, log_execution
from executions.sessions import cell_order
from executions.sessions.models import Session, Workspace
from executions.sessions.session_sandbox import call_sandbox, collect_attempts, forget, is_gone
from executions.sessions.storage.carry_over import clean, give_back
from executions.sessions.storage.file_saves import save
from providers.errors import ConnectionFailed, KeptSandboxLost, SandboxError
from providers.sandbox import KeptSandbox
from providers.waiting import within

logger = logging.getLogger(__name__)

# How long it is waited for what runs in a session that is closed; the record is closed then.
PATIENCE_SECONDS = 5.0
RELEASE_SECONDS = 15.0
LAST_SAVE_SECONDS = 30.0
CLEANING_SECONDS = 10.0
_UNSAVED_LOST = "What had changed since then was lost with its sandbox."


class _Seconds(Func):
    """A column of seconds as a duration, which SQLite keeps as microseconds."""

    template = "make_interval(secs => %(expressions)s)"
    output_field = DurationField()

    def as_sqlite(self, compiler: Any, connection: Any, **context: Any) -> Any:
        return self.as_sql(compiler, connection, template="(%(expressions)s * 1000000)", **context)


def _before(column: str) -> ExpressionWrapper[Any]:
    """So many seconds ago, by the database's clock."""
    return ExpressionWrapper(Now() - _Seconds(F(column)), output_field=DateTimeField())


OVER_IDLE = Q(used_at__lt=_before("idle_seconds"))
OVER_AGE = Q(created_at__lt=_before("max_seconds"))
# Whose files are not kept: unused, they are closed. The others go to sleep.
SLEEPLESS = Q(saves=Session.Saves.NEVER) | Q(tenant=None) | Q(ref__isnull=True)
DUE = Q(closed_at=None) & (OVER_AGE | (OVER_IDLE & Q(state=Session.State.OPEN) & SLEEPLESS))


def busy(session_ids: Iterable[UUID]) -> set[UUID]:
    """Those in which something runs that somebody waits for."""
    found = Execution.objects.filter(
        session__in=list(session_ids), finished_at=None, background=False
    )
    return {pk for pk in found.values_list("session_id", flat=True) if pk is not None}


def close_if_due(session_id: UUID, *, is_saved: bool = False) -> bool:
    """Close a session that is over one of its ages, unless it is busy. Whether this call did.

    Where files outlive their session, one that has some to save is the schedule's to close, which
    saves it before: `is_saved`.
    """
    due = DUE if is_saved or settings.DELETE_S3_ON_CLEANUP else DUE & SLEEPLESS
    with transaction.atomic():
        # Whoever begins something in it writes its row first.
        rows = Session.objects.select_for_update().defer("env", "ref")
        session = rows.filter(due, pk=session_id).first()
        if session is None or busy([session_id]):
            return False
        is_old = Session.objects.filter(OVER_AGE, pk=session_id).exists()
        because = (
            f"it was {session.max_seconds} s old"
            if is_old
            else f"it was unused for {session.idle_seconds} s"
        )
        return _end(session, Session.State.CLOSED, because)


def close_if_idle(session_id: UUID, because: str) -> bool:
    """Close a session to make room, unless it is busy, or sleeps by now. Whether this call did."""
    with transaction.atomic():
        rows = Session.objects.select_for_update().defer("env", "ref")
        mine = rows.filter(SLEEPLESS, pk=session_id, closed_at=None, ref__isnull=False)
        session = mine.first()
        if session is None or busy([session_id]):
            return False
        return _end(session, Session.State.CLOSED, because)


async def close(session: Session, by: str) -> None:
    """Close it, with all that runs in it, which ends as cancelled. Closing it again is no error."""
    await save_before_end(session)
    with transaction.atomic():
        _end(session, Session.State.CLOSED, f"by {by}", by=by)
    await release(session)
    await _wait_for_runs(session)
    end_leftovers(session)
    pk = session.pk
    cleaned = background.submit_keyed(("clean", pk), session.tenant_slug, lambda: clean(pk))
    # What is not done by then is done all the same.
    await wait_for(within(CLEANING_SECONDS, cleaned))


async def save_before_end(session: Session) -> None:
    """Save the files that outlive the session before it ends, if they can be saved."""
    if not _outlives(session):
        return
    saved = background.submit_keyed(
        ("last", session.pk), session.tenant_slug, lambda: save(session)
    )
    awaited = within(LAST_SAVE_SECONDS, saved)
    await wait_for(awaited)
    if not awaited.cancelled() and (problem := awaited.exception()):
        logger.warning("session %s was not saved before it ended: %s", session.pk, problem)


def save_before_end_in_thread(session: Session) -> None:
    """Save the same from a thread for saved files. It must not wait for another of these: all of
    them may be waiting."""
    if not _outlives(session):
        return
    try:
        save(session)
    except Exception as problem:
        logger.warning("session %s was not saved before it ended: %s", session.pk, problem)


def _outlives(session: Session) -> bool:
    """Whether its files are to be there after it, and may have changed."""
    is_awake = session.state == Session.State.OPEN and session.ref is not None
    return is_awake and not settings.DELETE_S3_ON_CLEANUP


def fail(session: Session, because: str) -> None:
    """Close one that could not be opened."""
    with transaction.atomic():
        won = _end(session, Session.State.CLOSED, because)
        row = Session.objects.filter(pk=session.pk)
        row.update(process=None)
        if won:
            row.filter(ref__isnull=True).update(released_at=Now())


def abort_opening(session: Session) -> None:
    """Its process has ended: what that was opening is closed, what it was waking sleeps on.

    A process that lives all the same finds it so, and ends its sandbox.
    """
    with transaction.atomic():
        mine = Session.objects.filter(pk=session.pk, process=session.process_id)
        row = mine.select_for_update().first()
        if row is None:
            return
        if row.state == Session.State.OPEN and row.ref is None:
            fail(row, "it could not be opened: the process that did it ended")
        else:
            mine.update(waking_since=None, process=None)
    cell_order.notify(session.pk)


def mark_lost(session: Session, because: str) -> None:
    """Note that its sandbox is gone. What still waits for it hears of it.

    With something of it saved it sleeps from now on. A sandbox that it does not have any more may
    be gone: `session` is as it was when that was looked for.
    """
    with transaction.atomic():
        row = Session.objects.select_for_update().filter(pk=session.pk).first()
        if row is None or row.state != Session.State.OPEN or row.ref != session.ref:
            session.refresh_from_db()
            return
        left = in_background(row)
        if not _falls_asleep(row, because):
            _end(row, Session.State.LOST, because)
            # There is nothing left of it to be released.
            Session.objects.filter(pk=session.pk).update(released_at=Now())
    forget(session)
    session.refresh_from_db()
    end_leftovers(session, only=left)
    cell_order.notify(session.pk)


def _falls_asleep(session: Session, because: str) -> bool:
    """Within a transaction: let a session live on in what is saved of it, if anything is."""
    saved = Workspace.objects.filter(session=session.pk, saved_at__isnull=False).first()
    if saved is None or session.tenant_id is None or session.saves == Session.Saves.NEVER:
        return False
    lost = [[turn, turn] for turn in saved.open_turns]
    if session.turns > saved.seen_turns:
        lost.append([saved.seen_turns + 1, session.turns])
    if session.unsaved_since is not None or lost:
        # The first save after that says nothing of it any more.
        Workspace.objects.filter(pk=saved.pk).update(
            problem=_UNSAVED_LOST, lost_turns=[*(saved.lost_turns or []), *lost]
        )
    before = look_at(Session, session.pk)
    Session.objects.filter(pk=session.pk).update(
        state=Session.State.ASLEEP, ref=None, unsaved_since=None
    )
    asleep = Session.objects.get(pk=session.pk)
    enter_row(asleep, "asleep", before, {"because": because[:255]})
    logger.warning("session %s is asleep: its sandbox is gone: %s", session.pk, because)
    return True


async def detach(session: Session) -> None:
    """End the sandbox of a session that sleeps by now. One that stays ends by its own lease."""
    await collect_attempts(session, RELEASE_SECONDS)
    try:
        await call_sandbox(session, _close_sandbox, bool, RELEASE_SECONDS)
    except SandboxError as error:
        logger.warning("the sandbox of session %s is still there: %s", session.pk, error)
    forget(session)


async def release(session: Session) -> None:
    """Have its provider end the sandbox. What fails is tried again by the schedule."""
    if session.ref is not None:
        await collect_attempts(session, RELEASE_SECONDS)
        try:
            await call_sandbox(session, _close_sandbox, bool, RELEASE_SECONDS)
        except KeptSandboxLost:
            # Gone already.
            pass
        except SandboxError as error:
            if not isinstance(error, ConnectionFailed) or not is_gone(session, wait=False):
                logger.warning("the sandbox of session %s is still there: %s", session.pk, error)
                cell_order.notify(session.pk)
                return
    forget(session)
    Session.objects.filter(pk=session.pk, released_at=None).update(released_at=Now())
    cell_order.notify(session.pk)


def in_background(session: Session) -> list[UUID]:
    """What runs in its sandbox and nobody waits for. What has no number yet is still being started,
    maybe in its next sandbox: who starts it closes it."""
    found = Execution.objects.filter(
        session=session.pk, finished_at=None, background=True, pid__isnull=False
    )
    return list(found.values_list("pk", flat=True))


def end_leftovers(
    session: Session,
    *,
    only: Collection[UUID] | None = None,
    because: str = "Its session ended.",
) -> int:
    """End as cancelled what is still open of a session that has ended; `only` these of a sandbox
    that has. How many."""
    left = Execution.objects.filter(session=session.pk, finished_at=None)
    if only is not None:
        left = left.filter(pk__in=only)
    ended = 0
    for execution in left.defer("pending", "code", "arguments"):
        if event_log.take(execution.pk)():
            ended += 1
            continue
        # One that was claimed meanwhile is read again, and closed as it is then.
        while execution.is_open:
            if complete_externally(
                execution, Execution.Status.CANCELLED, {"error_message": because}
            ):
                log_execution(execution)
                ended += 1
    return ended


def _end(session: Session, state: Session.State, because: str, by: str = "") -> bool:
    """Within a transaction. False when it had ended."""
    before = look_at(Session, session.pk)
    row = Session.objects.filter(pk=session.pk, closed_at=None)
    won = row.update(state=state, closed_at=Now(), closed_because=because[:255])
    session.refresh_from_db(fields=["state", "closed_at", "closed_because"])
    if won:
        give_back(session)
        enter_row(session, state.value, before, {"by": by} if by else None)
        logger.info("session %s is %s: %s", session.pk, state.value, because)
    return bool(won)


def _close_sandbox(sandbox: KeptSandbox) -> bool:
    return sandbox.close()


async def _wait_for_runs(session: Session) -> None:
    running = Execution.objects.filter(
        session=session.pk, finished_at=None, background=False, status=Execution.Status.RUNNING
    )
    until = time.monotonic() + PATIENCE_SECONDS
    for execution_id in list(running.values_list("pk", flat=True)):
        await event_stream.wait_for_end(execution_id, max(0.0, until - time.monotonic()))


_AT_ONCE = 100


def abort_unfinished() -> None:
    """End the sessions that processes were opening or waking which have ended."""
    left = Session.objects.filter(process__isnull=False, process__ended_at__isnull=False)
    for session in left.defer("env")[:_AT_ONCE]:
        with log_once("session", session.pk):
            abort_opening(session)
