"""Running code: the one path from a valid request to a completed record.

Nothing here holds a thread while a sandbox is waited for, a program runs or a sandbox is ended:
there the work yields the future it waits for (`services.waiting`). The database is touched only
in between.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any

from django.db import transaction

from executions.models import Artifact, Execution
from executions.services import artifacts as artifact_service
from executions.services.asking import CREATE_SECONDS, DESTROY_SECONDS, RUN_SLACK_SECONDS, ask
from executions.services.gate import Checked, check, check_instance
from executions.services.isolation import floor_of, require_instance, require_provider
from executions.services.languages import refuse_unsupported
from executions.services.ledger.head import refuse_if_altered
from executions.services.queue import enqueue
from executions.services.record import (
    Caller,
    Outcome,
    close_record,
    error_changes,
    log_execution,
    open_record,
)
from executions.services.requests import ExecutionRequest
from executions.services.routing import Hops, Route, Step, admit, steps_for
from executions.services.spending import cost_of, spend
from executions.services.waiting import Waits, wait_for
from executions.text import storable
from providers import errors
from providers.base import SANDBOX_ENDED, ExecutionResult, SandboxInstance
from providers.errors import ErrorCode, ProviderUnavailable, SandboxError
from providers.manager import Lease

logger = logging.getLogger(__name__)

_VERDICTS: dict[ErrorCode, Execution.Status] = {
    errors.TIMEOUT: Execution.Status.TIMED_OUT,
    errors.OUT_OF_MEMORY: Execution.Status.OUT_OF_MEMORY,
    errors.BLOCKED: Execution.Status.BLOCKED,
}


def run_execution(
    request: ExecutionRequest, caller: Caller, *, route: Route | None = None
) -> Outcome:
    """As `running`, waited for in this thread."""
    return wait_for(running(request, caller, route=route))


def running(
    request: ExecutionRequest, caller: Caller, *, route: Route | None = None
) -> Waits[Outcome]:
    """Record, run or queue, and complete the record.

    `route` lends one certain provider; without it the routes of the admin decide. Raises
    InvalidConfiguration for a language that is not served, LedgerAltered while the ledger takes no
    entry, and what `open_record` does; then nothing was recorded. Whatever happens after that is
    in the outcome.
    """
    began = perf_counter()
    steps = steps_for(request.language, caller.tenant.slug, route)
    refuse_unsupported(request.language, [step.route for step in steps])
    refuse_if_altered()
    execution, is_new = open_record(request, caller)
    if not is_new:
        return Outcome(execution)
    if request.mode == Execution.Mode.ASYNC:
        return enqueue(execution)
    return (yield from carry_out(execution, request, steps, began=began))


def carry_out(
    execution: Execution,
    request: ExecutionRequest,
    steps: Sequence[Step],
    *,
    began: float,
    waited_ms: float = 0.0,
) -> Waits[Outcome]:
    """Run a recorded execution and complete its row, however it ends.

    `began` is the `perf_counter` to measure from, `waited_ms` what passed before it in a queue.
    """
    attempt = _Attempt(execution, request, began, waited_ms)
    try:
        return attempt.end_with_result((yield from attempt.run(steps)))
    except SandboxError as error:
        return attempt.end_with_error(error)
    except Exception:
        logger.exception("execution %s failed inside the service", execution.pk)
        return attempt.end_with_error(
            ProviderUnavailable(
                "The execution failed inside the service, whose log has the reason.",
                started=attempt.handed_over,
            )
        )


class _Attempt:
    """The state of one run: its timings so far, and whether the code may have started."""

    def __init__(
        self, execution: Execution, request: ExecutionRequest, began: float, waited_ms: float
    ) -> None:
        self.execution = execution
        self.request = request
        self.began = began
        self.waited_ms = waited_ms
        self.handed_over = False
        self.floor = ""
        self.instance: SandboxInstance | None = None
        self.changes: dict[str, Any] = {}
        self.hops = Hops()

    def run(self, steps: Sequence[Step]) -> Waits[Checked]:
        """Try the providers in their order, and leave one only while no code can have started."""
        self.floor = floor_of(self.execution)
        is_only = len(steps) == 1
        for number, step in enumerate(steps, start=1):
            self.handed_over = False
            began = perf_counter()
            try:
                is_last = number == len(steps)
                admit(step, self.request, self.floor, is_only=is_only, is_last=is_last)
                result = yield from self._run_at(step)
            except SandboxError as error:
                self.hops.left(step, error, _ms(began, perf_counter()))
                if error.started or number == len(steps) or not self.hops.may_leave(error):
                    raise self.hops.telling(error) from None
            else:
                ms = _ms(began, perf_counter())
                died = SANDBOX_ENDED in result.result.metadata
                self.hops.served(step, ms, self.changes["start_ms"], alone=is_only, died=died)
                return result
        raise ProviderUnavailable("The route names no provider. Add one in the admin.")

    def _run_at(self, step: Step) -> Waits[Checked]:
        with step.route() as lease:
            leased = perf_counter()
            self.changes = {
                "provider": lease.provider_id,
                "config_version": lease.config_version,
                "queue_ms": self.waited_ms + _ms(self.began, leased),
            }
            require_provider(lease, self.floor)
            self.instance = instance = yield from self._create(lease)
            created = perf_counter()
            self.changes["start_ms"] = _ms(leased, created)
            try:
                isolation, sharing = require_instance(lease, instance, self.floor)
                self.changes["runtime"] = _runtime(instance.metadata)
                self.changes |= {"isolation": isolation, "sharing": sharing}
                self.handed_over = True
                result = yield from self._execute(lease, instance)
            finally:
                self.changes["run_ms"] = _ms(created, perf_counter())
                yield from self._destroy(lease, instance)
        return result

    def _create(self, lease: Lease) -> Waits[SandboxInstance]:
        provider, owner = lease.provider, self.execution.tenant_slug
        return ask(
            lease.provider_id,
            lambda: provider.submit_create_instance(self.request.language, owner=owner),
            check_instance,
            CREATE_SECONDS,
            may_refuse=True,
            too_late=lambda instance: provider.submit_destroy_instance(instance.instance_id),
        )

    def _execute(self, lease: Lease, instance: SandboxInstance) -> Waits[Checked]:
        request = self.request
        return ask(
            lease.provider_id,
            lambda: lease.provider.submit_execute_code(
                instance.instance_id,
                request.code,
                request.language,
                request.seconds,
                request.arguments,
                entrypoint=request.entrypoint,
                files=request.files,
                limits=request.limits,
            ),
            lambda answer: check(answer, request.limits),
            request.seconds + RUN_SLACK_SECONDS,
            started=True,
        )

    def _destroy(self, lease: Lease, instance: SandboxInstance) -> Waits[None]:
        try:
            yield from ask(
                lease.provider_id,
                lambda: lease.provider.submit_destroy_instance(instance.instance_id),
                bool,
                DESTROY_SECONDS,
            )
        except Exception:
            # The result is there and belongs to the caller, whatever became of the sandbox.
            logger.exception("sandbox %s could not be destroyed", instance.instance_id)

    def end_with_error(self, error: SandboxError) -> Outcome:
        status = _VERDICTS.get(error.entry, Execution.Status.ERROR)
        changes = {
            **self.changes,
            **error_changes(error.code, error.message, error.field),
            "retryable": status == Execution.Status.ERROR and not error.started,
        }
        self._close(status, changes)
        return Outcome(self.execution, error=error)

    def end_with_result(self, checked: Checked) -> Outcome:
        """Complete the row with what came through the gate: answer as record."""
        result = checked.result
        status, verdict = _verdict(result, self.request)
        error: SandboxError | None = None
        artifacts: list[Artifact] = []
        try:
            if result.artifacts:
                artifacts = artifact_service.store_files(self.execution.pk, result.artifacts)
        except OSError:
            logger.exception("artifacts of execution %s could not be stored", self.execution.pk)
            error = ProviderUnavailable(
                "The code ran, but its artifacts could not be stored.", started=True
            )
            status, verdict = Execution.Status.ERROR, error_changes(error.code, error.message)
        changes = {
            **self.changes,
            **verdict,
            "runtime": _runtime(result.metadata) or self.changes["runtime"],
            "meta": result.metadata,
            "has_result": result.has_result,
            "result": checked.result_json,
            "outputs": checked.outputs_json,
            "stdout": result.stdout,
            "stderr": result.stderr,
            "stdout_truncated": result.stdout_truncated,
            "stderr_truncated": result.stderr_truncated,
            "exit_code": result.exit_code,
        }
        try:
            won = self._close(status, changes, artifacts)
        except Exception:
            artifact_service.remove_files(artifacts)
            raise
        if not won:
            artifact_service.remove_files(artifacts)
            return Outcome(self.execution, error=_too_late())
        return Outcome(self.execution, result=result, error=error)

    def _close(
        self, status: Execution.Status, changes: dict[str, Any], artifacts: Sequence[Artifact] = ()
    ) -> bool:
        total = self.waited_ms + _ms(self.began, perf_counter())
        cost = cost_of(changes.get("provider", ""), changes)
        values = {**changes, "total_ms": total, "hops": self.hops.recorded, "cost": cost}
        if cost:
            with transaction.atomic():
                won = close_record(self.execution, status, values, artifacts)
                if won:
                    spend(self.execution.tenant_slug, cost)
        else:
            won = close_record(self.execution, status, values, artifacts)
        if not won:
            logger.warning(
                "execution %s ended after its record had been closed as %s",
                self.execution.pk,
                self.execution.status,
            )
        log_execution(self.execution, self.instance.instance_id if self.instance else "")
        return won


def _too_late() -> SandboxError:
    return ProviderUnavailable(
        "The execution had been given up before it ended; its record says when.", started=True
    )


def _verdict(
    result: ExecutionResult, request: ExecutionRequest
) -> tuple[Execution.Status, dict[str, Any]]:
    if result.timed_out:
        message = f"The code ran longer than {request.seconds:g} s and was ended."
        return Execution.Status.TIMED_OUT, error_changes(errors.TIMEOUT.code, message)
    if result.out_of_memory:
        message = "The code used more memory than it may and was ended."
        return Execution.Status.OUT_OF_MEMORY, error_changes(errors.OUT_OF_MEMORY.code, message)
    if result.exit_code == 0:
        return Execution.Status.SUCCEEDED, {}
    return Execution.Status.FAILED, {}


def _runtime(metadata: Mapping[str, Any]) -> str:
    return storable(str(metadata.get("runtime", "")))[:64]


def _ms(start: float, end: float) -> float:
    return round((end - start) * 1000, 3)
