"""How providers do beside each other: what a split between them is made for."""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import dataclass
from datetime import timedelta

from django.db.models import Q, Sum
from django.utils import timezone

from executions.kernel.database import one_moment
from executions.models.statistic import ExecutionCount, ExecutionLatency
from executions.runs.models import Execution
from executions.services.statistics import hour_of, percentiles

# Of so many of its last executions it is said how long their sandboxes took to be there.
LAST = 200


@dataclass(frozen=True)
class Row:
    """One provider. Shares are of its executions; times are milliseconds, waiting included.

    `start_ms` is the median of what the last ones waited for a sandbox once it was their turn, and
    `cold_ms` the most: where sandboxes are kept warm, it is what one takes that is not.
    `left` counts what was tried with it and then went to another one. `cost` is that of the
    `priced` executions, None where there are none. The others are `unpriced`.
    """

    provider: str
    executions: int
    errors: int
    timeouts: int
    left: int
    p50_ms: float | None
    p95_ms: float | None
    priced: int
    cost: float | None
    start_ms: float | None = None
    cold_ms: float | None = None

    @property
    def unpriced(self) -> int:
        return self.executions - self.priced

    @property
    def error_percent(self) -> float:
        return round(100 * self.errors / self.executions, 1) if self.executions else 0.0

    @property
    def cost_of_thousand(self) -> float | None:
        return 1000 * self.cost / self.priced if self.cost is not None else None


def compare_providers(hours: int = 24) -> list[Row]:
    """Every provider that was tried in the last `hours`, the current one included.

    Over all executions that ended in them, from the hourly counts.
    """
    since = hour_of(timezone.now()) - timedelta(hours=hours - 1)
    counts = ExecutionCount.objects.filter(hour__gte=since).exclude(provider="").order_by()
    with one_moment():
        summed = list(
            counts.values("provider").annotate(
                executions=Sum("count"),
                errors=Sum("count", filter=Q(status=Execution.Status.ERROR)),
                timeouts=Sum("count", filter=Q(status=Execution.Status.TIMED_OUT)),
                hops=Sum("went_on"),
                with_price=Sum("priced"),
                spent=Sum("cost"),
            )
        )
        latencies = ExecutionLatency.objects.filter(hour__gte=since).exclude(provider="")
        histograms: dict[str, list[tuple[int, int]]] = defaultdict(list)
        buckets = latencies.order_by().values_list("provider", "bucket")
        for provider, bucket, number in buckets.annotate(number=Sum("count")):
            histograms[provider].append((bucket, number))
    rows = []
    for found in sorted(summed, key=lambda row: row["provider"]):
        p50, p95 = percentiles(histograms[found["provider"]], 0.50, 0.95)
        priced = found["with_price"]
        start, cold = _starts(found["provider"])
        rows.append(
            Row(
                found["provider"],
                found["executions"],
                found["errors"] or 0,
                found["timeouts"] or 0,
                found["hops"],
                p50,
                p95,
                priced,
                found["spent"] if priced else None,
                start,
                cold,
            )
        )
    return rows


def _starts(provider: str) -> tuple[float | None, float | None]:
    """The median and the most of the last single runs' starts; None where there was none."""
    last = Execution.objects.filter(provider=provider).order_by("-id")
    found = last.values_list("start_ms", "session_id")[:LAST]
    single = [start for start, session in found if session is None]
    starts = [start for start in single if start is not None]
    return (statistics.median(starts), max(starts)) if starts else (None, None)
