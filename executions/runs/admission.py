"""Whether one more execution may begin: what its tenant has, and what room the disk has.

No new run begins when the disk is nearly full, so that those that run can still be recorded.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path

from django.conf import settings
from django.db import connection

from executions.ledger.entry import ensure_ledger
from executions.runs import extensions
from executions.runs.active_runs import ensure_not_stopping
from executions.runs.models import Execution
from executions.runs.requests import ExecutionRequest
from executions.runs.statistics import RAN, STORED, TENANT, Statistic
from executions.tenants.models import Tenant
from executions.tenants.quotas import MIB, Quota, limit_of, running_limit, seconds_of_today
from providers.errors import ProviderUnavailable, RateLimited

logger = logging.getLogger(__name__)

# A stat costs microseconds, but there may be a thousand requests a second.
DISK_LOOKED_AT_SECONDS = 1.0
# Files that can still be made. A disk without room for one more cannot be told from a full one.
LEAST_INODES = 1_000
_RETRY_DISK = 30.0

_disk_looked_at: tuple[float, str] = (float("-inf"), "")
_disk_is_nearly_full = False


def ensure_disk_space() -> None:
    """Raise ProviderUnavailable, naming the disk, when less than DISK_RESERVE_MIB is free."""
    if problem := disk_problem():
        raise ProviderUnavailable(problem, retry_after=_RETRY_DISK)


def disk_problem() -> str:
    """Why nothing new should be stored, "" while there is room. At most a second old."""
    global _disk_looked_at
    now = time.monotonic()
    if now - _disk_looked_at[0] > DISK_LOOKED_AT_SECONDS:
        _disk_looked_at = (now, _look_at_disks())
        _log_news_of_disk(_disk_looked_at[1])
    return _disk_looked_at[1]


def look_again_at_disk() -> None:
    """Trust nothing that was seen before."""
    global _disk_looked_at
    _disk_looked_at = (float("-inf"), "")


def _log_news_of_disk(problem: str) -> None:
    """Once when it begins and once when it is over, however often it is looked at."""
    global _disk_is_nearly_full
    is_news, _disk_is_nearly_full = bool(problem) != _disk_is_nearly_full, bool(problem)
    if is_news and problem:
        logger.critical(
            "ALERT: %s No new code is run; running executions are still recorded.",
            problem,
            extra={"alert": "disk_nearly_full"},
        )
    elif is_news:
        logger.warning("the disk has enough free space again")


def _look_at_disks() -> str:
    for name, folder in _folders_on_disk().items():
        try:
            disk = os.statvfs(folder)
        except OSError as error:
            return f"The disk of {name} cannot be read: {error.strerror}."
        free = disk.f_bavail * disk.f_frsize // (1024 * 1024)
        if free < settings.DISK_RESERVE_MIB:
            return (
                f"The disk of {name} is nearly full: {free} MiB are free, and DISK_RESERVE_MIB "
                f"keeps {settings.DISK_RESERVE_MIB}. Free some of it, or move {name}."
            )
        if settings.DISK_RESERVE_MIB and disk.f_files and disk.f_favail < LEAST_INODES:
            return (
                f"The disk of {name} has room for {disk.f_favail} more files only. "
                f"Remove some, or move {name}."
            )
    return ""


def _folders_on_disk() -> dict[str, Path]:
    """Where we write, by the name of what moves it."""
    folders = {"DATA_DIR": Path(settings.DATA_DIR)}
    if settings.STORAGE_FOLDER:
        folders["STORAGE_URL"] = Path(settings.STORAGE_FOLDER)
    if connection.vendor == "sqlite":
        database = Path(str(connection.settings_dict["NAME"])).parent
        if database != folders["DATA_DIR"] and database.is_dir():
            folders["DATABASE_URL"] = database
    return folders


# Seconds. Runs are short, and a queue empties by what workers run.
_RETRY_RUNNING = 1.0


_RETRY_QUEUED = 5.0


_EXECUTIONS = Execution._meta.db_table

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
    f" (SELECT COUNT(*) {_OPEN} AND background AND status = '{_RUNNING}') AS background,"
    f" (SELECT COUNT(*) {_OPEN} AND status = '{_QUEUED}') AS queued,"
    f" (SELECT SUM(timeout) {_OPEN}) AS seconds",
    "postgresql": f"SELECT COUNT(*) FILTER (WHERE status = '{_RUNNING}') AS running,"
    f" COUNT(*) FILTER (WHERE background AND status = '{_RUNNING}') AS background,"
    f" COUNT(*) FILTER (WHERE status = '{_QUEUED}') AS queued, SUM(timeout) AS seconds {_OPEN}",
}


# One statement over the index of open rows and the tenant's hours of today: within every execution.
_COUNT = (
    "SELECT running, background, queued, seconds, number, ms, bytes FROM ({held}) AS held,"  # noqa: S608
    f" (SELECT SUM(count) FILTER (WHERE kind = '{TENANT}') AS number,"
    f" SUM(count) FILTER (WHERE kind = '{RAN}') AS ms,"
    f" SUM(count) FILTER (WHERE kind = '{STORED}') AS bytes FROM {Statistic._meta.db_table}"
    f" WHERE kind IN ('{TENANT}', '{RAN}', '{STORED}') AND name = %(tenant)s"
    " AND hour >= {today}) AS today"
)


_crowded: set[str] = set()


def ensure_ready(tenant_slug: str) -> None:
    """Raises SandboxError where nothing may begin now: the ledger takes no entry, the service
    stops, the tenant's budget is used up, or the disk is nearly full."""
    ensure_ledger()
    ensure_not_stopping()
    extensions.ensure_allowance(tenant_slug)
    ensure_disk_space()


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


