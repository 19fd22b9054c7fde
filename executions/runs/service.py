"""Running code, and cancelling it: the one path from a valid request to a completed record."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from time import perf_counter

from django.db import transaction

from executions.kernel.background import run_sync
from executions.kernel.database import DatabaseUnavailable, problem_of
from executions.ledger.append import append
from executions.ledger.entry import ensure_ledger
from executions.runs import active_runs, extensions, heartbeat, journal, polling
from executions.runs.active_runs import message_for
from executions.runs.attempt import Attempt, Cancelled
from executions.runs.event_log import EventLog, resolve
from executions.runs.extensions import Placement, Review
from executions.runs.listing import log_execution
from executions.runs.models import Execution, RunSignal
from executions.runs.record import Beside, Outcome, complete_externally, open_record
from executions.runs.requests import Caller, ExecutionRequest
from executions.runs.results import ValidatedResult
from executions.runs.routes import HostClosed, Route, Step
from executions.runs.routing import allowed_steps, ensure_supported, steps_for
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


async def running(
    request: ExecutionRequest,
    caller: Caller,
    *,
    route: Route | None = None,
    step: Step | None = None,
    log: EventLog | None = None,
    waits: bool = False,
    beside: Beside | None = None,
) -> Outcome:
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
    elif placed := _placed(request, caller):
        request, steps = placed
    else:
        steps = steps_for(request.language, caller.tenant.slug, route, chosen=request.provider)
    steps = allowed_steps(caller, request.language, steps)
    if step is None and request.session is None:
        ensure_supported(request.language, steps)
    ensure_ledger()
    review = None
    may_wait = waits and route is None and step is None
    if (may_wait or request.mode == Execution.Mode.ASYNC) and caller.replay_of is None:
        review = await _reviewed(request, caller)
    if review is not None:
        request, beside = review.request, _both(beside, review.on_insert)
    try:
        execution, is_new = open_record(request, caller, beside)
    except DatabaseUnavailable as away:
        journal.keep_unrun(away)
        raise
    if not is_new:
        return Outcome(execution)
    for each in extensions.installed():
        each.after_insert(execution, began)
    if request.mode == Execution.Mode.ASYNC:
        # Its committed row is all that a worker needs to find it.
        return Outcome(execution)
    return await carry_out(execution, request, steps, began=began, log=log)


def _placed(request: ExecutionRequest, caller: Caller) -> Placement | None:
    found = (each.place(request, caller) for each in extensions.installed())
    return next((placed for placed in found if placed is not None), None)


async def _reviewed(request: ExecutionRequest, caller: Caller) -> Review | None:
    """Return how the request waits for an approval; None where it needs none."""
    for each in extensions.installed():
        if (review := (await each.review(request, caller))) is not None:
            return review
    return None


def _both(first: Beside | None, second: Beside | None) -> Beside | None:
    if first is None or second is None:
        return first or second

    def write(execution: Execution) -> None:
        first(execution)
        second(execution)

    return write


async def carry_out(
    execution: Execution,
    request: ExecutionRequest,
    steps: Sequence[Step],
    *,
    began: float,
    waited_ms: float = 0.0,
    log: EventLog | None = None,
) -> Outcome:
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
            outcome = await _ended(attempt, steps)
        except DatabaseUnavailable as away:
            outcome = Outcome(execution, error=away)
        finally:
            if log is not None:
                log.finish()
                resolve([log.closed])
            extensions.after_run(execution)
        if attempt.host is not None:
            await attempt.host.after_run(execution)
        return outcome


async def _run(attempt: Attempt, steps: Sequence[Step]) -> ValidatedResult:
    host = attempt.host = steps[0].host if steps else None
    if host is None:
        return await attempt.run(steps)
    return await host.run(attempt.execution, lambda: attempt.run(steps))


async def _ended(attempt: Attempt, steps: Sequence[Step]) -> Outcome:
    try:
        attempt.parts = extensions.begin(attempt.execution, attempt.request, attempt.log)
        await attempt.parts.admit(attempt.request, attempt.execution, attempt.in_line)
        steps = attempt.parts.select(steps)
        return attempt.end_with_result(await _run(attempt, steps))
    except DatabaseUnavailable:
        raise
    except Cancelled as error:
        return attempt.end_cancelled(error)
    except (HostClosed, KeptSandboxLost) as error:
        return attempt.end_with_host(error)
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


async def cancelling(execution: Execution, asked_by: str) -> Execution:
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
            await _stopping(execution)
            execution.refresh_from_db()
        else:
            await polling.until_ended(execution.pk, PATIENCE_SECONDS)
            execution.refresh_from_db()
        # It may have gone back to the queue, or be another process's by now.
        while execution.is_open:
            _close(execution, asked_by)
    if execution.status != Execution.Status.CANCELLED:
        raise HasEnded(f"The execution has ended: {execution.status}.")
    return execution


async def _stopping(execution: Execution) -> None:
    """Have the sandbox's owner end a process that nobody waits for."""
    for each in extensions.installed():
        await each.stop_process(execution)


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
