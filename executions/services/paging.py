"""Pages of what a tenant has, newest first."""

from __future__ import annotations

from typing import TypeVar
from uuid import UUID

from django.db.models import Model, QuerySet

M = TypeVar("M", bound=Model)


def newest_first(found: QuerySet[M], cursor: UUID | None, limit: int) -> tuple[list[M], str]:
    """At most `limit` rows before the cursor, and the cursor of the next page: "" on the last one.

    One query and no count: a tenant may have millions.
    """
    found = found.order_by("-pk")
    if cursor:
        found = found.filter(pk__lt=cursor)
    rows = list(found[: limit + 1])
    more = len(rows) > limit
    rows = rows[:limit]
    return rows, str(rows[-1].pk) if more else ""
