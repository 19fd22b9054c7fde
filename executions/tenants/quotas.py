"""The quotas of a tenant, and the lock under which its executions are counted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any

from django.conf import settings
from django.db import connection, transaction
from django.utils import timezone

from executions.tenants.models import Tenant
from providers.services.kept import Kept

MIB = 1024 * 1024


class Quota(StrEnum):
    """What a refusal names in `field`, and what `GET /api/v1/usage` is keyed by."""

    RUNNING = "running"
    QUEUED = "queued"
    REQUESTS = "requests_per_minute"
    EXECUTIONS = "executions_per_day"
    SECONDS = "seconds_per_day"
    STORED_BYTES = "stored_bytes_per_day"
    SESSIONS = "sessions"
    SCHEDULES = "schedules"
    STORAGE_BYTES = "tenant_storage_bytes"
    STORAGE_FILES = "tenant_storage_files"
    BUDGET_OF_DAY = "budget_per_day"
    BUDGET_OF_MONTH = "budget_per_month"


@dataclass(frozen=True)
class Use:
    """`limit` is None for a budget that nobody has set. `resets_at` is when `used` is nothing
    again, None for what is given back by itself, as when an execution ends."""

    limit: float | None
    used: float
    resets_at: datetime | None = None


# What all tenants share, in the same field of a refusal. `usage` shows them to nobody.
OF_ALL_SESSIONS = "installation_sessions"
OF_ALL_BUDGETS = "installation_budget"


@dataclass(frozen=True)
class _Place:
    """A column of the tenant and a setting, and what one of each stands for."""

    column: str
    setting: str
    column_unit: int = 1
    setting_unit: int = 1


_PLACES: Mapping[Quota, _Place] = {
    Quota.RUNNING: _Place("max_running", "SANDBOX_MAX_RUNNING"),
    Quota.QUEUED: _Place("max_queued", "SANDBOX_MAX_QUEUED"),
    Quota.REQUESTS: _Place("max_requests_per_minute", "SANDBOX_MAX_REQUESTS_PER_MINUTE"),
    Quota.EXECUTIONS: _Place("max_executions_per_day", "SANDBOX_MAX_EXECUTIONS_PER_DAY"),
    Quota.SECONDS: _Place("max_seconds_per_day", "SANDBOX_MAX_SECONDS_PER_DAY"),
    Quota.STORED_BYTES: _Place("max_stored_mib", "SANDBOX_MAX_STORED_MIB", MIB, MIB),
    Quota.SESSIONS: _Place("max_sessions", "SESSIONS_PER_TENANT"),
    Quota.SCHEDULES: _Place("max_schedules", "SANDBOX_MAX_SCHEDULES"),
    Quota.STORAGE_BYTES: _Place("max_storage_mib", "TENANT_STORAGE_BYTES", MIB),
}
COLUMNS = tuple(place.column for place in _PLACES.values())


def bound(tenant: Tenant, quota: Quota) -> int:
    """What the tenant may have of it."""
    return _bound(getattr(tenant, _PLACES[quota].column), quota)


def installed_in_column(column: str) -> int:
    """What holds for a tenant whose column is empty, as that column would say it."""
    place = next(place for place in _PLACES.values() if place.column == column)
    return _installed(place) // place.column_unit


def bound_on_running(tenant_slug: str) -> int:
    """As of a second ago at most. A tenant that is gone has the installation's."""
    return _bound(_own_running().get(tenant_slug), Quota.RUNNING)


def bound_on_storage(tenant_id: int) -> int:
    """Bytes of saved files, as of a second ago at most."""
    return _bound(_own_storage().get(tenant_id), Quota.STORAGE_BYTES)


def _bound(own: int | None, quota: Quota) -> int:
    place = _PLACES[quota]
    return _installed(place) if own is None else own * place.column_unit


def _installed(place: _Place) -> int:
    return int(getattr(settings, place.setting)) * place.setting_unit


def _own(quota: Quota, by: str) -> Kept[dict[Any, int]]:
    column = _PLACES[quota].column
    having = {f"{column}__isnull": False}
    return Kept(lambda: dict(Tenant.objects.filter(**having).values_list(by, column)), Tenant)


_own_running = _own(Quota.RUNNING, "slug")
_own_storage = _own(Quota.STORAGE_BYTES, "pk")


_LOCK = "SELECT pg_{}advisory_xact_lock(hashtextextended(%s, 14))"


@contextmanager
def tenant_lock(tenant_slug: str, *, wait: bool = True) -> Iterator[bool]:
    """A transaction in which no other process begins or claims an execution of this tenant.

    What is counted in it stays true until its rows are written. SQLite's transactions begin as
    writers (see sandbox_site.database), and there is one writer. False where another process has
    such a transaction open and this one is not to `wait` for it.
    """
    with transaction.atomic():
        if connection.vendor != "postgresql":
            yield True
            return
        # Not the row itself: every execution that refers to it would wait.
        with connection.cursor() as cursor:
            if wait:
                cursor.execute(_LOCK.format(""), [tenant_slug])
                is_alone = True
            else:
                cursor.execute(_LOCK.format("try_"), [tenant_slug])
                is_alone = bool(cursor.fetchone()[0])
        yield is_alone


def tomorrow() -> datetime:
    """When what is counted by the day begins anew."""
    now = timezone.now()
    return datetime(now.year, now.month, now.day, tzinfo=UTC) + timedelta(days=1)


def seconds_of_today() -> float:
    return (tomorrow() - timezone.now()).total_seconds()
