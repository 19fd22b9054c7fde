"""The dashboard's figures, from the hourly counts: five queries, however many executions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from django.db.models import Case, CharField, F, Sum, Value, When
from django.utils import timezone

from executions.kernel.database import one_moment
from executions.models.statistic import ExecutionCount, ExecutionLatency, ExecutionTenantCount
from executions.runs.models import Execution
from executions.services.statistics import LEFT, percentiles
from providers import errors

TARGET_PERCENT = 95.0
# Hours shown, and hours a bar.
RANGES = {"24h": (24, 1), "7d": (24 * 7, 6)}

_NAME = CharField(null=True)
_TOP = 6
_OTHERS = "others"
_RAN = (Execution.Status.SUCCEEDED, Execution.Status.FAILED)


@dataclass
class Series:
    """One line of a stacked chart: a name and a number for each of the chart's bars."""

    name: str
    values: list[int]


@dataclass
class Figures:
    """What happened in the hours that end with the current one.

    `success_percent` is of what ended otherwise than by being cancelled, None when nothing did;
    `ran_percent` is the part whose code ran to its own end, whatever its exit code.
    Latencies are milliseconds. `cost` is None where executions carry none; `unpriced` of them have
    no price.
    """

    since: datetime
    bars: list[datetime]
    total: int = 0
    success_percent: float | None = None
    ran_percent: float | None = None
    statuses: dict[str, int] = field(default_factory=dict)
    errors: list[tuple[str, str, int]] = field(default_factory=list)
    p50: float | None = None
    p95: float | None = None
    p99: float | None = None
    by_provider: list[Series] = field(default_factory=list)
    by_tenant: list[Series] = field(default_factory=list)
    tenants: list[dict[str, Any]] = field(default_factory=list)
    cost: float | None = None
    unpriced: int = 0

    @property
    def on_target(self) -> bool:
        return self.success_percent is not None and self.success_percent >= TARGET_PERCENT


def figures(hours: int, step: int = 1, now: datetime | None = None) -> Figures:
    """The figures of the last `hours` hours, the current one included, `step` hours a bar.

    All are of one moment: what ends meanwhile is in none of them.
    """
    current = (now or timezone.now()).replace(minute=0, second=0, microsecond=0)
    first = current - timedelta(hours=hours - 1)
    shown = [first + timedelta(hours=after) for after in range(0, hours, step)]
    found = Figures(shown[0], shown)
    with one_moment():
        _read(found, shown, step)
    return found


def _read(found: Figures, shown: list[datetime], step: int) -> None:
    counts = ExecutionCount.objects.filter(hour__gte=found.since).exclude(status=LEFT).order_by()
    _outcomes(found, counts)
    latencies = ExecutionLatency.objects.filter(hour__gte=found.since).order_by()
    histogram = latencies.values_list("bucket").annotate(number=Sum("count"))
    found.p50, found.p95, found.p99 = percentiles(histogram, 0.50, 0.95, 0.99)
    of_tenants = ExecutionTenantCount.objects.filter(hour__gte=found.since).order_by()
    busiest = of_tenants.values_list("tenant_slug").annotate(number=Sum("count"))
    found.tenants = [
        {"tenant_slug": slug, "number": number, "percent": 100 * number / (found.total or 1)}
        for slug, number in busiest.order_by("-number", "tenant_slug")[:_TOP]
    ]
    found.by_provider = _series(
        shown, step, counts.values_list("hour", "provider").annotate(number=Sum("count"))
    )
    top = [entry["tenant_slug"] for entry in found.tenants]
    # The others are counted themselves: as what is left of a number of another table they would
    # be less than none while that one is being corrected.
    by_name = Case(
        When(tenant_slug__in=top, then=F("tenant_slug")), default=Value(None), output_field=_NAME
    )
    named = of_tenants.annotate(shown_as=by_name).values_list("hour", "shown_as")
    found.by_tenant = _series(shown, step, named.annotate(number=Sum("count")))


def _outcomes(found: Figures, counts: Any) -> None:
    by_code: dict[str, int] = defaultdict(int)
    statuses: dict[str, int] = defaultdict(int)
    spent = 0.0
    rows = counts.values_list("status", "error_code").annotate(
        number=Sum("count"), spent=Sum("cost"), with_price=Sum("priced")
    )
    for status, code, number, cost, priced in rows:
        statuses[status] += number
        spent += cost
        found.unpriced += number - priced
        if code:
            by_code[code] += number
    found.statuses = dict(statuses)
    found.total = sum(statuses.values())
    found.cost = spent or None
    judged = found.total - statuses.get(Execution.Status.CANCELLED, 0)
    if judged:
        found.success_percent = 100 * statuses.get(Execution.Status.SUCCEEDED, 0) / judged
        found.ran_percent = 100 * sum(statuses.get(status, 0) for status in _RAN) / judged
    found.errors = [
        (code, errors.CODES[code].title if code in errors.CODES else "", by_code[code])
        for code in sorted(by_code, key=lambda code: -by_code[code])
    ]


def _series(
    bars: list[datetime], step: int, rows: Iterable[tuple[datetime, str | None, int]]
) -> list[Series]:
    """The rows by name, the busiest first; those without one are the others'."""
    width = timedelta(hours=step)
    values: dict[str | None, list[int]] = defaultdict(lambda: [0] * len(bars))
    for hour, name, number in rows:
        # A clock that was set back leaves counts of hours to come.
        position = min((hour - bars[0]) // width, len(bars) - 1)
        values["none" if name == "" else name][position] += number
    return [
        Series(_OTHERS if name is None else name, values[name])
        for name in sorted(values, key=lambda name: (name is None, -sum(values[name])))
        if name is not None or any(values[name])
    ]
