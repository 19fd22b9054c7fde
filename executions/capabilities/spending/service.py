"""The cost of runs, the budgets of tenants, and a comparison of providers."""

from __future__ import annotations

import logging
import statistics
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import Any

from django.db.models import F, Q, Sum
from django.utils import timezone

from executions.capabilities.observability.counters import (
    LEFT,
    OUTCOME,
    PRICED,
    latencies,
    percentiles,
)
from executions.capabilities.spending.models import Budget, Spending, SpendingAlert
from executions.kernel.database import snapshot_read
from executions.runs.models import Execution, hour_of
from executions.runs.statistics import rows_since
from executions.tenants.quotas import OF_ALL_BUDGETS, Quota
from providers.errors import RateLimited
from providers.services.route_order import price_of
from providers.services.settings_cache import CachedQuery

logger = logging.getLogger(__name__)

SPIKE_FACTOR = 2
SPIKE_DAYS = 7
_PLACES = Decimal("0.00000001")


def cost_of(provider_id: str, timings: Mapping[str, Any]) -> Decimal | None:
    """The estimate for a run: by its provider's price and its seconds in a sandbox, starting
    included.

    None where the provider has no price, or where it never got so far as to have a sandbox.
    """
    if timings.get("start_ms") is None:
        return None
    price = price_of(provider_id)
    if price is None:
        return None
    milliseconds = Decimal(timings["start_ms"] + (timings.get("run_ms") or 0.0))
    return price.of(milliseconds / 1000).quantize(_PLACES)


def spend(tenant_slug: str, cost: Decimal) -> None:
    """Add to what the tenant has spent today."""
    today = _today()
    Spending.objects.get_or_create(tenant_slug=tenant_slug, day=today)
    Spending.objects.filter(tenant_slug=tenant_slug, day=today).update(
        amount=F("amount") + cost, executions=F("executions") + 1
    )


def ensure_budget(tenant_slug: str) -> None:
    """Raise RateLimited when the tenant's budget, or that of all together, is used up."""
    for budget in _budgets():
        if budget.tenant_slug not in ("", tenant_slug):
            continue
        spent = _spent(budget)
        if spent >= budget.limit:
            whose = "The tenant's" if budget.tenant_slug else "The"
            message = f"{whose} budget for this {budget.period} is used up."
            told = f"{message} {spent:.4f} spent."
            _alert(SpendingAlert.Kind.STOP, budget.tenant_slug, told, budget.period)
            raise RateLimited(
                f"{message} An administrator can raise it.",
                field=_quota_of(budget).value if budget.tenant_slug else OF_ALL_BUDGETS,
                retry_after=_seconds_left(budget),
            )


def budgets_of(tenant_slug: str) -> dict[Quota, tuple[Decimal, Decimal, datetime]]:
    """The tenant's own budgets: what may be spent, what is, and when it begins anew.

    That of all together is told to nobody: it would say what others spend.
    """
    return {
        _quota_of(budget): (budget.limit, _spent(budget), _end_of(budget))
        for budget in _budgets()
        if budget.tenant_slug == tenant_slug
    }


def budgets_near() -> list[tuple[Budget, Decimal]]:
    """The budgets that are used up to their warning or beyond, with what was spent, the worst
    first. One query, whatever their number, beside that for the budgets."""
    budgets = _budgets()
    if not budgets:
        return []
    today = _today()
    rows = Spending.objects.filter(day__gte=today.replace(day=1)).order_by()
    if all(budget.tenant_slug for budget in budgets):
        rows = rows.filter(tenant_slug__in={budget.tenant_slug for budget in budgets})
    spent: dict[tuple[str, str], Decimal] = defaultdict(Decimal)
    sums = rows.values_list("tenant_slug").annotate(
        month=Sum("amount"), day=Sum("amount", filter=Q(day=today))
    )
    for slug, of_month, of_day in sums:
        for whose in (slug, ""):
            spent[whose, Budget.Period.MONTH] += of_month
            spent[whose, Budget.Period.DAY] += of_day or 0
    found = [(budget, spent[budget.tenant_slug, budget.period]) for budget in budgets]
    near = [each for each in found if each[1] >= each[0].limit * each[0].warn_percent / 100]
    return sorted(near, key=lambda each: each[0].limit - each[1])


