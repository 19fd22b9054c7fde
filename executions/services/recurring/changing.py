"""Schedules made, changed, paused and removed. Each is entered in the ledger with its row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from django.db import transaction
from django.utils import timezone

from executions.kernel.declarations import newest_first, refuse
from executions.models.schedule import Schedule
from executions.services.recurring.body import read_scheduled
from executions.services.recurring.cron import next_time
from executions.services.recurring.requests import (
    ScheduleChange,
    ScheduleFilter,
    ScheduleRequest,
)
from executions.sessions.requests import NOT_FOUND
from executions.tenants.models import ApiKey, Tenant
from executions.tenants.quotas import Quota, bound, counted_alone
from executions.tenants.tenant_scope import schedules_of
from providers.errors import RateLimited, SandboxError
from providers.fields import DecryptionError

BY_REQUEST = "Its tenant has paused it."


class NoSuchSchedule(SandboxError):
    """There is none of this id, or it is somebody else's: nobody is told which."""

    entry = NOT_FOUND


@dataclass(frozen=True)
class Page:
    schedules: list[Schedule]
    next_cursor: str


def create(wanted: ScheduleRequest, api_key: ApiKey) -> Schedule:
    """A new schedule of the key's tenant. Raises RateLimited where it has as many as it may."""
    tenant = api_key.tenant
    schedule = Schedule(tenant=tenant, name=wanted.name, cron=wanted.cron, timezone=wanted.timezone)
    _give(schedule, wanted.request, api_key)
    _set(schedule, BY_REQUEST if wanted.paused else "")
    with counted_alone(tenant.slug):
        has, most = Schedule.objects.filter(tenant=tenant).count(), bound(tenant, Quota.SCHEDULES)
        if has >= most:
            raise RateLimited(
                f"The tenant has {has} schedules, and the limit is {most}. Delete one; an "
                "administrator can raise the limit.",
                field=Quota.SCHEDULES.value,
            )
        schedule.save(force_insert=True)
    return schedule


def change(schedule_id: UUID, wanted: ScheduleChange, api_key: ApiKey) -> Schedule:
    """Change a schedule of the key's tenant, which is that key's from then on: with a key that is
    held to less nobody has anything run by the power of another. Raises NoSuchSchedule.
    """
    with transaction.atomic():
        schedule = _locked(api_key.tenant, schedule_id)
        was = (schedule.cron, schedule.timezone, schedule.paused_because)
        for name in ("name", "cron", "timezone"):
            if (value := getattr(wanted, name)) is not None:
                setattr(schedule, name, value)
        try:
            body = wanted.request if wanted.request is not None else schedule.request
        except DecryptionError:
            refuse("request", "The stored request cannot be decrypted. Send it again.")
        _give(schedule, body, api_key)
        because = schedule.paused_because
        if wanted.paused is not None:
            because = BY_REQUEST if wanted.paused else ""
        if was != (schedule.cron, schedule.timezone, because):
            # What is due already, and not begun yet, stays due otherwise.
            _set(schedule, because)
        schedule.save()
    return schedule


def pause(schedule: Schedule, because: str) -> bool:
    """Have nothing begun by it until its tenant resumes it. False where it is paused, or gone."""
    with transaction.atomic():
        found = Schedule.objects.select_for_update().defer("request").filter(pk=schedule.pk)
        row = found.filter(next_at__isnull=False).first()
        if row is None:
            return False
        row.paused_because, row.next_at = because[:200], None
        row.save(update_fields=["paused_because", "next_at"])
    return True


def remove(tenant: Tenant, schedule_id: UUID) -> None:
    """Raises NoSuchSchedule. What it has begun stays."""
    with transaction.atomic():
        _locked(tenant, schedule_id).delete()


def schedule_of(tenant: Tenant, schedule_id: UUID) -> Schedule:
    """Raises NoSuchSchedule."""
    found = schedules_of(tenant).filter(pk=schedule_id).first()
    if found is None:
        raise _no_such()
    return found


def list_schedules(tenant: Tenant, wanted: ScheduleFilter) -> Page:
    """A page of the tenant's schedules, newest first."""
    return Page(*newest_first(schedules_of(tenant), wanted.cursor, wanted.limit))


def _locked(tenant: Tenant, schedule_id: UUID) -> Schedule:
    mine = schedules_of(tenant).select_for_update(of=("self",))
    found = mine.filter(pk=schedule_id).first()
    if found is None:
        raise _no_such()
    return found


def _give(schedule: Schedule, body: Mapping[str, Any], api_key: ApiKey) -> None:
    request = read_scheduled(body)
    schedule.request = dict(body)
    schedule.language, schedule.code_hash = request.language, request.code_hash
    schedule.api_key, schedule.api_key_prefix = api_key, api_key.prefix


def _set(schedule: Schedule, paused_because: str) -> None:
    """Its next time from now on; none while it is paused."""
    schedule.paused_because = paused_because
    if paused_because:
        schedule.next_at = None
        return
    schedule.next_at = next_time(schedule.cron, schedule.timezone, timezone.now())
    if schedule.next_at is None:
        refuse("cron", "Invalid cron expression: there is no such day.")


def _no_such() -> NoSuchSchedule:
    return NoSuchSchedule("Schedule not found.")
