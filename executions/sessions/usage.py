"""What a tenant has used of each of its quotas."""

from __future__ import annotations

from datetime import UTC, datetime

from django.conf import settings

from executions.runs import extensions
from executions.runs.admission import current_usage
from executions.sessions.capacity import awake_of
from executions.sessions.storage.models import StoredTotal
from executions.tenants.models import Tenant
from executions.tenants.quotas import Quota, Use, bound, tomorrow
from executions.tenants.rate_limit import used


def usage_of(tenant: Tenant) -> dict[Quota, Use]:
    """All of its quotas, in their order."""
    held, day = current_usage(tenant), tomorrow()
    counted: dict[Quota, tuple[float, datetime | None]] = {
        Quota.RUNNING: (held.running, None),
        Quota.QUEUED: (held.queued, None),
        Quota.REQUESTS: _requests(tenant),
        Quota.EXECUTIONS: (held.executions, day),
        Quota.SECONDS: (round(held.seconds + held.reserved, 3), day),
        Quota.STORED_BYTES: (held.stored, day),
        Quota.SESSIONS: (awake_of(tenant), None),
        Quota.SCHEDULES: (0, None),
    }
    found = {
        quota: Use(bound(tenant, quota), number, resets_at)
        for quota, (number, resets_at) in counted.items()
    }
    total = StoredTotal.objects.filter(tenant=tenant.pk).first() or StoredTotal()
    found[Quota.STORAGE_BYTES] = Use(bound(tenant, Quota.STORAGE_BYTES), total.bytes)
    found[Quota.STORAGE_FILES] = Use(settings.TENANT_STORAGE_FILES, total.files)
    found |= dict.fromkeys((Quota.BUDGET_OF_DAY, Quota.BUDGET_OF_MONTH), Use(None, 0))
    for each in extensions.installed():
        found |= each.usage(tenant)
    return found


def _requests(tenant: Tenant) -> tuple[int, datetime | None]:
    rate = used(tenant)
    if rate is None:
        return 0, None
    return rate.used, datetime.fromtimestamp(rate.resets_at, UTC)