def watch_spending() -> int:
    """Tell of budgets that are nearly used up and of spending that has jumped. New alerts."""
    alerts = 0
    for budget in Budget.objects.all():
        spent = _spent(budget)
        if spent >= budget.limit * budget.warn_percent / 100:
            whose = budget.tenant_slug or "all tenants"
            message = (
                f"{spent:.4f} of {budget.limit:.4f} for this {budget.period} spent by {whose}."
            )
            alerts += _alert(SpendingAlert.Kind.WARNING, budget.tenant_slug, message, budget.period)
    today = _today()
    for row in Spending.objects.filter(day=today, amount__gt=0):
        average = _daily_average(row.tenant_slug, today)
        if average and row.amount > SPIKE_FACTOR * average:
            message = (
                f"{row.tenant_slug} has spent {row.amount:.4f} today, "
                f"against {average:.4f} on an average day."
            )
            alerts += _alert(SpendingAlert.Kind.SPIKE, row.tenant_slug, message)
    return alerts


_budgets = CachedQuery(lambda: list(Budget.objects.all()), Budget)


def _spent(budget: Budget) -> Decimal:
    today = _today()
    since = today if budget.period == Budget.Period.DAY else today.replace(day=1)
    rows = Spending.objects.filter(day__gte=since)
    if budget.tenant_slug:
        rows = rows.filter(tenant_slug=budget.tenant_slug)
    return rows.aggregate(total=Sum("amount"))["total"] or Decimal(0)


def _daily_average(tenant_slug: str, today: date) -> Decimal | None:
    """Of the days before today that it has spent anything on; None when there is none."""
    past = Spending.objects.filter(
        tenant_slug=tenant_slug, day__lt=today, day__gte=today - timedelta(days=SPIKE_DAYS)
    )
    amounts = list(past.values_list("amount", flat=True))
    return sum(amounts, Decimal(0)) / len(amounts) if amounts else None


def _alert(kind: SpendingAlert.Kind, tenant_slug: str, message: str, period: str = "") -> bool:
    """Tell, unless it was told today. Whether it is news."""
    _, is_new = SpendingAlert.objects.get_or_create(
        kind=kind,
        tenant_slug=tenant_slug,
        period=period,
        day=_today(),
        defaults={"message": message},
    )
    if is_new:
        logger.warning("spending: %s", message, extra={"alert": kind, "tenant_id": tenant_slug})
    return is_new


def _quota_of(budget: Budget) -> Quota:
    is_daily = budget.period == Budget.Period.DAY
    return Quota.BUDGET_OF_DAY if is_daily else Quota.BUDGET_OF_MONTH


def _seconds_left(budget: Budget) -> float:
    return (_end_of(budget) - timezone.now()).total_seconds()


def _end_of(budget: Budget) -> datetime:
    now = timezone.now()
    if budget.period == Budget.Period.DAY:
        return datetime(now.year, now.month, now.day, tzinfo=now.tzinfo) + timedelta(days=1)
    following = (now.replace(day=1) + timedelta(days=32)).replace(day=1)
    return datetime(following.year, following.month, 1, tzinfo=now.tzinfo)


def _today() -> date:
    return timezone.now().date()


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
    counts = rows_since(since, OUTCOME, PRICED, LEFT).exclude(name="").values_list("name")
    with snapshot_read():
        summed = list(
            counts.annotate(
                executions=_number(OUTCOME),
                errors=_number(OUTCOME, Execution.Status.ERROR),
                timeouts=_number(OUTCOME, Execution.Status.TIMED_OUT),
                left=_number(LEFT),
                priced=_number(PRICED),
                cost=Sum("amount"),
            )
        )
        histograms = latencies(since)
    rows = []
    for provider, executions, errors, timeouts, left, priced, cost in sorted(summed):
        p50, p95 = percentiles(histograms[provider], 0.50, 0.95)
        spent = cost if priced else None
        rows.append(
            Row(
                *(provider, executions, errors, timeouts, left, p50, p95, priced, spent),
                *_starts(provider),
            )
        )
    return rows


def _number(kind: str, status: str = "") -> Sum:
    return Sum("count", filter=Q(kind=kind, label__startswith=status), default=0)


def _starts(provider: str) -> tuple[float | None, float | None]:
    """The median and the most of the last single runs' starts; None where there was none."""
    last = Execution.objects.filter(provider=provider).order_by("-id")
    found = last.values_list("start_ms", "session_id")[:LAST]
    single = [start for start, session in found if session is None]
    starts = [start for start in single if start is not None]
    return (statistics.median(starts), max(starts)) if starts else (None, None)
