"""The quotas of a tenant, and whether it may have one more execution."""

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

from executions.capabilities.observability.models import ExecutionTenantCount
from executions.runs.models import Execution
from executions.tenants.models import Tenant
from providers.errors import RateLimited
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


# Seconds. Runs are short, and a queue empties by what workers run.
_RETRY_RUNNING = 1.0
_RETRY_QUEUED = 5.0

_EXECUTIONS = Execution._meta.db_table
_COUNTS = ExecutionTenantCount._meta.db_table
_RUNNING, _QUEUED = Execution.Status.RUNNING.value, Execution.Status.QUEUED.value

# When the day began (UTC), by the one clock that all hosts share.
_TODAY = {
    "sqlite": "STRFTIME('%%Y-%%m-%%d 00:00:00', 'NOW')",
    "postgresql": "DATE_TRUNC('day', STATEMENT_TIMESTAMP() AT TIME ZONE 'UTC') AT TIME ZONE 'UTC'",
}
_OPEN = f"FROM {_EXECUTIONS} WHERE finished_at IS NULL AND tenant_slug = %(tenant)s"
# Each as it is quickest: to SQLite a CASE for every row is five times what it takes to count twice,
# to PostgreSQL every subquery is as much as the counting.
_HELD = {
    "sqlite": f"SELECT (SELECT COUNT(*) {_OPEN} AND status = '{_RUNNING}') AS running,"
    f" (SELECT COUNT(*) {_OPEN} AND background) AS background,"
    f" (SELECT COUNT(*) {_OPEN} AND status = '{_QUEUED}') AS queued,"
    f" (SELECT SUM(timeout) {_OPEN}) AS seconds",
    "postgresql": f"SELECT COUNT(*) FILTER (WHERE status = '{_RUNNING}') AS running,"
    f" COUNT(*) FILTER (WHERE background) AS background,"
    f" COUNT(*) FILTER (WHERE status = '{_QUEUED}') AS queued, SUM(timeout) AS seconds {_OPEN}",
}
# One statement over the index of open rows and today's hours: within every execution.
_COUNT = (
    "SELECT running, background, queued, seconds, number, ms, bytes FROM ({held}) AS held,"  # noqa: S608
    " (SELECT SUM(count) AS number, SUM(used_ms) AS ms, SUM(stored_bytes) AS bytes"
    f" FROM {_COUNTS} WHERE tenant_slug = %(tenant)s AND hour >= {{today}}) AS today"
)

_LOCK = "SELECT pg_{}advisory_xact_lock(hashtextextended(%s, 14))"

_crowded: set[str] = set()


@dataclass(frozen=True)
class Usage:
    """What a tenant has at once, and has used of a day.

    `executions` are those that ended today and those that are open; `seconds` what the former ran,
    and `reserved` what the latter may run; `stored` is bytes.
    """

    running: int
    queued: int
    executions: int
    seconds: float
    reserved: float
    stored: int


@dataclass(frozen=True)
class Demand:
    """One more execution: what it may run in seconds, and the bytes that it stores right away.

    What runs in the `background` of a session has no place among those that run at once.
    """

    status: Execution.Status
    seconds: float
    payload_bytes: int = 0
    background: bool = False


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


def ensure_within_bounds(tenant: Tenant, wanted: Demand) -> None:
    """Raise RateLimited if the tenant may not have one more execution like this.

    Only within `tenant_lock` is the answer still true when it is acted upon. What runs already
    is finished, so a day's last executions may store more than its bound; how long they may run
    is reserved before.
    """
    refusal = _refusal(tenant, wanted)
    if refusal is not None:
        _crowded.add(tenant.slug)
        raise refusal
    _crowded.discard(tenant.slug)


