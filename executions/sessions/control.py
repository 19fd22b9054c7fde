"""What is done to a session besides running something in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from django.db import transaction
from django.db.models import Q
from django.db.models.functions import Now

from executions.kernel.declarations import refuse
from executions.kernel.text import storable
from executions.ledger.append import enter_row, look_at
from executions.runs import output_collector
from executions.runs.requests import Conflict
from executions.sessions.cell_order import use_session
from executions.sessions.due import ends
from executions.sessions.ending import end_leftovers, in_background, mark_lost
from executions.sessions.models import Session
from executions.sessions.requests import (
    ContextRequest,
    SessionAsleep,
    SessionChanges,
    ensure_not_ended,
)
from executions.sessions.session_sandbox import OPERATION_SECONDS, call_sandbox
from executions.sessions.shapes import ContextShape
from executions.sessions.storage.background_saves import saved_behind
from executions.sessions.storage.wake import ensure_awake
from providers.errors import KeptSandboxLost, ProviderUnavailable
from providers.guest.names import escape
from providers.sandbox import DEFAULT_CONTEXT, Context, KeptSandbox

T = TypeVar("T")

# It sleeps, and nobody has begun to wake it with what it had before.
_SLEEPS = Q(state=Session.State.ASLEEP, waking_since=None)


async def with_sandbox(
    session: Session,
    call: Callable[[KeptSandbox], Any],
    check: Callable[[Any], T],
    seconds: float = OPERATION_SECONDS,
    *,
    is_use: bool = True,
    changes_files: bool = False,
    saves: bool = True,
) -> T:
    """What the session's sandbox answers to `call`; its idle time counts from now, if it `is_use`,
    and if it sleeps it is woken. What `changes_files` is saved, before or behind the answer;
    without `saves` the caller has it saved, once for several.

    Raises SandboxError; where the sandbox is gone, SessionLost, or SessionAsleep where something of
    it is saved. What has proven not to have begun in one that is gone is begun once more.
    """
    for is_last in (False, True):
        if session.state == Session.State.ASLEEP:
            if not is_use:
                raise SessionAsleep("The session is asleep: it has no sandbox.")
            await ensure_awake(session)
        if changes_files:
            use_session(session.pk)
        elif is_use:
            Session.objects.filter(pk=session.pk, closed_at=None).update(used_at=Now())
        try:
            found = await call_sandbox(session, call, check, seconds)
        except KeptSandboxLost as error:
            mark_lost(session, error.message)
            ensure_not_ended(session)
            if is_last or not is_use or not error.nothing_ran:
                raise SessionAsleep(
                    f"{error.message} The next use of the session restores the saved files. Send "
                    "the request again."
                ) from error
        else:
            break
    if changes_files:
        # It went to sleep meanwhile, and nobody can say whether this was saved with the rest.
        if not use_session(session.pk, session.wakes):
            raise SessionAsleep("The session went to sleep meanwhile. Send the request again.")
        if saves:
            await saved_behind(session)
    return found


async def interrupting(session: Session, context: str = DEFAULT_CONTEXT) -> bool:
    """Stop what runs in a context, whose state stays. False when nothing ran."""
    _refuse_unknown(session, context, "context")
    return await with_sandbox(session, lambda kept: kept.interrupt(context), _boolean)


async def resetting(session: Session, by: str) -> Session:
    """End its processes and contexts, and begin with an empty default one. Files stay."""
    running = in_background(session)
    # Before they are killed, which is not how they are to be recorded.
    ends = [output_collector.take(pk) for pk in running]
    await with_sandbox(session, lambda kept: kept.reset(), lambda _: None)
    for end in ends:
        end()
    with transaction.atomic():
        row = Session.objects.filter(pk=session.pk, closed_at=None)
        default = {"id": DEFAULT_CONTEXT, "language": session.language, "cwd": ""}
        before = look_at(Session, session.pk)
        if row.update(contexts=[default], used_at=Now()):
            session.refresh_from_db()
            enter_row(session, "reset", before, {"by": by})
    end_leftovers(session, only=running, because="Its session was reset.")
    session.refresh_from_db()
    ensure_not_ended(session)
    return session


def change(
    session: Session, changes: SessionChanges, by: str, *, if_awake: bool = False
) -> Session:
    """Give it other ages or metadata. Raises Conflict where it has ended, and SessionAsleep where
    it sleeps and is to be changed only `if_awake`."""
    with transaction.atomic():
        row = Session.objects.filter(pk=session.pk, closed_at=None)
        if if_awake:
            row = row.exclude(state=Session.State.ASLEEP)
        before = look_at(Session, session.pk)
        won = row.update(**changes.given, used_at=Now())
        session.refresh_from_db()
        if won and changes.given:
            enter_row(session, "changed", before, {"by": by})
    ensure_not_ended(session)
    if not won:
        raise SessionAsleep("The session sleeps.")
    ends.expect([session])
    return session


async def creating_context(session: Session, wanted: ContextRequest) -> ContextShape:
    """Another interpreter of the session. Raises Conflict where its id is taken."""
    if any(each["id"] == wanted.id for each in session.contexts):
        raise Conflict("id: The session already has a context with this id.", field="id")
    made = await with_sandbox(
        session,
        lambda kept: kept.contexts.create(wanted.language, wanted.cwd, wanted.id),
        _context,
    )
    _write_contexts(
        session, lambda known: [*(each for each in known if each["id"] != made["id"]), made]
    )
    return made


async def ending_context(session: Session, context_id: str) -> bool:
    """End one of its interpreters. False when it was not there. One that sleeps is not woken: its
    next sandbox does not get it.
    """
    if all(each["id"] != context_id for each in session.contexts):
        return False

    def without(known: list[ContextShape]) -> list[ContextShape]:
        return [each for each in known if each["id"] != context_id]

    if context_id == DEFAULT_CONTEXT or not _write_contexts(session, without, only_if=_SLEEPS):
        await with_sandbox(session, lambda kept: kept.contexts.destroy(context_id), _boolean)
        _write_contexts(session, without)
    return True


async def restarting_context(session: Session, context_id: str) -> ContextShape | None:
    """Begin anew in a context, under its id. None when it is not there."""
    contexts: list[ContextShape] = session.contexts
    known = next((each for each in contexts if each["id"] == context_id), None)
    if known is None:
        return None
    await with_sandbox(session, lambda kept: kept.contexts.restart(context_id), lambda _: None)
    return {**known}


def _write_contexts(
    session: Session,
    anew: Callable[[list[ContextShape]], list[ContextShape]],
    *,
    only_if: Q | None = None,
) -> bool:
    """False where it is not as `only_if` says, and nothing was written."""
    with transaction.atomic():
        rows = Session.objects.select_for_update().defer("env", "ref")
        row = rows.filter(only_if or Q(), pk=session.pk).first()
        if row is None:
            return False
        row.contexts = anew(row.contexts)
        Session.objects.filter(pk=session.pk).update(contexts=row.contexts)
    session.contexts = row.contexts
    return True


def _refuse_unknown(session: Session, context: Any, field: str) -> None:
    if all(each["id"] != context for each in session.contexts):
        refuse(field, "The session has no context with this id.")


def _boolean(answer: Any) -> bool:
    return answer is True


def _context(answer: Any) -> ContextShape:
    if not isinstance(answer, Context) or not isinstance(answer.id, str) or not answer.id:
        raise ProviderUnavailable("The provider did not return a context.")
    return {
        "id": storable(answer.id)[:64],
        "language": storable(str(answer.language))[:32],
        "cwd": escape(str(answer.cwd))[:512],
    }
