"""A tenant's executions, page by page, and their summaries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from django.db.models import QuerySet
from pydantic import Field

from executions.kernel.declarations import STORABLE, Id, Query, declared, newest_first, one_of
from executions.runs.models import Artifact, Execution
from executions.runs.requests import CLAIMS, Agent, ConversationName, Model, OnBehalfOf
from executions.runs.results import error_of, place_of, timings_of
from executions.runs.shapes import ExecutionSummaryShape
from executions.tenants.models import Tenant

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


LARGE = ("pending", "code", "arguments")


def executions_of(tenant: Tenant | None) -> QuerySet[Execution]:
    found = Execution.objects.defer(*LARGE)
    return found if tenant is None else found.filter(tenant=tenant)


def artifacts_of(tenant: Tenant | None) -> QuerySet[Artifact]:
    found = Artifact.objects.all()
    return found if tenant is None else found.filter(execution__tenant=tenant)
