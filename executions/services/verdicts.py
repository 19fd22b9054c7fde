"""What a record says of how a run ended: its status, and the error that goes with it."""

from __future__ import annotations

from typing import Any

from executions.models.execution import Execution
from executions.services.record import error_changes
from providers import errors
from providers.errors import ErrorCode
from providers.values import ExecutionResult

VERDICTS: dict[ErrorCode, Execution.Status] = {
    errors.TIMEOUT: Execution.Status.TIMED_OUT,
    errors.OUT_OF_MEMORY: Execution.Status.OUT_OF_MEMORY,
    errors.BLOCKED: Execution.Status.BLOCKED,
}


def verdict_of(result: ExecutionResult, seconds: float) -> tuple[Execution.Status, dict[str, Any]]:
    if result.timed_out:
        message = f"The code ran longer than {seconds:g} s and was ended."
        return Execution.Status.TIMED_OUT, error_changes(errors.TIMEOUT.code, message)
    if result.out_of_memory:
        message = "The code used more memory than it may and was ended."
        return Execution.Status.OUT_OF_MEMORY, error_changes(errors.OUT_OF_MEMORY.code, message)
    if result.exit_code == 0:
        return Execution.Status.SUCCEEDED, {}
    return Execution.Status.FAILED, {}
