"""From a remote run's output to an ExecutionResult."""

from __future__ import annotations

from typing import Any

from providers.remote.output import Output
from providers.remote.programs import Program
from providers.values import OUTPUTS_SKIPPED, ExecutionResult, exception_of, note_omissions


def result_of(
    output: Output,
    program: Program,
    exit_code: int | None,
    seconds: float,
    metadata: dict[str, Any],
) -> ExecutionResult:
    """`exit_code` is what the service's answer comes to; None for a run our deadline ended."""
    ended = output.ended() if exit_code is not None else None
    has_result = False
    if ended is not None:
        exit_code = exit_code or int(ended["exit_code"])
        has_result = exit_code == 0 and "result" in ended
    elif program.mark and exit_code == 0:
        exit_code = 1
        output.stderr("The interpreter ended before main() returned.\n")
    output.close_held()
    result = ExecutionResult(
        stdout=output.text("stdout"),
        stderr=output.text("stderr"),
        exit_code=exit_code,
        execution_time=seconds,
        metadata=metadata,
        stdout_truncated=output.truncated["stdout"],
        stderr_truncated=output.truncated["stderr"],
        timed_out=exit_code is None,
        has_result=has_result,
        result=ended["result"] if ended is not None and has_result else None,
        outputs=list(output.outputs),
        exception=_exception(output, ended) if exit_code else None,
    )
    note_omissions(result.metadata, OUTPUTS_SKIPPED, output.skipped)
    output.close()
    return result


def _exception(output: Output, ended: dict[str, Any] | None) -> dict[str, str] | None:
    """What ended the program: it says so where we have run it, else its service does."""
    return exception_of((ended or {}).get("exception")) or output.exception
