"""Claims of rows: of several processes one works on a row, for a time by the database's clock."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, TypeVar

from django.db import models, transaction
from django.db.models import F, Q, QuerySet
from django.db.models.functions import Now


class Claimable(models.Model):
    """A row that one process at a time works on.

    It is free where `claimed_until`, the end of a claim or the time of the next attempt, is null or
    past. `claims` grows with each claim and with each end of one. Whoever has an earlier number
    changes nothing.
    """

    claimed_until = models.DateTimeField(null=True, editable=False)
    claims = models.PositiveBigIntegerField(default=0, db_default=0, editable=False)
    tries = models.PositiveIntegerField("attempts", default=0, editable=False)
    problem = models.CharField("last error", max_length=500, blank=True, default="", editable=False)

    class Meta:
        abstract = True


Row = TypeVar("Row", bound=Claimable)


def is_free() -> Q:
    """Return the condition of rows that can be claimed."""
    return Q(claimed_until=None) | Q(claimed_until__lte=Now())


def claim(rows: QuerySet[Row], span: timedelta, **values: Any) -> Row | None:
    """Claim the first of these rows that is free. None where none is."""
    values |= {"claimed_until": Now() + span, "claims": F("claims") + 1}
    while (row := rows.filter(is_free()).first()) is not None:
        with transaction.atomic():
            if by_claim(row).filter(is_free()).update(**values):
                row.refresh_from_db(fields=values)
                return row
    return None


def by_claim(row: Row) -> QuerySet[Row]:
    """Return the row, or none where a later claim took it."""
    return type(row)._default_manager.filter(pk=row.pk, claims=row.claims)


def end(row: Claimable, **values: Any) -> bool:
    """End the claim with these values. False where a later claim took the row.

    Whoever has just read the row as one to be worked on, and claims it now, does not get it.
    """
    return bool(by_claim(row).update(**{"claimed_until": None, "claims": F("claims") + 1} | values))
