"""What a tenant may have: its quotas, and how many requests it may send in a minute.

Executions are counted under the tenant's lock (`runs/admission`). Requests are counted in the
database, for all processes: one conditional UPDATE takes a place, and changes nothing where there
is none. It is committed by itself, so no tenant holds a lock that another waits for. Once a tenant
was refused, this process knows until when, and refuses the rest of a flood without asking.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any

from django.conf import settings
from django.db import Error as DatabaseFailure
from django.db import connection, transaction
from django.utils import timezone

from executions.kernel.database import limit_lock_wait, problem_of
from executions.kernel.postgresql import DeferredStatement
from executions.tenants.models import RequestWindow, Tenant
from providers.errors import RateLimited
from providers.services.settings_cache import CachedQuery

logger = logging.getLogger(__name__)

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


def limit_of(tenant: Tenant, quota: Quota) -> int:
    """Return what the tenant may have of a quota."""
    return _limit(getattr(tenant, _PLACES[quota].column), quota)


def default_of_column(column: str) -> int:
    """Return what holds for a tenant whose column is empty, as that column would say it."""
    place = next(place for place in _PLACES.values() if place.column == column)
    return _default_limit(place) // place.column_unit


def running_limit(tenant_slug: str) -> int:
    """Return how many runs the tenant may have at once, as of a second ago at most. A tenant that
    is gone has the installation's."""
    return _limit(_own_running().get(tenant_slug), Quota.RUNNING)


def storage_limit(tenant_id: int) -> int:
    """Return how many bytes of saved files the tenant may have, as of a second ago at most."""
    return _limit(_own_storage().get(tenant_id), Quota.STORAGE_BYTES)


def _limit(own: int | None, quota: Quota) -> int:
    place = _PLACES[quota]
    return _default_limit(place) if own is None else own * place.column_unit


def _default_limit(place: _Place) -> int:
    return int(getattr(settings, place.setting)) * place.setting_unit


def _own(quota: Quota, by: str) -> CachedQuery[dict[Any, int]]:
    column = _PLACES[quota].column
    having = {f"{column}__isnull": False}
    return CachedQuery(
        lambda: dict(Tenant.objects.filter(**having).values_list(by, column)), Tenant
    )


_own_running = _own(Quota.RUNNING, "slug")
_own_storage = _own(Quota.STORAGE_BYTES, "pk")


_LOCK = "SELECT pg_advisory_xact_lock(hashtextextended(%s, 14))"
_TRY_LOCK = "SELECT pg_try_advisory_xact_lock(hashtextextended(%s, 14))"


@contextmanager
def tenant_lock(tenant_slug: str, *, wait: bool = True, at_once: bool = True) -> Iterator[bool]:
    """A transaction in which no other process begins or claims an execution of this tenant.

    What is counted in it stays true until its rows are written. SQLite's transactions begin as
    writers (see sandbox_site.database), and there is one writer. False where another process has
    such a transaction open and this one is not to `wait` for it. One that need not be taken
    `at_once` is taken together with the first statement, which is one round trip less.
    """
    with transaction.atomic():
        if connection.vendor != "postgresql":
            yield True
            return
        # Not the row itself: every execution that refers to it would wait.
        with connection.cursor() as cursor:
            if wait:
                cursor.execute(_LOCK if at_once else DeferredStatement(_LOCK), [tenant_slug])
                is_alone = True
            else:
                cursor.execute(_TRY_LOCK, [tenant_slug])
                is_alone = bool(cursor.fetchone()[0])
        yield is_alone


def tomorrow() -> datetime:
    """When what is counted by the day begins anew."""
    now = timezone.now()
    return datetime(now.year, now.month, now.day, tzinfo=UTC) + timedelta(days=1)


def seconds_of_today() -> float:
    return (tomorrow() - timezone.now()).total_seconds()


WINDOW_SECONDS = 60
# What a request counts as that the ledger enters although nothing is run for it. It costs its
# caller next to nothing, and the ledger an entry for ever.
ENTRY_COUNTS_AS = 10
# Each but the last may find that another has just made the row, or begun the minute.
_TRIES = 6
# How long a request that only reads waits for SQLite's other writer, and how long it is not tried
# again after that.
_PATIENCE_SECONDS, _AWAY_SECONDS = 0.5, 1.0

_WINDOWS = RequestWindow._meta.db_table
# One clock for all hosts. Of the statement, which is still the same where it waits for the row.
_NOW = {
    "sqlite": "CAST(STRFTIME('%%s', 'NOW') AS INTEGER)",
    "postgresql": "FLOOR(EXTRACT(EPOCH FROM STATEMENT_TIMESTAMP()))::bigint",
}
# What is lost of it when the database's machine loses power are requests of the last second; to
# wait for the disk would be most of its cost.
_ALSO = {
    "sqlite": "",
    "postgresql": ", SET_CONFIG('synchronous_commit', 'off', true)",
}
# A clock that was set back a little goes on in the same minute; one that is far off begins anew.
_SAME = f"{{now}} - started BETWEEN -{WINDOW_SECONDS} AND {WINDOW_SECONDS - 1}"
_TAKE = (
    f"UPDATE {_WINDOWS} SET taken = taken + %s WHERE tenant_id = %s AND {_SAME} AND taken < %s"  # noqa: S608
    " RETURNING taken, started, {now}{also}"
)
# Whoever is first in a new minute. The others find it begun.
_BEGIN = (
    f"UPDATE {_WINDOWS} SET taken = 0, started = {{now}}"  # noqa: S608
    f" WHERE tenant_id = %s AND NOT ({_SAME})"
)
_LOOK = f"SELECT taken, started, {{now}} FROM {_WINDOWS} WHERE tenant_id = %s"  # noqa: S608
_ADD = (
    f"INSERT INTO {_WINDOWS} (tenant_id, started, taken) VALUES (%s, 0, 0) ON CONFLICT DO NOTHING"  # noqa: S608
)

