"""A tenant's executions, page by page, newest first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from executions.kernel.declarations import STORABLE, Id, Query, declared, newest_first, one_of
from executions.models.execution import Execution
from executions.services.claims import CLAIMS, Agent, ConversationName, Model, OnBehalfOf
from executions.tenants.models import Tenant
from executions.tenants.tenant_scope import executions_of

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
