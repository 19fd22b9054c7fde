"""What happens when a tenant, a key or a budget goes, in sentences for who decides."""

from __future__ import annotations

from typing import Any

from django.db.models import Q, QuerySet
from django.utils import timezone
from django.utils.translation import ngettext

from executions.capabilities.schedules.models import Schedule
from executions.capabilities.spending.models import Budget
from executions.runs.models import Execution
from executions.sessions.models import Session
from executions.tenants.models import ApiKey, Tenant
from providers.hidden_characters import visible

# Counted no further: a page waits for it.
MOST = 1000


def without_tenant(tenant: Tenant) -> list[str]:
    """Once it is removed."""
    kept = "Records of its runs are kept. Its keys, schedules and saved files are deleted."
    return [*_without_its_power(tenant), kept]


def inactive_tenant(tenant: Tenant) -> list[str]:
    """Once it is not active any more. Nothing for one that is not active now."""
    return _without_its_power(tenant) if tenant.pk is not None and tenant.is_active else []


def revoked_key(key: ApiKey) -> list[str]:
    told = []
    schedules = Schedule.objects.filter(api_key=key, next_at__isnull=False)
    if number := _counted(schedules):
        have = ngettext("%d schedule uses", "%d schedules use", number) % number
        told.append(f"{have} this key and will be paused at the next run.")
    queued = Execution.objects.filter(
        tenant_slug=key.tenant.slug,
        api_key=key,
        finished_at=None,
        status=Execution.Status.QUEUED,
    )
    if number := _counted(queued):
        runs = ngettext("%d queued or scheduled run", "%d queued or scheduled runs", number)
        told.append(f"{runs % number} will not start.")
    if not _others(key).exists():
        tenant = visible(key.tenant.slug)
        told.append(f"This is the last valid key of {tenant}: the tenant loses API access.")
    return told


def without_budget(budget: Budget) -> list[str]:
    whose = budget.tenant_slug or "all tenants together"
    return [f"The spending of {visible(whose)} per {budget.period} is no longer limited."]


def _without_its_power(tenant: Tenant) -> list[str]:
    now = timezone.now()
    unexpired = Q(expires_at=None) | Q(expires_at__gt=now)
    keys = ApiKey.objects.filter(unexpired, tenant=tenant, revoked_at=None)
    queued = Execution.objects.filter(
        tenant_slug=tenant.slug, finished_at=None, status=Execution.Status.QUEUED
    )
    schedules = Schedule.objects.filter(tenant=tenant, next_at__isnull=False)
    sessions = Session.objects.filter(tenant=tenant, state__in=Session.LIVING)
    counts = (
        (keys, "%d key is rejected", "%d keys are rejected", "from the next request on"),
        (queued, "%d queued execution", "%d queued executions", "will not run"),
        (schedules, "%d schedule", "%d schedules", "will not run"),
        (sessions, "%d open session", "%d open sessions", "can no longer be used"),
    )
    return [
        f"{ngettext(one, many, number) % number} {rest}."
        for rows, one, many, rest in counts
        if (number := _counted(rows))
    ]


def _others(key: ApiKey) -> QuerySet[ApiKey]:
    unexpired = Q(expires_at=None) | Q(expires_at__gt=timezone.now())
    keys = ApiKey.objects.filter(unexpired, tenant=key.tenant_id, revoked_at=None)
    return keys.exclude(pk=key.pk).exclude(scopes="")


def _counted(rows: QuerySet[Any]) -> int:
    number: int = rows.order_by().values("pk")[:MOST].count()
    return number