# Until when a tenant is refused without asking, by the time that nobody sets; with the bound that
# it was refused by, which may be another by now.
_refused: dict[int, tuple[int, float, int]] = {}
# What this process has let through by itself, and since when, while nothing could be written.
_by_itself: dict[int, tuple[float, int]] = {}
_counting = threading.Lock()
_away_until = float("-inf")


@dataclass(frozen=True)
class Rate:
    """A tenant's requests of this minute. `resets_at` is seconds since 1970, by the database's
    clock; `wait` is the seconds until then for one that has no place, else None."""

    limit: int
    used: int
    resets_at: int
    wait: float | None = None

    @property
    def remaining(self) -> int:
        return max(0, self.limit - self.used)

    def require(self) -> None:
        """Raises RateLimited where there was no place."""
        if self.wait is not None:
            raise RateLimited(
                f"The tenant may send {self.limit} requests per minute, and has sent them all. "
                "Wait as Retry-After says; an administrator can raise the limit.",
                field=Quota.REQUESTS.value,
                retry_after=self.wait,
            )


def take_request(tenant: Tenant, *, only_reads: bool = False, counts_as: int = 1) -> Rate:
    """Count one request of the tenant, if there is a place for it. One that counts as several
    needs one place, so that every tenant can send the largest.

    While nothing can be written, one that `only_reads` is counted by this process alone: nothing
    runs then, and what is recorded can be read. Raises what the database does.
    """
    limit, now = limit_of(tenant, Quota.REQUESTS), time.monotonic()
    if not limit:
        return Rate(0, 0, int(time.time()) + WINDOW_SECONDS, WINDOW_SECONDS)
    known = _refused.get(tenant.pk)
    if known is not None:
        if known[0] == limit and now < known[1]:
            return Rate(limit, limit, known[2], known[1] - now)
        _refused.pop(tenant.pk, None)
    taken = _take_with_fallback if only_reads else _take_from_database
    rate = taken(tenant.pk, limit, counts_as)
    if rate.wait is not None:
        _refused[tenant.pk] = (limit, now + rate.wait, rate.resets_at)
    return rate


def used_requests(tenant: Tenant) -> Rate | None:
    """What `take` has counted; None where the tenant has no request in this minute."""
    limit = limit_of(tenant, Quota.REQUESTS)
    seen = _ask(_LOOK, [tenant.pk])
    if seen is None or not _is_same(*seen):
        return None
    return Rate(limit, seen[0], seen[1] + WINDOW_SECONDS)


def _take_from_database(tenant_id: int, limit: int, counts_as: int) -> Rate:
    for _ in range(_TRIES):
        if found := _ask(_TAKE, [counts_as, tenant_id, limit]):
            taken, started, _now = found
            return Rate(limit, taken, started + WINDOW_SECONDS)
        seen = _ask(_LOOK, [tenant_id])
        if seen is not None and _is_same(*seen):
            if seen[0] < limit:
                # Somebody has begun the minute between the two statements.
                continue
            resets_at = seen[1] + WINDOW_SECONDS
            return Rate(limit, limit, resets_at, float(resets_at - seen[2]))
        _ask(_ADD if seen is None else _BEGIN, [tenant_id])
    # Its minutes end faster than they are looked at: the database's clock jumps.
    return Rate(limit, limit, int(time.time()) + 1, 1.0)


def _take_with_fallback(tenant_id: int, limit: int, counts_as: int) -> Rate:
    global _away_until
    if time.monotonic() >= _away_until:
        try:
            with limit_lock_wait(_PATIENCE_SECONDS):
                return _take_from_database(tenant_id, limit, counts_as)
        except DatabaseFailure as error:
            if not (problem := problem_of(error)):
                raise
            logger.warning("requests that read are counted by each process alone: %s", problem)
            _away_until = time.monotonic() + _AWAY_SECONDS
    return _take_in_process(tenant_id, limit, counts_as)


def _take_in_process(tenant_id: int, limit: int, counts_as: int) -> Rate:
    now = time.monotonic()
    with _counting:
        since, number = _by_itself.get(tenant_id, (now, 0))
        if now - since >= WINDOW_SECONDS:
            since, number = now, 0
        has_place = number < limit
        used = number + counts_as if has_place else number
        _by_itself[tenant_id] = (since, used)
    left = WINDOW_SECONDS - (now - since)
    return Rate(limit, used, int(time.time() + left), None if has_place else left)


def _is_same(taken: int, started: int, now: int) -> bool:
    return -WINDOW_SECONDS <= now - started < WINDOW_SECONDS


def _ask(sql: str, values: list[Any]) -> tuple[int, int, int] | None:
    """The first row that it returns. All are fetched: SQLite commits after the last."""
    vendor = connection.vendor
    with connection.cursor() as cursor:
        cursor.execute(sql.format(now=_NOW[vendor], also=_ALSO[vendor]), values)
        rows = cursor.fetchall() if cursor.description else []
    return rows[0][:3] if rows else None
