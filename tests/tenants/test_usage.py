"""GET /api/v1/usage: every quota, what is used of it, and when that is over."""

from __future__ import annotations

from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any

import jsonschema
import pytest
from django.utils import timezone
from drf_spectacular.generators import SchemaGenerator

from executions.capabilities.spending.models import Budget
from executions.capabilities.spending.service import spend
from executions.sessions.models import Session
from executions.sessions.storage import quota
from executions.tenants.quotas import Quota
from tests.conftest import Caller
from tests.support.held import bounded, ended, opened
from tests.support.schemas import strict

pytestmark = pytest.mark.database

USAGE = "/api/v1/usage"


def usage(caller: Caller) -> dict[str, Any]:
    answer = caller.client.get(USAGE)
    assert answer.status_code == 200
    found: dict[str, Any] = answer.json()
    return found


def test_a_tenant_sees_its_own_quotas_and_what_all_its_keys_have_used(
    alice: Caller, bob: Caller, charlie: Caller
) -> None:
    bounded(alice, max_running=7, max_seconds_per_day=5000, max_storage_mib=3)
    ended(opened(alice, code="#" * 1000), run_ms=2500.0, total_ms=2600.0)
    opened(bob, timeout=20)
    opened(alice, "async", timeout=30)
    quota.reserve(alice.tenant.pk, size=9, files=2)
    slug = alice.tenant.slug
    Session.objects.create(tenant=alice.tenant, tenant_slug=slug, language="python")
    Budget.objects.create(tenant_slug=slug, period="month", limit=Decimal("2.5"))
    Budget.objects.create(period="day", limit=1000)
    spend(slug, Decimal("0.25"))
    spend(charlie.tenant.slug, Decimal(100))

    found = usage(bob)
    quotas = found["quotas"]
    assert found["tenant"] == slug
    assert list(quotas) == [each.value for each in Quota]
    plain = {name: (each["limit"], each["used"]) for name, each in quotas.items()}
    stored = plain.pop("stored_bytes_per_day")
    assert stored[0] == 5 * 2**30
    assert 1000 <= stored[1] < 2000
    assert plain == {
        "running": (7, 1),
        "queued": (100, 1),
        "requests_per_minute": (6000, 1),
        "executions_per_day": (1_000_000, 3),
        "seconds_per_day": (5000, 52.5),
        "sessions": (20, 1),
        "schedules": (20, 0),
        "tenant_storage_bytes": (3 * 2**20, 9),
        "tenant_storage_files": (1_000_000, 2),
        # Nothing of what all may spend together, which would say what others do.
        "budget_per_day": (None, 0),
        "budget_per_month": (2.5, 0.25),
    }
    now = timezone.now()
    until = {
        name: datetime.fromisoformat(each["resets_at"]) - now
        for name, each in quotas.items()
        if each["resets_at"]
    }
    assert until["requests_per_minute"] <= timedelta(minutes=1, seconds=1)
    days = ("executions_per_day", "seconds_per_day", "stored_bytes_per_day")
    assert {until[name] <= timedelta(days=1) for name in days} == {True}
    assert until.keys() == {*days, "requests_per_minute", "budget_per_month"}

    assert usage(alice)["quotas"] == quotas | {
        "requests_per_minute": quotas["requests_per_minute"] | {"used": 2}
    }
    others = usage(charlie)["quotas"]
    assert others["running"] == {"limit": 10, "used": 0, "resets_at": None}
    assert others["seconds_per_day"]["used"] == 0
    assert others["budget_per_month"] == {"limit": None, "used": 0, "resets_at": None}
    schema = SchemaGenerator().get_schema(public=True)
    jsonschema.validate(found, strict(schema, "Usage"))
