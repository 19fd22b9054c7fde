"""A tenant at a glance: what it used, what it has, what it did last, in a few indexed queries."""

from __future__ import annotations

from collections import defaultdict
from datetime import datetime, timedelta

from django.db.models import F, QuerySet, Sum
from django.utils import timezone

from executions.models.statistic import ExecutionTenantCount
from executions.runs.models import Execution
from executions.services.dashboard import Series
from executions.sessions.models import Session
from executions.tenants.models import ApiKey, Tenant
from executions.tenants.tenant_scope import executions_of, sessions_of

DAYS = 30
LATEST = 8
KEYS = 20


def runs_by_day(
    tenant: Tenant, now: datetime | None = None
) -> tuple[list[datetime], list[Series], float | None]:
    """The days (UTC), the oldest first and today the last, how many executions ended in each, and
    what all of them cost; None where none did."""
    today = (now or timezone.now()).replace(hour=0, minute=0, second=0, microsecond=0)
    days = [today - timedelta(days=before) for before in range(DAYS - 1, -1, -1)]
    counts = ExecutionTenantCount.objects.filter(tenant_slug=tenant.slug, hour__gte=days[0])
    numbers: dict[datetime, int] = defaultdict(int)
    cost = 0.0
    rows = counts.order_by().values_list("hour").annotate(n=Sum("count"), spent=Sum("cost"))
    for hour, number, spent in rows:
        # A clock that was set back leaves counts of hours to come.
        numbers[min(hour.replace(hour=0), today)] += number
        cost += spent
    return days, [Series("executions", [numbers[day] for day in days])], cost or None


def latest_runs(tenant: Tenant) -> QuerySet[Execution]:
    """With what is shown of them alone: a tenant decides how long its outputs are."""
    shown = ("created_at", "status", "language")
    return executions_of(tenant).order_by("-pk").only(*shown)[:LATEST]


def latest_sessions(tenant: Tenant) -> QuerySet[Session]:
    """With what is shown of them alone: nothing of it is encrypted."""
    return sessions_of(tenant).order_by("-pk").only("name", "state", "language")[:LATEST]


def newest_keys(tenant: Tenant) -> QuerySet[ApiKey]:
    """Those in force before the revoked ones, of which the one revoked last is the first."""
    newest = (F("revoked_at").desc(nulls_first=True), "-pk")
    return ApiKey.objects.filter(tenant=tenant).order_by(*newest)[:KEYS]
