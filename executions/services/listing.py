"""A tenant's executions, page by page, newest first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from uuid import UUID

from executions.models import Execution, Tenant
from executions.services.requests import refuse

DEFAULT_LIMIT = 50
MAX_LIMIT = 200

_LARGE = ("pending", "code", "arguments", "result", "outputs", "stdout", "stderr")
_EXACT = ("status", "language", "provider")


@dataclass(frozen=True)
class ExecutionFilter:
    """Which executions, and where to go on. Empty strings stand for no restriction."""

    status: str = ""
    language: str = ""
    provider: str = ""
    limit: int = DEFAULT_LIMIT
    cursor: UUID | None = None

    @classmethod
    def from_query(cls, query: Mapping[str, str]) -> ExecutionFilter:
        """Raises InvalidConfiguration for a parameter that is unknown or malformed."""
        known = (*_EXACT, "limit", "cursor")
        for name in query:
            if name not in known:
                refuse(name, f"Unknown parameter. Known are: {', '.join(known)}.")
        status = query.get("status", "")
        if status and status not in Execution.Status.values:
            refuse("status", f"Must be one of: {', '.join(Execution.Status.values)}.")
        for name in ("language", "provider"):
            if "\0" in query.get(name, ""):
                refuse(name, "Must hold no NUL.")
        return cls(
            status=status,
            language=query.get("language", ""),
            provider=query.get("provider", ""),
            limit=_limit(query.get("limit", "")),
            cursor=_cursor(query.get("cursor", "")),
        )


@dataclass(frozen=True)
class Page:
    executions: list[Execution]
    next_cursor: str


def list_executions(tenant: Tenant, wanted: ExecutionFilter) -> Page:
    """One page, in one query, without what may be large. No count: a tenant may have millions."""
    found = Execution.objects.filter(tenant=tenant).defer(*_LARGE).order_by("-id")
    for name in _EXACT:
        if value := getattr(wanted, name):
            found = found.filter(**{name: value})
    if wanted.cursor:
        found = found.filter(pk__lt=wanted.cursor)
    executions = list(found[: wanted.limit + 1])
    more = len(executions) > wanted.limit
    executions = executions[: wanted.limit]
    return Page(executions, str(executions[-1].pk) if more else "")


def _limit(text: str) -> int:
    if not text:
        return DEFAULT_LIMIT
    if not (text.isascii() and text.isdigit() and len(text) < 6 and 1 <= int(text) <= MAX_LIMIT):
        refuse("limit", f"Must be 1 to {MAX_LIMIT}.")
    return int(text)


def _cursor(text: str) -> UUID | None:
    if not text:
        return None
    try:
        return UUID(text)
    except ValueError:
        refuse("cursor", "Must come from the answer before.")
