"""Pages of what a tenant has, by age."""

from __future__ import annotations

from typing import TypeVar
from uuid import UUID

from django.db.models import Model, QuerySet

M = TypeVar("M", bound=Model)


def newest_first(found: QuerySet[M], cursor: UUID | None, limit: int) -> tuple[list[M], str]:
    """At most `limit` rows before the cursor, and the cursor of the next page: "" on the last one.

    One query and no count: a tenant may have millions.
    """
    return _page(found.order_by("-pk"), "pk__lt", cursor, limit)


def oldest_first(found: QuerySet[M], cursor: UUID | None, limit: int) -> tuple[list[M], str]:
    """As `newest_first`, in the opposite order."""
    return _page(found.order_by("pk"), "pk__gt", cursor, limit)


def _page(found: QuerySet[M], behind: str, cursor: UUID | None, limit: int) -> tuple[list[M], str]:
    if cursor:
        found = found.filter(**{behind: cursor})
    rows = list(found[: limit + 1])
    more = len(rows) > limit
    rows = rows[:limit]
    return rows, str(rows[-1].pk) if more else ""
