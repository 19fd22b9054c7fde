"""Run code, and cancel it: the one path from a valid request to a completed record.

An attempt is one try at running a recorded execution: the providers in their order, and the
record's end.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from time import perf_counter
from typing import Any, cast
from uuid import UUID

from django.db import Error as DatabaseFailure
from django.db import transaction
from django.utils import timezone

from executions.kernel.coroutines import run_sync
from executions.kernel.database import DatabaseUnavailable, problem_of
from executions.kernel.text import storable
from executions.ledger.append import append
from executions.ledger.entry import LedgerUnavailable, ensure_ledger
from executions.runs import active_runs, event_log, event_stream, extensions, heartbeat, journal
from executions.runs import artifacts as artifact_service
from executions.runs.active_runs import message_for
from executions.runs.event_log import EventLog, resolve
from executions.runs.extensions import Placement, RunParts
from executions.runs.journal import Ended
from executions.runs.models import Artifact, Execution, RunSignal
from executions.runs.provider_calls import (
    CREATE_SECONDS,
    RUN_SLACK_SECONDS,
    Host,
    HostClosed,
    Route,
    Step,
    call_provider,
    close_in_background,
)
from executions.runs.queue import mark_dispatched, move, requeue
from executions.runs.record import (
    PLACE,
    Beside,
    Outcome,
    complete_externally,
    error_changes,
    log_execution,
    ms_between,
    open_record,
)
from executions.runs.requests import Caller, ExecutionRequest, run_limits
from executions.runs.results import (
    RESERVED_METADATA,
    BlockedByPolicy,
    ValidatedResult,
    kinds_in,
    validate_result,
    validate_sandbox,
)
from executions.runs.routing import (
    RouteWalk,
    Served,
    allowed_steps,
    ensure_environment,
    ensure_network,
    ensure_provider_allowed,
    ensure_provider_isolation,
    ensure_sandbox_isolation,
    ensure_supported,
    ensure_template,
    give_back_claim,
    required_isolation,
    seconds_at,
    steps_for,
)
from providers import draining, errors
from providers.errors import (
    ErrorCode,
    InvalidConfiguration,
    KeptSandboxLost,
    ProviderUnavailable,
    SandboxError,
)
from providers.manager import Lease
from providers.sandbox import Sandbox
from providers.values import SANDBOX_ENDED, Emit, ExecutionResult, Job, RunLimits, SandboxSpec

logger = logging.getLogger(__name__)

VERDICTS: dict[ErrorCode, Execution.Status] = {
    errors.TIMEOUT: Execution.Status.TIMED_OUT,
    errors.OUT_OF_MEMORY: Execution.Status.OUT_OF_MEMORY,
    errors.BLOCKED: Execution.Status.BLOCKED,
}


def verdict_of(result: ExecutionResult, seconds: float) -> tuple[Execution.Status, dict[str, Any]]:
    """Return the status of what ended, and the columns of its error. `seconds` is its timeout."""
    if result.timed_out:
        message = f"The code ran longer than {seconds:g} s and was ended."
        return Execution.Status.TIMED_OUT, error_changes(errors.TIMEOUT.code, message)
    if result.out_of_memory:
        message = "The code used more memory than it may and was ended."
        return Execution.Status.OUT_OF_MEMORY, error_changes(errors.OUT_OF_MEMORY.code, message)
    if result.exit_code == 0:
        return Execution.Status.SUCCEEDED, {}
    return Execution.Status.FAILED, {}


class Cancelled(ProviderUnavailable):
    """The run was ended because somebody wanted it."""


class Attempt:
    """The state of one run: its timings so far, and whether the code may have started."""

    def __init__(
        self,
        execution: Execution,
        request: ExecutionRequest,
        began: float,
        waited_ms: float,
        received_ms: float | None = None,
        log: EventLog | None = None,
    ) -> None:
        self.execution = execution
        self.request = request
        self.began = began
        self.waited_ms = waited_ms
        self.received_ms = received_ms
        # By `perf_counter`; the end of a run that was, of the last provider that was tried.
        self.ran_until: float | None = None
        self.log = log
        self.handed_over = False
        self.floor = ""
        self.limits = RunLimits()
        self.seconds = request.longest
        self.sandbox: Sandbox | None = None
        # Whose sandbox it runs in, where that stays.
        self.host: Host | None = None
        self.is_lost = False
        self.cancelled_by = ""
        self._awaited: Future[Any] | None = None
        self.changes: dict[str, Any] = {}
        self.walk = RouteWalk()
        self.parts = RunParts()

    @property
    def execution_id(self) -> UUID:
        return self.execution.pk

    def lose(self) -> None:
        """End its sandbox, from any thread and without waiting: the record is no longer ours."""
        self.is_lost = True
        if self.sandbox is not None:
            self.sandbox.submit_close()

    def cancel(self, asked_by: str) -> None:
        """End it as cancelled, from any thread and without waiting, if it has not ended."""
        self.cancelled_by = self.cancelled_by or asked_by
        if (awaited := self._awaited) is not None:
            awaited.cancel()

    @contextmanager
    def _cancel_scope(self, awaited: Future[Any]) -> Iterator[None]:
        self._awaited = awaited
        try:
            # Either this is seen here, or the future there.
            if self.cancelled_by:
                awaited.cancel()
            yield
        finally:
            self._awaited = None

    @contextmanager
    def in_line(self, awaited: Future[Any]) -> Iterator[None]:
        """Around waiting for one's turn. Raises Cancelled where that came first."""
        with self._cancel_scope(awaited):
            yield
        self._ensure_not_cancelled()

    def _ensure_not_cancelled(self) -> None:
        if self.cancelled_by:
            raise Cancelled(message_for(self.cancelled_by), started=self.handed_over)

    async def run(self, steps: Sequence[Step]) -> ValidatedResult:
        """Try the providers in their order, and leave one only while no code can have started."""
        self.floor = required_isolation(self.execution)
        self.limits = run_limits(self.execution.tenant)
        if self.log is not None:
            self.log.set_limits(self.limits)
        return await self.walk.take(
            steps,
            self.request,
            self.floor,
            self._run_at,
            before=self._begin_step,
            check_error=self._check_error,
        )

    def _begin_step(self) -> None:
        self.handed_over = False
        active_runs.ensure_not_ending()
        self._ensure_not_cancelled()

    def _check_error(self, step: Step, error: SandboxError) -> None:
        """Raise what ended the step, where that was no fault of the provider."""
        if draining.is_ending():
            raise active_runs.stop_error(started=error.started) from None
        if self.is_lost:
            raise _too_late() from None
        if self.cancelled_by:
            give_back_claim(step)
            self._ensure_not_cancelled()

    async def _run_at(
        self, lease: Lease, held: ExitStack, is_last: bool
    ) -> Served[ValidatedResult]:
        """`held` lends the provider, and goes on doing so until the sandbox has ended."""
        leased = perf_counter()
        self.changes = {
            "provider": lease.provider_id,
            "config_version": lease.config_version,
            "queue_ms": self.waited_ms + ms_between(self.began, leased),
        }
        self.ran_until = None
        ensure_provider_allowed(self.execution, lease)
        ensure_provider_isolation(lease, self.floor)
        ensure_environment(lease, self.request)
        self.parts.check_provider(lease)
        self.seconds = self.parts.limit_seconds(seconds_at(lease, self.request))
        self.changes["timeout"] = self.seconds
        sandbox = self.sandbox = await self._open(lease)
        created = perf_counter()
        self.changes["start_ms"] = ms_between(leased, created)
        try:
            isolation, sharing = ensure_sandbox_isolation(lease, sandbox, self.floor)
            self.changes["runtime"] = _runtime(sandbox.metadata)
            self.changes |= {"isolation": isolation, "sharing": sharing}
            self.parts.check_sandbox(lease, isolation)
            active_runs.ensure_not_ending()
            self._hand_over()
            result = await self._execute(lease, sandbox)
            if self.is_lost:
                raise _too_late()
        finally:
            self.ran_until = perf_counter()
            self.changes["run_ms"] = ms_between(created, self.ran_until)
            close_in_background(lease, sandbox, held)
        died = SANDBOX_ENDED in result.result.metadata
        return Served(result, self.changes["start_ms"], died)

    def _hand_over(self) -> None:
        """Right before the code is out of our hands. Raises OwnershipLost where it must not be."""
        heartbeat.assert_owner(self.execution)
        self._ensure_not_cancelled()
        place = {name: self.changes[name] for name in PLACE}
        if self.execution.pending is not None:
            mark_dispatched(self.execution, **place)
        elif self.execution.mode == Execution.Mode.ASYNC:
            move(self.execution, **place)
        self.handed_over = True

    async def _open(self, lease: Lease) -> Sandbox:
        owner = self.execution.tenant_slug
        spec = SandboxSpec(self.request.language)
        if self.host is None:
            # A sandbox that stays is as it was opened.
            longest = self.seconds + RUN_SLACK_SECONDS + CREATE_SECONDS
            spec = self.parts.specify(spec, seconds=longest)
            ensure_network(lease, spec.network)
        with self.parts.translate_errors():
            sandbox = await call_provider(
                lease.provider_id,
                lambda: lease.provider.submit_open(spec, owner),
                validate_sandbox,
                CREATE_SECONDS,
                owner=owner,
                may_refuse=True,
                too_late=lambda sandbox: sandbox.submit_close(),
                waiting=self._cancel_scope,
            )
        if spec.kept:
            # It is closed behind this run.
            sandbox.metadata = {**sandbox.metadata, "sharing": "execution"}
        return sandbox

    async def _execute(self, lease: Lease, sandbox: Sandbox) -> ValidatedResult:
        request = self.request
        job = Job(
            request.code,
            request.language,
            self.seconds,
            request.arguments,
            request.entrypoint,
            request.files,
            self.limits,
            environment=request.env,
        )
        emit: Emit | None = self.log.emit if self.log else None
        job, emit = self.parts.prepare(job, sandbox, emit)
        try:
            return await call_provider(
                lease.provider_id,
                lambda: sandbox.submit_run(job, emit),
                lambda answer: validate_result(answer, job.limits),
                job.timeout + RUN_SLACK_SECONDS,
                owner=self.execution.tenant_slug,
                started=True,
                waiting=self._cancel_scope,
            )
        finally:
            self.parts.close()

    def end_cancelled(self, error: SandboxError) -> Outcome:
        changes = {**self.changes, "error_message": storable(error.message)}
        if (log := self.log) is not None:
            changes |= {
                "stdout": log.text_of("stdout"),
                "stderr": log.text_of("stderr"),
                "outputs": log.outputs_json(),
                "output_order": log.order(),
            }
        self._close(Execution.Status.CANCELLED, changes, ran=None if error.started else False)
        return Outcome(self.execution, error=error)

    def end_with_host(self, error: SandboxError) -> Outcome:
        """Its sandbox is gone, or was closed by request, which cancels what runs in it."""
        told = self.host.end_of(error) if self.host is not None else error
        if not isinstance(told, HostClosed):
            return self.end_with_error(told)
        return self.end_cancelled(told)

    def end_with_error(self, error: SandboxError) -> Outcome:
        if self._is_queued_again():
            return Outcome(self.execution, error=error)
        status = VERDICTS.get(error.entry, Execution.Status.ERROR)
        changes = {
            **self.changes,
            **error_changes(error.code, error.message, error.field),
            "retryable": status == Execution.Status.ERROR and not error.started,
        }
        ran = None if error.started else False
        has_run = status != Execution.Status.ERROR and not isinstance(error, BlockedByPolicy)
        self._close(status, changes, ran=has_run or ran)
        return Outcome(self.execution, error=error)

    def _is_queued_again(self) -> bool:
        """Nobody waits for what was queued, to send it again when this process stops before it."""
        if self.execution.pending is None or not draining.is_ending():
            return False
        try:
            return requeue(self.execution)
        except DatabaseFailure as failure:
            logger.info("execution %s cannot be queued again: %s", self.execution.pk, failure)
            return False

    def end_with_result(self, checked: ValidatedResult) -> Outcome:
        """Complete the row with what came through the gate: answer as record."""
        result = checked.result
        if self.log is not None:
            self.log.put_out(result)
        status, verdict = verdict_of(result, self.seconds)
        error: SandboxError | None = None
        artifacts: list[Artifact] = []
        try:
            if result.artifacts:
                artifacts = artifact_service.store_files(self.execution.pk, result.artifacts)
        except Exception:
            # Whatever kind of storage it is: the rest of what came of the code is kept.
            logger.exception("artifacts of execution %s could not be stored", self.execution.pk)
            error = ProviderUnavailable(
                "The code ran, but its artifacts could not be stored.", started=True
            )
            status, verdict = Execution.Status.ERROR, error_changes(error.code, error.message)
        meta = self._meta(result)
        changes = {
            **self.changes,
            **verdict,
            "runtime": _runtime(result.metadata) or self.changes["runtime"],
            "meta": meta,
            "observed": kinds_in(meta),
            "has_result": result.has_result,
            "result": checked.result_json,
            "outputs": checked.outputs_json,
            "exception": checked.exception_json,
            "stdout": result.stdout,
            "stderr": result.stderr,
            "stdout_truncated": result.stdout_truncated,
            "stderr_truncated": result.stderr_truncated,
            "output_order": result.output_order,
            "exit_code": result.exit_code,
            **(self.host.result_values(self.execution, result) if self.host else {}),
        }
        try:
            won = self._close(status, changes, artifacts, ran=True)
        except DatabaseUnavailable as away:
            if not away.kept:
                artifact_service.remove_files(artifacts)
            raise
        except Exception:
            artifact_service.remove_files(artifacts)
            raise
        if not won:
            artifact_service.remove_files(artifacts)
            return Outcome(self.execution, error=_too_late())
        if self.host is not None:
            self.host.note_recorded(meta)
        return Outcome(self.execution, result=result, error=error)

    def _meta(self, result: ExecutionResult) -> dict[str, Any]:
        """Return the provider's metadata without the keys that are ours, and ours."""
        of_extensions = (each.metadata_keys for each in extensions.installed())
        ours = RESERVED_METADATA.union(*of_extensions)
        said = {name: value for name, value in result.metadata.items() if name not in ours}
        of_host = self.host.result_metadata(self.execution) if self.host is not None else {}
        return {**said, **self.parts.result_metadata(), **of_host}

    def _with_metadata(self, changes: dict[str, Any]) -> dict[str, Any]:
        if not (said := self.parts.metadata()):
            return changes
        return {**changes, "meta": {**changes.get("meta", self.execution.meta), **said}}

    def _close(
        self,
        status: Execution.Status,
        changes: dict[str, Any],
        artifacts: Sequence[Artifact] = (),
        *,
        ran: bool | None,
    ) -> bool:
        """Complete the row. Raises DatabaseUnavailable where the journal has the result instead."""
        if self.log is not None:
            self.log.finish()
            event_log.write_rest(self.log)
        now = perf_counter()
        values = {
            # Of the provider that is named, also where the row has an earlier one's.
            **{name: getattr(self.execution, name) for name in PLACE},
            **self._with_metadata(changes),
            "received_ms": self.received_ms,
            "closed_ms": None if self.ran_until is None else ms_between(self.ran_until, now),
            "total_ms": (self.received_ms or 0.0) + self.waited_ms + ms_between(self.began, now),
            "hops": self.walk.recorded,
            "finished_at": timezone.now(),
        }
        owner = None if self.handed_over else self.execution.process_id
        try:
            won = journal.record(self.execution, status, values, artifacts, ran)
        except (DatabaseFailure, LedgerUnavailable) as failure:
            if not (problem := journal.obstacle_of(failure)):
                raise
            ended = Ended(self.execution.pk, status, values, artifacts, ran, owner)
            raise journal.keep(ended, problem) from failure
        if not won:
            logger.warning(
                "execution %s ended after its record had been closed as %s",
                self.execution.pk,
                self.execution.status,
            )
        log_execution(self.execution, self.sandbox.ref if self.sandbox else "")
        return won


