"""Running code in a session: what a request becomes there, and what is recorded beside the rest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any
from uuid import UUID

from executions.kernel.coroutines import Coroutine
from executions.kernel.declarations import refuse
from executions.runs.extensions import Placement
from executions.runs.models import Execution
from executions.runs.provider_calls import Step
from executions.runs.requests import Caller, ExecutionRequest
from executions.runs.results import ValidatedResult
from executions.sessions.ending import mark_lost
from executions.sessions.models import Session
from executions.sessions.queries import session_of
from executions.sessions.requests import SessionAsleep, SessionClosed, SessionLost, ensure_not_ended
from executions.sessions.session_sandbox import SandboxRunner, route_in
from executions.sessions.storage.background_saves import saved_after
from executions.sessions.storage.wake import (
    RESTORED,
    ensure_awake,
    is_first_after_wake,
    wake_is_told,
)
from providers.errors import KeptSandboxLost, SandboxError
from providers.languages import normalize_language
from providers.sandbox import DEFAULT_CONTEXT
from providers.values import SANDBOX_ENDED, ExecutionResult

# The key of a result's metadata under which it says whether its context still has its state.
CONTEXT_KEPT = "context_kept"
# The same, of the process that a command was.
PID = "pid"


def step_in(
    session: Session, context: str, env: Mapping[str, str], runs: SandboxRunner | None = None
) -> Step:
    """Return the step that lends the session's sandbox. See `route_in`."""
    return Step(route_in(session, context, env, runs), host=SessionHost(session))


def cell_of(session_id: UUID, request: ExecutionRequest, caller: Caller) -> Placement:
    """Return the request as it runs in its session, and where.

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
    return Placement(placed, [step_in(session, context, request.env)])


def steps_of_queued(session_id: UUID, request: ExecutionRequest) -> Sequence[Step]:
    """Return where a queued request of a session runs. Raises Conflict for one that has ended."""
    session = Session.objects.get(pk=session_id)
    ensure_not_ended(session)
    return [step_in(session, request.context, request.env)]


def language_of(session: Session, context: str) -> str | None:
    return next((each["language"] for each in session.contexts if each["id"] == context), None)


class SessionHost:
    """A session as the owner of its sandbox (`runs.provider_calls.Host`).

    `session` is as it was when its sandbox was lent.
    """

    def __init__(self, session: Session) -> None:
        self._session = session

    @property
    def provider(self) -> str:
        return self._session.provider

    async def run(
        self, execution: Execution, run: Callable[[], Coroutine[ValidatedResult]]
    ) -> ValidatedResult:
        """Run it; a session that sleeps is woken before, also where its sandbox is just gone."""
        session = self._session
        if session.state == Session.State.ASLEEP:
            await ensure_awake(session, execution.turn)
        try:
            return await run()
        except KeptSandboxLost as error:
            if error.started:
                raise
            # Nothing ran, and nothing is lost of what was saved.
            mark_lost(session, error.message)
            if not session.is_living:
                raise
            await ensure_awake(session, execution.turn)
            return await run()

    def end_of(self, error: SandboxError) -> SandboxError:
        """Return what to tell: the session was closed meanwhile, or is lost, or has only what was
        saved of it."""
        if isinstance(error, KeptSandboxLost):
            mark_lost(self._session, error.message)
        try:
            ensure_not_ended(self._session)
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

    def result_values(self, execution: Execution, result: ExecutionResult) -> dict[str, Any]:
        ended = SANDBOX_ENDED in result.metadata
        if ended:
            mark_lost(self._session, "its sandbox ended during a run")
        kept = result.metadata.get(CONTEXT_KEPT)
        if execution.context:
            return {"context_kept": kept is True and not ended}
        pid = result.metadata.get(PID)
        return {"pid": pid} if type(pid) is int and 0 < pid < 2**53 else {}

    def result_metadata(self, execution: Execution) -> Mapping[str, Any]:
        return {RESTORED: True} if is_first_after_wake(self._session, execution) else {}

    def note_recorded(self, metadata: Mapping[str, Any]) -> None:
        if RESTORED in metadata:
            wake_is_told(self._session)

    def after_run(self, execution: Execution) -> Coroutine[None]:
        return saved_after(execution, self._session)
