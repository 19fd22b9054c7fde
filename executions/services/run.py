"""Running code: the one path from a valid request to a completed record.

Nothing here holds a thread while a sandbox is waited for, a program runs or a sandbox is ended:
there the work yields the future it waits for (`services.waiting`). The database is touched only
in between.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from time import perf_counter

from executions.kernel.coroutines import Waits, wait_for
from executions.kernel.database import DatabaseAway, problem_of
from executions.ledger.entry import require_ledger
from executions.models.execution import Execution
from executions.models.session import Session
from executions.services import journal, leases, ongoing, telemetry
from executions.services.attempt import Attempt, Cancelled
from executions.services.gate import Checked
from executions.services.key_bounds import allowed_steps
from executions.services.languages import refuse_unsupported
from executions.services.live import EventLog, tell
from executions.services.policies.approvals import ask_for
from executions.services.policies.enforcing import Held
from executions.services.policies.in_force import rules_for
from executions.services.record import (
    Beside,
    Caller,
    Outcome,
    open_record,
)
from executions.services.requests import ExecutionRequest
from executions.services.routes import Route, Step
from executions.services.routing import steps_for
from executions.services.sessions import turns
from executions.services.sessions.cells import cell_of
from executions.services.sessions.ending import lose
from executions.services.sessions.errors import SessionClosed
from executions.services.workspaces.background import saved_after
from executions.services.workspaces.waking import awake
from executions.tenants.quotas import Wanted, refuse_beyond_bounds
from providers.errors import KeptSandboxLost, ProviderUnavailable, SandboxError

logger = logging.getLogger(__name__)


def run_execution(
    request: ExecutionRequest, caller: Caller, *, route: Route | None = None
) -> Outcome:
    """As `running`, waited for in this thread."""
    return wait_for(running(request, caller, route=route))


def running(
    request: ExecutionRequest,
    caller: Caller,
    *,
    route: Route | None = None,
    step: Step | None = None,
    log: EventLog | None = None,
    waits: bool = False,
    beside: Beside | None = None,
) -> Waits[Outcome]:
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
        refuse_unsupported(request.language, steps)
    require_ledger()
    request, ask = yield from _to_be_approved(
        request, caller, waits and route is None and step is None
    )
    try:
        execution, is_new = open_record(request, caller, _both(beside, ask))
    except DatabaseAway as away:
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
) -> Waits[tuple[ExecutionRequest, Beside | None]]:
    """The request as it is recorded, and what else is where somebody has to approve it first."""
    if not (may_wait or request.mode == Execution.Mode.ASYNC) or caller.replay_of is not None:
        return request, None
    held = Held(rules_for(caller.tenant.slug), caller.tenant.slug)
    if not held.asks:
        return request, None
    if request.idempotency_key is None:
        # No code is looked at for a tenant that may have no more anyway.
        refuse_beyond_bounds(caller.tenant, Wanted(Execution.Status.QUEUED, request.longest))
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
) -> Waits[Outcome]:
    """Run a recorded execution and complete its row, however it ends.

    The outcome's error is DatabaseAway where the row could not be completed now (see `journal`).
    `began` is the `perf_counter` to measure from, `waited_ms` what passed before it in a queue.
    """
    attempt = Attempt(execution, request, began, waited_ms, log)
    with ongoing.counted(attempt):
        if log is not None:
            log.begin(execution.pk)
        try:
            outcome = yield from _ended(attempt, steps)
        except DatabaseAway as away:
            outcome = Outcome(execution, error=away)
        finally:
            if log is not None:
                log.finish()
                tell([log.closed])
            turns.ended(execution)
        if attempt.session is not None:
            yield from saved_after(execution, attempt.session)
        return outcome


def _run(attempt: Attempt, steps: Sequence[Step]) -> Waits[Checked]:
    """Run it; in a session that sleeps, in the sandbox that it is woken with."""
    session = attempt.session = steps[0].session if steps else None
    if session is None:
        return (yield from attempt.run(steps))
    if session.state == Session.State.ASLEEP:
        yield from awake(session, attempt.execution.turn)
    try:
        return (yield from attempt.run(steps))
    except KeptSandboxLost as error:
        if error.started:
            raise
        # Nothing ran, and nothing is lost of what was saved.
        lose(session, error.message)
        if not session.is_living:
            raise
        yield from awake(session, attempt.execution.turn)
        return (yield from attempt.run(steps))


def _ended(attempt: Attempt, steps: Sequence[Step]) -> Waits[Outcome]:
    try:
        attempt.held = Held.of_execution(attempt.execution)
        yield from attempt.held.to_request(attempt.request, attempt.execution, attempt.in_line)
        steps = attempt.held.steps(steps)
        yield from turns.turn_of(attempt.execution, attempt.in_line)
        return attempt.end_with_result((yield from _run(attempt, steps)))
    except DatabaseAway:
        raise
    except Cancelled as error:
        return attempt.end_cancelled(error)
    except (SessionClosed, KeptSandboxLost) as error:
        return attempt.end_with_session(error)
    except SandboxError as error:
        return attempt.end_with_error(error)
    except leases.NotOurs as error:
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
