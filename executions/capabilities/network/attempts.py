"""Attempts to reach hosts as rows, so that they can be found: by host, tenant and outcome."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any
from uuid import UUID

from django.db.models import QuerySet
from pydantic import Field

from executions.capabilities.network.models import NetworkAttempt
from executions.kernel.bodies import Time
from executions.kernel.declarations import STORABLE, Query, declared, newest_first, one_of
from executions.runs.models import Execution
from executions.runs.network import OUTCOMES, checked_attempts
from executions.runs.results import DEFAULT_LIMIT, Cursor, Limit
from executions.runs.shapes import NetworkAttemptShape
from executions.tenants.models import Tenant
from providers.network import NETWORK, normalized_host


def store(
    attempts: Sequence[Mapping[str, Any]],
    tenant_id: int | None,
    tenant_slug: str,
    *,
    execution: Execution | None = None,
    session_id: UUID | None = None,
) -> None:
    """Insert rows of attempts as `runs.network.checked_attempts` has them. `tenant_id` is None of
    a tenant that is gone."""
    NetworkAttempt.objects.bulk_create(
        NetworkAttempt(
            execution=execution,
            session_id=session_id,
            tenant_id=tenant_id,
            tenant_slug=tenant_slug,
            **{**each, "at": datetime.fromtimestamp(each["at"], UTC)},
        )
        for each in attempts
    )


def store_of_run(ended: Execution) -> None:
    """Insert the attempts that the record of a run has, in the transaction of its end."""
    found = checked_attempts(ended.meta.get(NETWORK))
    if found and found["attempts"]:
        store(
            found["attempts"],
            ended.tenant_id,
            ended.tenant_slug,
            execution=ended,
            session_id=ended.session_id,
        )


@declared
class AttemptFilter:
    """Which attempts, and where to go on. Empty strings stand for no restriction."""

    host: Annotated[
        str, Field(max_length=255, description="A host, or `*.example.com`."), STORABLE
    ] = ""
    outcome: Annotated[str, one_of(OUTCOMES)] = ""
    limit: Limit = DEFAULT_LIMIT
    cursor: Cursor | None = None


LIST = Query(AttemptFilter, empty_is_none=True)


@dataclass(frozen=True)
class Page:
    attempts: list[NetworkAttempt]
    next_cursor: str


def list_attempts(tenant: Tenant, wanted: AttemptFilter) -> Page:
    """A page of the tenant's attempts, newest first."""
    found = of_host(attempts_of(tenant), wanted.host)
    if wanted.outcome:
        found = found.filter(outcome=wanted.outcome)
    return Page(*newest_first(found, wanted.cursor, wanted.limit))


def attempts_of(tenant: Tenant) -> QuerySet[NetworkAttempt]:
    # Not by its slug, which may have been another tenant's before.
    return NetworkAttempt.objects.filter(tenant=tenant)


def of_host(rows: QuerySet[NetworkAttempt], host: str) -> QuerySet[NetworkAttempt]:
    """Those to a host, or to all hosts of `*.suffix`; all of them for ""."""
    if host.startswith("*."):
        return rows.filter(host__endswith=host[1:].lower())
    if not host:
        return rows
    try:
        return rows.filter(host=normalized_host(host))
    except ValueError:
        # What is no host was asked for by a program all the same, and is found as it was.
        return rows.filter(host=host)


class FoundAttemptShape(NetworkAttemptShape):
    """An attempt, and what made it."""

    id: str
    execution: Annotated[str | None, "Null between the runs of a session."]
    session: str | None
    at: Time


def detail(row: NetworkAttempt) -> FoundAttemptShape:
    return {
        "id": str(row.pk),
        "execution": str(row.execution_id) if row.execution_id else None,
        "session": str(row.session_id) if row.session_id else None,
        "at": row.at.isoformat(),
        "host": row.host,
        "port": row.port,
        "outcome": row.outcome,
        "why": row.why,
        "method": row.method,
        "path": row.path,
        "layer": row.layer,
        "rule": row.rule,
        "credential": row.credential,
        "noted": row.noted,
        "sent": row.sent,
        "received": row.received,
        "seconds": row.seconds,
    }
