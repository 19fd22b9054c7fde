"""Running code in a session: what a request becomes there, and what is recorded beside the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from uuid import UUID

from executions.kernel.declarations import refuse
from executions.runs.models import Execution
from executions.runs.record import Caller
from executions.runs.requests import ExecutionRequest
from executions.runs.routes import Step
from executions.runs.routing import steps_for
from executions.sessions.ending import mark_lost
from executions.sessions.models import Session
from executions.sessions.queries import session_of
from executions.sessions.requests import SessionAsleep, SessionClosed, SessionLost, refuse_ended
from executions.sessions.session_sandbox import step_in
from providers.errors import KeptSandboxLost, SandboxError
from providers.languages import normalize_language
from providers.sandbox import DEFAULT_CONTEXT
from providers.values import SANDBOX_ENDED, ExecutionResult

# The key of a result's metadata under which it says whether its context still has its state.
CONTEXT_KEPT = "context_kept"
# The same, of the process that a command was.
PID = "pid"


def cell_of(
    session_id: UUID, request: ExecutionRequest, caller: Caller
) -> tuple[ExecutionRequest, list[Step]]:
    """The request as it runs in its session, and where.

    Raises NoSuchSession and InvalidConfiguration. That the session has ended is said where the
    record is opened: of a request that is known there is one to be told.
    """
    session = session_of(caller.tenant, session_id)
    context = request.context or DEFAULT_CONTEXT
    language = language_of(session, context)
    if language is None:
        refuse("context", "The session has no context with this id.")
    named = normalize_language(request.language)
    if named and named != normalize_language(language):
        refuse("language", f"The context {context!r} runs {language}. Name one that runs {named}.")
    subject = request.subject or session.subject
    placed = replace(request, context=context, language=language, subject=subject)
    return placed, [step_in(session, context, request.env, None)]


def steps_of(request: ExecutionRequest, tenant_slug: str) -> Sequence[Step]:
    """Where a request that was queued is to run. Raises Conflict for a session that has ended, and
    InvalidConfiguration for a provider that cannot be chosen any more."""
    if request.session is None:
        return steps_for(request.language, tenant_slug, chosen=request.provider)
    session = Session.objects.get(pk=request.session)
    refuse_ended(session)
    return [step_in(session, request.context, request.env, None)]


def language_of(session: Session, context: str) -> str | None:
    return next((each["language"] for each in session.contexts if each["id"] == context), None)


def end_of(session: Session, error: SandboxError) -> SandboxError:
    """What to tell of a run whose sandbox is gone: the session was closed meanwhile, or is lost, or
    has only what was saved of it.

    `session` is as it was when its sandbox was lent.
    """
    if isinstance(error, KeptSandboxLost):
        mark_lost(session, error.message)
    try:
        refuse_ended(session)
    except SessionClosed:
        return SessionClosed("Its session was closed.", started=error.started)
    except SessionLost as lost:
        return SessionLost(lost.message, started=error.started)
    if isinstance(error, KeptSandboxLost):
        return SessionAsleep(
            f"{error.message} The next use of the session restores the saved files, but no "
            "variables. Changes made by this run may be lost.",
            started=error.started,
        )
    return error


def facts_of_cell(
    execution: Execution, result: ExecutionResult, session: Session | None
) -> dict[str, Any]:
    """What a record says of its place in a session, once it has a result."""
    if session is None:
        return {}
    ended = SANDBOX_ENDED in result.metadata
    if ended:
        mark_lost(session, "its sandbox ended during a run")
    kept = result.metadata.get(CONTEXT_KEPT)
    if execution.context:
        return {"context_kept": kept is True and not ended}
    pid = result.metadata.get(PID)
    return {"pid": pid} if type(pid) is int and 0 < pid < 2**53 else {}
