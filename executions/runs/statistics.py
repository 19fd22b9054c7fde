"""Statistics of executions: sums in one table, and the one statement that adds to them."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, NamedTuple

from django.db import connection, models

from executions.kernel.postgresql import DeferredStatement
from executions.runs.models import hour_of

# The hour of a sum that began with the first execution.
ALL_TIME = datetime(1970, 1, 1, tzinfo=UTC)
# Of a tenant: executions and their cost by hour, bytes and milliseconds by day.
TENANT, STORED, RAN = "tenant", "stored", "ran"


class Statistic(models.Model):
    """How many there were of something in one hour or day (UTC) or ever, and how much of it in all.

    The index of the constraint finds the hours of a kind, the other one those of a tenant.
    """

    kind = models.CharField(max_length=16)
    name = models.CharField(max_length=64, help_text="Tenant or provider.")
    hour = models.DateTimeField(help_text="Begin of the hour or the day.")
    label = models.CharField(
        max_length=32, help_text="Status with error code, bucket of a duration, or event."
    )
    count = models.PositiveBigIntegerField()
    amount = models.FloatField(default=0, help_text="Cost, or seconds of durations.")

    class Meta:
        indexes = (models.Index(fields=("name", "kind", "hour"), name="statistic_name"),)
        constraints = (
            models.UniqueConstraint(
                fields=("kind", "hour", "name", "label"), name="statistic_once"
            ),
        )

    def __str__(self) -> str:
        return f"{self.kind} {self.name} {self.hour:%Y-%m-%d %H} {self.label}"


class Increment(NamedTuple):
    """What is added to one row. The first four name the row."""

    kind: str
    name: str
    hour: datetime
    label: str = ""
    number: int = 1
    amount: float = 0.0


Sums = dict[tuple[str, str, datetime, str], tuple[int, float]]


def tenant_use(
    tenant_slug: str,
    at: datetime,
    *,
    ended: int = 0,
    cost: float = 0.0,
    stored_bytes: int = 0,
    used_ms: int = 0,
) -> list[Increment]:
    """Return what a tenant has used of its quotas."""
    hour = hour_of(at)
    day = hour.replace(hour=0)
    return [
        Increment(TENANT, tenant_slug, hour, number=ended, amount=cost),
        Increment(STORED, tenant_slug, day, number=stored_bytes),
        Increment(RAN, tenant_slug, day, number=used_ms),
    ]


def sum_up(increments: Iterable[Increment]) -> Sums:
    """Return count and amount of each row."""
    sums: Sums = {}
    for each in increments:
        count, amount = sums.get(each[:4], (0, 0.0))
        sums[each[:4]] = count + each.number, amount + each.amount
    return sums


def add(increments: Iterable[Increment]) -> None:
    """Add to rows, or begin them, in the transaction of what they count.

    One statement, in one order: two transactions that took rows in different orders would wait for
    each other for ever. Whoever has these locks waits for no other: call it last, behind the ledger
    entry and whatever else the transaction writes for several tenants.
    """
    sums = sum_up(increments)
    values: list[Any] = []
    for kind, name, hour, label in sorted(sums):
        values += (kind, name, _adapt(hour), label, *sums[kind, name, hour, label])
    with connection.cursor() as cursor:
        cursor.execute(_upsert(len(sums)), values)


@lru_cache(maxsize=16)
def _adapt(hour: datetime) -> Any:
    return connection.ops.adapt_datetimefield_value(hour)


@lru_cache(maxsize=64)
def _upsert(number: int) -> DeferredStatement:
    """For so many rows. Every name is from our own model."""
    table = Statistic._meta.db_table
    places = ", ".join(["(%s, %s, %s, %s, %s, %s)"] * number)
    return DeferredStatement(
        f"INSERT INTO {table} (kind, name, hour, label, count, amount) VALUES {places}"  # noqa: S608
        " ON CONFLICT (kind, hour, name, label) DO UPDATE SET"
        f" count = {table}.count + excluded.count, amount = {table}.amount + excluded.amount"
    )


def rows_since(hour: datetime, *kinds: str) -> models.QuerySet[Statistic]:
    """Return the rows of these kinds from an hour on."""
    return Statistic.objects.filter(kind__in=kinds, hour__gte=hour).order_by()
