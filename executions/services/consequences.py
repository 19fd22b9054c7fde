"""What happens when a tenant, a key or a budget goes, in sentences for who decides."""

from __future__ import annotations

from typing import Any

from django.db.models import Q, QuerySet
from django.utils import timezone
from django.utils.translation import ngettext

from executions.models import ApiKey, Budget, Execution, Schedule, Session, Tenant
from executions.services.presentation import visible

# Counted no further: a page waits for it.
MOST = 1000


def without_tenant(tenant: Tenant) -> list[str]:
    """Once it is removed."""
    kept = "What was recorded of its runs stays; its keys, schedules and saved files go with it."
    return [*_without_its_power(tenant), kept]


def inactive_tenant(tenant: Tenant) -> list[str]:
    """Once it is not active any more. Nothing for one that is not active now."""
    return _without_its_power(tenant) if tenant.pk is not None and tenant.is_active else []


def revoked_key(key: ApiKey) -> list[str]:
    told = []
    schedules = Schedule.objects.filter(api_key=key, next_at__isnull=False)
    if number := _counted(schedules):
        have = ngettext("%d schedule has", "%d schedules have", number) % number
        told.append(f"{have} its power: when due next, each pauses.")
    queued = Execution.objects.filter(
        tenant_slug=key.tenant.slug,
        api_key=key,
        finished_at=None,
        status=Execution.Status.QUEUED,
    )
    if number := _counted(queued):
        are = ngettext("%d run is", "%d runs are", number) % number
        told.append(f"{are} not begun: queued now, or asked for at a later time.")
    if not _others(key).exists():
        told.append(f"It is the last valid key of {visible(key.tenant.slug)}: nobody else gets in.")
    return told


def without_budget(budget: Budget) -> list[str]:
    whose = budget.tenant_slug or "all tenants together"
    return [f"Nothing stops what {visible(whose)} may spend in a {budget.period} any more."]


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
        (keys, "%d key is refused", "%d keys are refused", "from the next request on"),
        (queued, "%d queued execution is", "%d queued executions are", "not run"),
        (schedules, "%d schedule begins", "%d schedules begin", "nothing more"),
        (sessions, "%d session is", "%d sessions are", "left with nobody who may use it"),
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
