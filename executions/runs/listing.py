"""A tenant's executions, page by page: their summaries, and the line that is logged of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from django.db.models import QuerySet
from pydantic import Field

from executions.kernel.audit import SUCCESS, log_operation
from executions.kernel.declarations import STORABLE, Id, Query, declared, newest_first, one_of
from executions.kernel.text import from_json
from executions.ledger.entry import text_hash
from executions.runs import extensions
from executions.runs.models import Artifact, Execution, LateResult
from executions.runs.requests import CLAIMS, Agent, ConversationName, Model, OnBehalfOf
from executions.runs.shapes import (
    ExecutionSummaryShape,
    OmissionShape,
    PlaceShape,
    TimingsShape,
    VerdictShape,
)
from executions.tenants.models import Tenant
from providers.values import ARTIFACTS_SKIPPED, OUTPUTS_SKIPPED

DEFAULT_LIMIT = 50
MAX_LIMIT = 200

Limit = Annotated[int, Field(ge=1, le=MAX_LIMIT)]
Cursor = Annotated[Id, Field(description="The cursor from `next` of the previous page.")]

_LARGE = (*("pending", "code", "arguments", "result", "outputs", "exception", "stdout", "stderr"),)
_EXACT = ("status", "language", "provider", *CLAIMS, "trace_id", "schedule_id")


@declared
class ExecutionFilter:
    """Which executions, and where to go on. Empty strings stand for no restriction."""

    status: Annotated[str, one_of(Execution.Status.values)] = ""
    language: Annotated[str, STORABLE] = ""
    provider: Annotated[str, STORABLE] = ""
    agent: Agent = ""
    model: Model = ""
    conversation: ConversationName = ""
    on_behalf_of: OnBehalfOf = ""
    trace_id: Annotated[str, STORABLE] = ""
    schedule_id: Annotated[
        Id | None, Field(alias="schedule", description="The id of a schedule.")
    ] = None
    limit: Limit = DEFAULT_LIMIT
    cursor: Cursor | None = None


LIST = Query(ExecutionFilter, empty_is_none=True)


@dataclass(frozen=True)
class Page:
    executions: list[Execution]
    next_cursor: str


def list_executions(tenant: Tenant, wanted: ExecutionFilter) -> Page:
    """One page, without what may be large."""
    found = executions_of(tenant).defer(*_LARGE)
    for name in _EXACT:
        if value := getattr(wanted, name):
            found = found.filter(**{name: value})
    return Page(*newest_first(found, wanted.cursor, wanted.limit))


def execution_summary(execution: Execution) -> ExecutionSummaryShape:
    """What a list shows of an execution: everything but the parts that may be large."""
    return {
        **place_of(execution),
        "mode": execution.mode,
        "priority": execution.Priority(execution.priority).label,
        "language": execution.language,
        "provider": execution.provider,
        "runtime": execution.runtime,
        "isolation": execution.isolation,
        "sharing": execution.sharing,
        "exit_code": execution.exit_code,
        "error": error_of(execution),
        "timings": timings_of(execution),
        "created_at": execution.created_at.isoformat(),
        "run_at": execution.run_at.isoformat() if execution.run_at else None,
        "schedule": str(execution.schedule_id) if execution.schedule_id else None,
    }


def place_of(execution: Execution) -> PlaceShape:
    """Which one it is, where it ran, which is null outside sessions, and who asked for it."""
    return {
        "id": str(execution.pk),
        "status": execution.status,
        "session": str(execution.session_id) if execution.session_id else None,
        "context": execution.context or None,
        "context_kept": execution.context_kept,
        "pid": execution.pid,
        "agent": execution.agent or None,
        "model": execution.model or None,
        "conversation": execution.conversation or None,
        "on_behalf_of": execution.on_behalf_of or None,
        "traceparent": execution.traceparent or None,
    }


def error_of(execution: Execution | LateResult) -> VerdictShape | None:
    """The verdict that it ended with; None for one that ran to its end."""
    if not execution.error_code:
        return None
    return {"code": execution.error_code, "message": execution.error_message}


def omissions_of(execution: Execution) -> dict[str, list[OmissionShape]]:
    """What was left out of its files and of its outputs, each with the reason."""
    return {
        key: [
            {"name": name, "reason": reason} for name, reason in _entries(execution.meta.get(key))
        ]
        for key in (ARTIFACTS_SKIPPED, OUTPUTS_SKIPPED)
    }


def omission_lines(execution: Execution) -> list[str]:
    """The same, as a line for each."""
    return [
        _line(f"{what}{entry['name']}", entry["reason"]) if entry["name"] else entry["reason"]
        for what, key in (("file ", ARTIFACTS_SKIPPED), ("", OUTPUTS_SKIPPED))
        for entry in omissions_of(execution)[key]
    ]


def _line(name: str, reason: str) -> str:
    return f"{name} was {reason if reason.startswith('cut: ') else f'left out: {reason}'}"


def _entries(kept: Any) -> list[list[str]]:
    return kept if isinstance(kept, list) else []


def exception_of(execution: Execution) -> dict[str, str] | None:
    """What ended its program, by its own account: type, message, traceback. None where nothing is
    known of it, or it was erased."""
    if not execution.exception:
        return None
    told: dict[str, str] = from_json(execution.exception)
    return told


def timings_of(execution: Execution) -> TimingsShape:
    """Milliseconds; None for what did not happen, or not yet."""
    return {
        "queue_ms": execution.queue_ms,
        "start_ms": execution.start_ms,
        "run_ms": execution.run_ms,
        "total_ms": execution.total_ms,
    }


def log_execution(execution: Execution, instance_id: str = "") -> None:
    """Of one that has ended. `instance_id` is what its provider calls the sandbox."""
    for each in extensions.installed():
        each.after_end(execution)
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


LARGE = ("pending", "code", "arguments")


def executions_of(tenant: Tenant | None) -> QuerySet[Execution]:
    found = Execution.objects.defer(*LARGE)
    return found if tenant is None else found.filter(tenant=tenant)


def artifacts_of(tenant: Tenant | None) -> QuerySet[Artifact]:
    found = Artifact.objects.all()
    return found if tenant is None else found.filter(execution__tenant=tenant)
