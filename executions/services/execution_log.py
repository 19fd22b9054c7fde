"""The line that is logged of an execution, with figures and names but neither code nor output."""

from __future__ import annotations

from executions.kernel.audit import SUCCESS, log_operation
from executions.ledger.entry_format import text_hash
from executions.models.execution import Execution
from executions.services import telemetry


def log_execution(execution: Execution, instance_id: str = "") -> None:
    """Of one that has ended. `instance_id` is what its provider calls the sandbox."""
    if telemetry.traces is not None:
        telemetry.traces.ended(execution)
    peak = execution.meta.get("memory_peak_bytes")
    entry = execution.ledger_entry
    has_succeeded = execution.status == Execution.Status.SUCCEEDED
    behalf = execution.on_behalf_of
    log_operation(
        "execute_code",
        SUCCESS if has_succeeded else str(execution.status),
        at=execution.finished_at,
        execution_id=str(execution.pk),
        execution_status=str(execution.status),
        request_id=execution.request_id,
        tenant_id=execution.tenant_slug,
        api_key=execution.api_key_prefix,
        session_id=str(execution.session_id) if execution.session_id else None,
        provider=execution.provider,
        config_version=execution.config_version,
        runtime=execution.runtime,
        region=execution.meta.get("region"),
        instance_id=_scoped(execution, instance_id),
        language=execution.language,
        code_hash=execution.code_hash,
        agent=execution.agent,
        model=execution.model,
        conversation=execution.conversation,
        # A log does not forget what the record will.
        on_behalf_of_hash=text_hash(behalf) if behalf else None,
        trace_id=execution.trace_id,
        exit_code=execution.exit_code,
        error_code=execution.error_code or None,
        duration_ms=execution.total_ms,
        queue_ms=execution.queue_ms,
        start_ms=execution.start_ms,
        run_ms=execution.run_ms,
        memory_used_mb=round(peak / 2**20, 1) if isinstance(peak, (int, float)) else None,
        ledger_sequence=entry.sequence if entry else None,
        ledger_digest=entry.digest if entry else None,
    )


def _scoped(execution: Execution, instance_id: str) -> str:
    """`{tenant}:{session}:{instance}`, so that one name stands for no sandbox of anybody else. A
    run outside of sessions is one of its own."""
    if not instance_id:
        return ""
    return f"{execution.tenant_slug}:{execution.session_id or execution.pk}:{instance_id}"
