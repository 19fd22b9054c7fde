"""Whether a tenant may have one more execution: the bounds of what it holds, in one place.

Every way in records an execution first, and `open_record` asks here. What is counted are the rows
that have not ended, so a bound holds over all web processes and workers together; whoever ends a
row, for whatever reason, makes room by it. What is used up in a day is counted by the hour, with
the dashboard's figures (`services.statistics`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.conf import settings
from django.db import connection, transaction
from django.db.models import Count, Sum
from django.utils import timezone

from executions.models import Execution, ExecutionTenantCount, Tenant
from providers.errors import RateLimited
from providers.services.kept import Kept

MIB = 1024 * 1024

# Seconds. Runs are short, and a queue empties by what workers run.
_RETRY_RUNNING = 1.0
_RETRY_QUEUED = 5.0

_EXECUTIONS = Execution._meta.db_table
_COUNTS = ExecutionTenantCount._meta.db_table

# One statement over the index of open rows and today's hours: within every execution.
_COUNT = (
    f"SELECT (SELECT COUNT(*) FROM {_EXECUTIONS}"  # noqa: S608  names of our own models
    " WHERE finished_at IS NULL AND tenant_slug = %s AND status = %s),"
    f" (SELECT SUM(stored_bytes) FROM {_COUNTS} WHERE tenant_slug = %s AND hour >= %s)"
)

_crowded: set[str] = set()


@dataclass(frozen=True)
class Bounds:
    """What a tenant may have at once (`running`, `queued`) and store in a day, in bytes."""

    running: int
    queued: int
    stored_bytes: int

    @classmethod
    def of(cls, tenant: Tenant) -> Bounds:
        """Its own, and the installation's where it has none."""
        return cls(
            _own(tenant.max_running, settings.SANDBOX_MAX_RUNNING),
            _own(tenant.max_queued, settings.SANDBOX_MAX_QUEUED),
            _own(tenant.max_stored_mib, settings.SANDBOX_MAX_STORED_MIB) * MIB,
        )


@contextmanager
def counted_alone(tenant_slug: str) -> Iterator[None]:
    """A transaction in which no other process begins or claims an execution of this tenant.

    What is counted in it stays true until its rows are written. SQLite's transactions begin as
    writers (see sandbox_site.database), and there is one writer.
    """
    with transaction.atomic():
        if connection.vendor == "postgresql":
            # Not the row itself: every execution that refers to it would wait.
            with connection.cursor() as cursor:
                cursor.execute(
                    "SELECT pg_advisory_xact_lock(hashtextextended(%s, 14))", [tenant_slug]
                )
        yield


def refuse_beyond_bounds(tenant: Tenant, status: Execution.Status, payload_bytes: int = 0) -> None:
    """Raise RateLimited if the tenant may not have one more execution of this status.

    `payload_bytes` is what would be stored with it right away. Only within `counted_alone` is the
    answer still true when it is acted upon. What runs already is finished, so a day's last
    executions may store more than its bound.
    """
    refusal = _refusal(tenant, status, payload_bytes)
    if refusal is not None:
        _crowded.add(tenant.slug)
        raise refusal
    _crowded.discard(tenant.slug)


def _refusal(tenant: Tenant, status: Execution.Status, payload_bytes: int) -> RateLimited | None:
    bounds = Bounds.of(tenant)
    today = connection.ops.adapt_datetimefield_value(_today())
    with connection.cursor() as cursor:
        cursor.execute(_COUNT, [tenant.slug, status.value, tenant.slug, today])
        held, stored = cursor.fetchone()
    bound, what, retry_after = (
        (bounds.queued, "queued", _RETRY_QUEUED)
        if status == Execution.Status.QUEUED
        else (bounds.running, "running", _RETRY_RUNNING)
    )
    if held >= bound:
        return RateLimited(
            f"The tenant has {held} executions {what}, and may have {bound}. "
            "Wait until one has ended; an administrator can raise the bound.",
            retry_after=retry_after,
        )
    if (stored or 0) + payload_bytes >= bounds.stored_bytes:
        return RateLimited(
            f"The tenant may store {bounds.stored_bytes // MIB} MiB in a day, and "
            f"{(stored or 0) // MIB} are used. An administrator can raise the bound.",
            retry_after=(_today() + timedelta(days=1) - timezone.now()).total_seconds(),
        )
    return None


def in_use(tenant: Tenant) -> Bounds:
    """What it has running and queued now, and has stored today."""
    open_rows = Execution.objects.filter(finished_at=None, tenant_slug=tenant.slug).order_by()
    held = dict(open_rows.values_list("status").annotate(Count("pk")))
    today = ExecutionTenantCount.objects.filter(tenant_slug=tenant.slug, hour__gte=_today())
    return Bounds(
        held.get(Execution.Status.RUNNING, 0),
        held.get(Execution.Status.QUEUED, 0),
        int(today.aggregate(stored=Sum("stored_bytes"))["stored"] or 0),
    )


def was_refused(tenant: Tenant) -> bool:
    """Whether this process refused the tenant's last request: its next is asked about first
    without a lock, so that a flood of refusals holds up no writer."""
    return tenant.slug in _crowded


def may_claim(tenant_slug: str) -> bool:
    """Whether a queued execution of this tenant may begin to run. Within `counted_alone`."""
    running = Execution.objects.filter(
        finished_at=None, tenant_slug=tenant_slug, status=Execution.Status.RUNNING
    )
    return running.count() < bound_on_running(tenant_slug)


def bound_on_running(tenant_slug: str) -> int:
    """As of a second ago at most. A tenant that is gone has the installation's."""
    return _own(_own_running().get(tenant_slug), settings.SANDBOX_MAX_RUNNING)


_own_running = Kept(
    lambda: dict(
        Tenant.objects.filter(max_running__isnull=False).values_list("slug", "max_running")
    ),
    Tenant,
)


def _own(bound: int | None, otherwise: int) -> int:
    return otherwise if bound is None else bound


def _today() -> datetime:
    now = timezone.now()
    return datetime(now.year, now.month, now.day, tzinfo=now.tzinfo)
