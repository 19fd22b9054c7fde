"""How providers do beside each other: what a split between them is made for."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal

from django.utils import timezone

from executions.models import Execution

MOST_EXECUTIONS = 20_000


@dataclass(frozen=True)
class Row:
    """One provider. Shares are of its executions; times are milliseconds with the sandbox's start.

    `failed_over` counts executions that it was tried for and that then went to another one.
    """

    provider: str
    executions: int
    errors: int
    timeouts: int
    failed_over: int
    p50_ms: float | None
    p95_ms: float | None
    cost: Decimal | None

    @property
    def error_percent(self) -> float:
        return round(100 * self.errors / self.executions, 1) if self.executions else 0.0

    @property
    def cost_of_thousand(self) -> Decimal | None:
        return 1000 * self.cost / self.executions if self.cost and self.executions else None


def compare(hours: int = 24) -> list[Row]:
    """Every provider that was tried in the last `hours`, over at most MOST_EXECUTIONS."""
    recent = Execution.objects.filter(
        created_at__gte=timezone.now() - timedelta(hours=hours), finished_at__isnull=False
    ).values_list("provider", "status", "start_ms", "run_ms", "cost", "hops")
    times: dict[str, list[float]] = defaultdict(list)
    counts: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    costs: dict[str, Decimal] = {}
    for provider, status, start_ms, run_ms, cost, hops in recent[:MOST_EXECUTIONS]:
        for hop in hops:
            if hop["outcome"] == "failed" and hop["provider"] != provider:
                counts[hop["provider"]]["failed_over"] += 1
        if not provider:
            continue
        counts[provider]["executions"] += 1
        counts[provider][status] += 1
        if start_ms is not None and run_ms is not None:
            times[provider].append(start_ms + run_ms)
        if cost is not None:
            costs[provider] = costs.get(provider, Decimal(0)) + cost
    return [
        Row(
            provider,
            count["executions"],
            count[Execution.Status.ERROR],
            count[Execution.Status.TIMED_OUT],
            count["failed_over"],
            _percentile(times[provider], 0.50),
            _percentile(times[provider], 0.95),
            costs.get(provider),
        )
        for provider, count in sorted(counts.items())
    ]


def _percentile(values: list[float], share: float) -> float | None:
    ordered = sorted(values)
    return round(ordered[min(len(ordered) - 1, int(len(ordered) * share))], 1) if ordered else None