def ensure_within_bounds(
    tenant: Tenant, request: ExecutionRequest, *, queued: bool, payload_bytes: int = 0
) -> None:
    """Raise RateLimited if the tenant may not have one more execution like this, which stores so
    many bytes right away.

    What runs in the background of a session has no place among those that run at once.

    Only within `tenant_lock` is the answer still true when it is acted upon. What runs already
    is finished, so a day's last executions may store more than its bound; how long they may run
    is reserved before.
    """
    held = current_usage(tenant)
    refusal = (
        (None if request.background and not queued else _beyond_places(tenant, held, queued=queued))
        or _beyond_executions(tenant, held)
        or _beyond_seconds(tenant, held, request.longest)
        or _check_stored_bytes(tenant, held, payload_bytes)
    )
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


def _beyond_places(tenant: Tenant, held: Usage, *, queued: bool) -> RateLimited | None:
    has, quota, retry_after = (
        (held.queued, Quota.QUEUED, _RETRY_QUEUED)
        if queued
        else (held.running, Quota.RUNNING, _RETRY_RUNNING)
    )
    if has < (most := limit_of(tenant, quota)):
        return None
    return RateLimited(
        f"The tenant has {has} executions {quota}, and the limit is {most}. Wait until one has "
        "ended; an administrator can raise the limit.",
        field=quota.value,
        retry_after=retry_after,
    )


def _beyond_executions(tenant: Tenant, held: Usage) -> RateLimited | None:
    if held.executions < (most := limit_of(tenant, Quota.EXECUTIONS)):
        return None
    return RateLimited(
        f"The tenant may have {most} executions per day (UTC), and has used them all. An "
        "administrator can raise the limit.",
        field=Quota.EXECUTIONS.value,
        retry_after=seconds_of_today(),
    )


def _beyond_seconds(tenant: Tenant, held: Usage, seconds: float) -> RateLimited | None:
    most = limit_of(tenant, Quota.SECONDS)
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


def _check_stored_bytes(tenant: Tenant, held: Usage, payload_bytes: int) -> RateLimited | None:
    most = limit_of(tenant, Quota.STORED_BYTES)
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
    return running.count() - running.filter(background=True).count() < running_limit(tenant_slug)
