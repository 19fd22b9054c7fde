"""Running code, and cancelling it: the one path from a valid request to a completed record."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from time import perf_counter

from django.db import transaction

from executions.capabilities.observability import telemetry
from executions.capabilities.policies.active import rules_for
from executions.capabilities.policies.approvals import ask_for
from executions.capabilities.policies.enforcement import PolicyCheck
from executions.kernel.coroutines import Coroutine, run_sync
from executions.kernel.database import DatabaseUnavailable, problem_of
from executions.ledger.append import append
from executions.ledger.entry import require_ledger
from executions.runs import active_runs, heartbeat, journal, polling
from executions.runs.active_runs import message_for
from executions.runs.admission import Demand, ensure_within_bounds
from executions.runs.attempt import Attempt, Cancelled
from executions.runs.event_log import EventLog, resolve
from executions.runs.listing import log_execution
from executions.runs.models import Execution
from executions.runs.record import Beside, Caller, Outcome, complete_externally, open_record
from executions.runs.requests import ExecutionRequest
from executions.runs.results import ValidatedResult
from executions.runs.routes import Route, Step
from executions.runs.routing import allowed_steps, ensure_supported, steps_for
from executions.runs.signal_models import RunSignal
from executions.sessions import cell_order
from executions.sessions.cells import cell_of
from executions.sessions.command_ends import stopping
from executions.sessions.ending import mark_lost
from executions.sessions.models import Session
from executions.sessions.requests import SessionClosed
from executions.sessions.storage.background_saves import saved_after
from executions.sessions.storage.wake import ensure_awake
from providers.errors import (
    InvalidConfiguration,
    KeptSandboxLost,
    ProviderUnavailable,
    SandboxError,
)

logger = logging.getLogger(__name__)


def run_execution(
    request: ExecutionRequest, caller: Caller, *, route: Route | None = None
) -> Outcome:
    """As `running`, waited for in this thread."""
    return run_sync(running(request, caller, route=route))


def running(
    request: ExecutionRequest,
    caller: Caller,
    *,
    route: Route | None = None,
    step: Step | None = None,
    log: EventLog | None = None,
    waits: bool = False,
    beside: Beside | None = None,
) -> Coroutine[Outcome]:
    """Record, run or queue, and complete the record.

    `route` lends one certain provider; without it the routes of the admin decide. `step` is what
    lends the sandbox of the request's session to a command. Raises
    InvalidConfiguration for a language that is not served, BeyondKey for what the caller's key is
    not for, LedgerUnavailable while the ledger takes no entry, and what `open_record` does; then
    nothing was recorded. Whatever happens after that is in the outcome. `log` is told what comes of
    the run while it runs; it does not begin where nothing is run now. With `waits` the caller takes
    a queued one for an answer, where somebody has to approve it first. `beside` writes in the
    transaction that records it, and what it raises is raised.
    """
    began = perf_counter()
    steps: Sequence[Step]
    if step is not None:
        steps = [step]
    elif request.session is not None:
        request, steps = cell_of(request.session, request, caller)
    else:
        steps = steps_for(request.language, caller.tenant.slug, route, chosen=request.provider)
    steps = allowed_steps(caller, request.language, steps)
    if step is None and request.session is None:
        ensure_supported(request.language, steps)
    require_ledger()
    request, ask = yield from _to_be_approved(
        request, caller, waits and route is None and step is None
    )
    try:
        execution, is_new = open_record(request, caller, _both(beside, ask))
    except DatabaseUnavailable as away:
        journal.keep_unrun(away)
        raise
    if not is_new:
        return Outcome(execution)
    if telemetry.traces is not None:
        telemetry.traces.admitted(execution, began)
    if request.mode == Execution.Mode.ASYNC:
        # Its committed row is all that a worker needs to find it.
        return Outcome(execution)
    return (yield from carry_out(execution, request, steps, began=began, log=log))


def _to_be_approved(
    request: ExecutionRequest, caller: Caller, may_wait: bool
) -> Coroutine[tuple[ExecutionRequest, Beside | None]]:
    """The request as it is recorded, and what else is where somebody has to approve it first."""
    if not (may_wait or request.mode == Execution.Mode.ASYNC) or caller.replay_of is not None:
        return request, None
    held = PolicyCheck(rules_for(caller.tenant.slug), caller.tenant.slug)
    if not held.asks:
        return request, None
    if request.idempotency_key is None:
        # No code is looked at for a tenant that may have no more anyway.
        ensure_within_bounds(caller.tenant, Demand(Execution.Status.QUEUED, request.longest))
    found = yield from held.asking(request)
    if found is None:
        return request, None
    queued = request.queued()
    return queued, lambda execution: ask_for(execution, queued, found)


def _both(first: Beside | None, second: Beside | None) -> Beside | None:
    if first is None or second is None:
        return first or second

    def write(execution: Execution) -> None:
        first(execution)
        second(execution)

    return write


def carry_out(
    execution: Execution,
    request: ExecutionRequest,
    steps: Sequence[Step],
    *,
    began: float,
    waited_ms: float = 0.0,
    log: EventLog | None = None,
) -> Coroutine[Outcome]:
    """Run a recorded execution and complete its row, however it ends.

    The outcome's error is DatabaseUnavailable where the row could not be completed now (see
    `journal`). `began` is the `perf_counter` to measure from, `waited_ms` what passed before it in
    a queue.
    """
    attempt = Attempt(execution, request, began, waited_ms, log)
    with active_runs.track(attempt):
        if log is not None:
            log.begin(execution.pk)
        try:
            outcome = yield from _ended(attempt, steps)
        except DatabaseUnavailable as away:
            outcome = Outcome(execution, error=away)
        finally:
            if log is not None:
                log.finish()
                resolve([log.closed])
            cell_order.ended(execution)
        if attempt.session is not None:
            yield from saved_after(execution, attempt.session)
        return outcome


def _run(attempt: Attempt, steps: Sequence[Step]) -> Coroutine[ValidatedResult]:
    """Run it; in a session that sleeps, in the sandbox that it is woken with."""
    session = attempt.session = steps[0].session if steps else None
    if session is None:
        return (yield from attempt.run(steps))
    if session.state == Session.State.ASLEEP:
        yield from ensure_awake(session, attempt.execution.turn)
    try:
        return (yield from attempt.run(steps))
    except KeptSandboxLost as error:
        if error.started:
            raise
        # Nothing ran, and nothing is lost of what was saved.
        mark_lost(session, error.message)
        if not session.is_living:
            raise
        yield from ensure_awake(session, attempt.execution.turn)
        return (yield from attempt.run(steps))


def _ended(attempt: Attempt, steps: Sequence[Step]) -> Coroutine[Outcome]:
    try:
        attempt.held = PolicyCheck.of_execution(attempt.execution)
        yield from attempt.held.to_request(attempt.request, attempt.execution, attempt.in_line)
        steps = attempt.held.steps(steps)
        yield from cell_order.wait_turn(attempt.execution, attempt.in_line)
        return attempt.end_with_result((yield from _run(attempt, steps)))
    except DatabaseUnavailable:
        raise
    except Cancelled as error:
        return attempt.end_cancelled(error)
    except (SessionClosed, KeptSandboxLost) as error:
        return attempt.end_with_session(error)
    except SandboxError as error:
        return attempt.end_with_error(error)
    except heartbeat.OwnershipLost as error:
        lost = ProviderUnavailable(str(error))
        if attempt.execution.pending is not None:
            # In the queue again, or another's already. Whoever has it now ends it.
            return Outcome(attempt.execution, error=lost)
        return attempt.end_with_error(lost)
    except Exception as error:
        logger.exception("execution %s failed inside the service", attempt.execution.pk)
        reason = problem_of(error) or "The execution failed inside the service."
        return attempt.end_with_error(
            ProviderUnavailable(f"{reason} The log has the details.", started=attempt.handed_over)
        )


# How long the process that runs it, which looks once a second, may take until its record is closed.
PATIENCE_SECONDS = 5.0


class HasEnded(InvalidConfiguration):
    """There is nothing left to be cancelled."""

    @property
    def http_status(self) -> int:
        return 409


def cancelling(execution: Execution, asked_by: str) -> Coroutine[Execution]:
    """The execution, ended as `cancelled`. `asked_by` is who wants it, as in `key:PREFIX`.

    One that is cancelled already is returned as it is. Raises HasEnded for one that ended in
    another way, also where it did so meanwhile.
    """
    if execution.status == Execution.Status.QUEUED and _close(
        execution, asked_by, only_if=Execution.Status.QUEUED
    ):
        return execution
    if execution.is_open:
        _ask(execution, asked_by)
        if execution.background:
            yield from stopping(execution)
            execution.refresh_from_db()
        else:
            yield from polling.until_ended(execution.pk, PATIENCE_SECONDS)
            execution.refresh_from_db()
        # It may have gone back to the queue, or be another process's by now.
        while execution.is_open:
            _close(execution, asked_by)
    if execution.status != Execution.Status.CANCELLED:
        raise HasEnded(f"The execution has ended: {execution.status}.")
    return execution


def _ask(execution: Execution, asked_by: str) -> None:
    with transaction.atomic():
        if active_runs.post_request(execution.pk, RunSignal.Kind.CANCEL, asked_by):
            _enter(execution, asked_by)
    if run := active_runs.find(execution.pk):
        run.cancel(asked_by)


def _close(execution: Execution, asked_by: str, *, only_if: str = "") -> bool:
    with transaction.atomic():
        message = message_for(asked_by)
        if execution.background:
            message += " Whether its process has ended is not known."
        changes = {"error_message": message}
        won = complete_externally(execution, Execution.Status.CANCELLED, changes, only_if=only_if)
        if won and only_if:
            _enter(execution, asked_by)
    if won:
        log_execution(execution)
    return won


def _enter(execution: Execution, asked_by: str) -> None:
    append("cancellation", str(execution.pk), {"actor": asked_by})