def current_usage(tenant: Tenant) -> Usage:
    """What it has now. One statement."""
    sql = _COUNT.format(held=_HELD[connection.vendor], today=_TODAY[connection.vendor])
    with connection.cursor() as cursor:
        cursor.execute(sql, {"tenant": tenant.slug})
        running, background, queued, reserved, ended, ms, stored = cursor.fetchone()
    return Usage(
        running=running - background,
        queued=queued,
        executions=int(ended or 0) + running + queued,
        seconds=int(ms or 0) / 1000,
        reserved=float(reserved or 0),
        stored=int(stored or 0),
    )


def _refusal(tenant: Tenant, wanted: Demand) -> RateLimited | None:
    held = current_usage(tenant)
    return (
        (None if wanted.background else _beyond_places(tenant, held, wanted.status))
        or _beyond_executions(tenant, held)
        or _beyond_seconds(tenant, held, wanted.seconds)
        or _beyond_stored(tenant, held, wanted.payload_bytes)
    )


def _beyond_places(tenant: Tenant, held: Usage, status: Execution.Status) -> RateLimited | None:
    has, quota, retry_after = (
        (held.queued, Quota.QUEUED, _RETRY_QUEUED)
        if status == Execution.Status.QUEUED
        else (held.running, Quota.RUNNING, _RETRY_RUNNING)
    )
    if has < (most := bound(tenant, quota)):
        return None
    return RateLimited(
        f"The tenant has {has} executions {quota}, and the limit is {most}. Wait until one has "
        "ended; an administrator can raise the limit.",
        field=quota.value,
        retry_after=retry_after,
    )


def _beyond_executions(tenant: Tenant, held: Usage) -> RateLimited | None:
    if held.executions < (most := bound(tenant, Quota.EXECUTIONS)):
        return None
    return RateLimited(
        f"The tenant may have {most} executions per day (UTC), and has used them all. An "
        "administrator can raise the limit.",
        field=Quota.EXECUTIONS.value,
        retry_after=seconds_of_today(),
    )


def _beyond_seconds(tenant: Tenant, held: Usage, seconds: float) -> RateLimited | None:
    most = bound(tenant, Quota.SECONDS)
    if held.seconds + held.reserved + seconds <= most:
        return None
    return RateLimited(
        f"The tenant's executions may run {most} s per day (UTC). {held.seconds:.1f} s are used, "
        f"{held.reserved:g} s are reserved for executions that have not ended, and this one "
        f"reserves its timeout, {seconds:g} s. Request a shorter timeout or wait; an administrator "
        "can raise the limit.",
        field=Quota.SECONDS.value,
        # What is reserved and not used comes back soon.
        retry_after=_RETRY_QUEUED if held.seconds + seconds <= most else seconds_of_today(),
    )


def _beyond_stored(tenant: Tenant, held: Usage, payload_bytes: int) -> RateLimited | None:
    most = bound(tenant, Quota.STORED_BYTES)
    if held.stored + payload_bytes < most:
        return None
    return RateLimited(
        f"The tenant may store {most // MIB} MiB per day, and {held.stored // MIB} are used. An "
        "administrator can raise the limit.",
        field=Quota.STORED_BYTES.value,
        retry_after=seconds_of_today(),
    )


def was_refused(tenant: Tenant) -> bool:
    """Whether this process refused the tenant's last request: its next is asked about first
    without a lock, so that a flood of refusals holds up no writer."""
    return tenant.slug in _crowded


def may_claim(tenant_slug: str) -> bool:
    """Whether a queued execution of this tenant may begin to run. Within `tenant_lock`."""
    running = Execution.objects.filter(
        finished_at=None, tenant_slug=tenant_slug, status=Execution.Status.RUNNING
    )
    return running.count() - running.filter(background=True).count() < bound_on_running(tenant_slug)


def tomorrow() -> datetime:
    """When what is counted by the day begins anew."""
    now = timezone.now()
    return datetime(now.year, now.month, now.day, tzinfo=UTC) + timedelta(days=1)


def seconds_of_today() -> float:
    return (tomorrow() - timezone.now()).total_seconds()