def _too_late() -> SandboxError:
    return ProviderUnavailable(
        "The service stopped waiting for the execution before it ended; its record says when.",
        started=True,
    )


def _runtime(metadata: Mapping[str, Any]) -> str:
    return storable(str(metadata.get("runtime", "")))[:64]


def execute_sync(
    request: ExecutionRequest, caller: Caller, *, route: Route | None = None
) -> Outcome:
    """Execute as `execute` does, and wait for it in this thread."""
    return run_sync(execute(request, caller, route=route))


async def execute(
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
    if caller.received is None:
        caller = replace(caller, received=perf_counter())
    received = cast("float", caller.received)
    steps: Sequence[Step]
    if step is not None:
        steps = [step]
    elif placed := _place(request, caller):
        request, steps = placed
    else:
        steps = steps_for(request.language, caller.tenant.slug, route, chosen=request.provider)
    steps = allowed_steps(caller, request.language, steps)
    if step is None and request.session is None:
        ensure_template(caller, request.template)
        ensure_supported(request.language, steps)
    ensure_ledger()
    review = None
    may_wait = waits and route is None and step is None
    if (may_wait or request.mode == Execution.Mode.ASYNC) and caller.replay_of is None:
        review = await extensions.review(request, caller)
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
        each.after_insert(execution, received)
    if request.mode == Execution.Mode.ASYNC:
        # Its committed row is all that a worker needs to find it.
        return Outcome(execution)
    began = perf_counter()
    received_ms = ms_between(received, began)
    return await carry_out(execution, request, steps, began=began, received_ms=received_ms, log=log)


def _place(request: ExecutionRequest, caller: Caller) -> Placement | None:
    found = (each.place(request, caller) for each in extensions.installed())
    return next((placed for placed in found if placed is not None), None)


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
    received_ms: float | None,
    log: EventLog | None = None,
) -> Outcome:
    """Run a recorded execution and complete its row, however it ends.

    The outcome's error is DatabaseUnavailable where the row could not be completed now (see
    `journal`). `began` is the `perf_counter` to measure from, `waited_ms` what passed before it in
    a queue, and `received_ms` before it was recorded.
    """
    attempt = Attempt(execution, request, began, waited_ms, received_ms, log)
    with active_runs.track(attempt):
        if log is not None:
            log.begin(execution.pk)
        try:
            outcome = await _run_to_end(attempt, steps)
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


async def _run_to_end(attempt: Attempt, steps: Sequence[Step]) -> Outcome:
    try:
        if steps and (host := steps[0].host) is not None:
            host.bind(attempt.execution)
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


async def cancel(execution: Execution, asked_by: str) -> Execution:
    """Cancel an execution, and return it. `asked_by` is who wants it, as in `key:PREFIX`.

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
            await _stop_process(execution)
            execution.refresh_from_db()
        else:
            await event_stream.wait_for_end(execution.pk, PATIENCE_SECONDS)
            execution.refresh_from_db()
        # It may have gone back to the queue, or be another process's by now.
        while execution.is_open:
            _close(execution, asked_by)
    if execution.status != Execution.Status.CANCELLED:
        raise HasEnded(f"The execution has ended: {execution.status}.")
    return execution


async def _stop_process(execution: Execution) -> None:
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
