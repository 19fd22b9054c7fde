"""A tenant's page: what it used and has, its keys, sessions and runs, for who may see each."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import Permission
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from executions.capabilities.dashboard.service import KEYS, newest_keys, runs_by_day
from executions.capabilities.spending.models import Budget, Spending
from executions.runs.models import hour_of
from executions.runs.statistics import TENANT, Increment, add
from executions.sessions.models import Session
from executions.tenants.keys import create_api_key
from executions.tenants.models import ApiKey, Tenant
from tests.conftest import Caller
from tests.support.attention import waiting
from tests.support.ended_runs import ended

pytestmark = pytest.mark.django_db


def of(tenant: Tenant) -> str:
    return f"/admin/executions/tenant/{tenant.pk}/change/"


def test_it_shows_use_quotas_budget_keys_sessions_and_runs(
    alice: Caller, charlie: Caller, admin_client: Client
) -> None:
    run, foreign = ended(alice), ended(charlie)
    Budget.objects.create(tenant_slug="wonderland", limit=10, period="day")
    Spending.objects.create(tenant_slug="wonderland", day=timezone.now().date(), amount=12)
    session = Session.objects.create(
        tenant=alice.tenant, tenant_slug="wonderland", language="python", name="\u202e<b>s</b>"
    )
    create_api_key(alice.tenant, "<script>k")
    Tenant.objects.filter(pk=alice.tenant.pk).update(name="<i>\u202ewonder</i>", max_running=4)
    page = admin_client.get(of(alice.tenant)).content.decode()

    assert 'aria-label="Executions by day, the last 30"' in page
    assert "0 of 4" in page
    assert "12 of 10, until" in page
    assert ">exhausted<" in page
    for link in (f"execution/{run.pk}", f"session/{session.pk}", f"apikey/{alice.api_key.pk}"):
        assert f"/admin/executions/{link}/change/" in page
    assert str(foreign.pk) not in page
    # What others have named does nothing to the page.
    for hostile in ("<script>k", "<b>s</b>", "<i>\u202ewonder"):
        assert hostile not in page
    assert "[U+202E]" in page
    listed = admin_client.get("/admin/executions/tenant/").content.decode()
    assert "&lt;i&gt;[U+202E]wonder" in listed
    sent = {"slug": "other", "name": "a\u202eb", "is_active": "on"}
    refused = admin_client.post("/admin/executions/tenant/add/", sent).content.decode()
    assert "Must not contain invisible characters" in refused
    key = {"tenant": alice.tenant.pk, "name": "a\u202eb", "scopes": ["read"]}
    refused = admin_client.post("/admin/executions/apikey/add/", key).content.decode()
    assert "Must not contain invisible characters" in refused


def test_each_part_is_for_who_may_see_its_page(alice: Caller, django_user_model: Any) -> None:
    run = ended(alice)
    clerk = django_user_model.objects.create_user("clerk", is_staff=True)
    clerk.user_permissions.add(Permission.objects.get(codename="view_tenant"))
    client = Client()
    client.force_login(clerk)
    page = client.get(of(alice.tenant)).content.decode()
    assert "Quotas" in page
    for hidden in (
        str(run.pk),
        alice.api_key.prefix,
        "Usage, last",
        "Latest executions",
        "Budget<",
    ):
        assert hidden not in page

    clerk.user_permissions.clear()
    assert client.get(of(alice.tenant)).status_code == 403


def test_use_is_counted_by_day_and_no_further_back(alice: Caller) -> None:
    now = timezone.now()
    for days, count in ((0, 3), (29, 5), (31, 100)):
        hour = hour_of(now - timedelta(days=days))
        add([Increment(TENANT, "wonderland", hour, "", count, 0.5)])
    days, (series,), cost = runs_by_day(alice.tenant, now)
    assert (len(days), series.values[0], series.values[-1]) == (30, 5, 3)
    assert sum(series.values) == 8
    assert cost == 1.0


def test_it_reads_of_runs_and_sessions_what_it_shows_alone(
    alice: Caller, admin_client: Client, settings: Any
) -> None:
    run = ended(alice)
    session = Session.objects.create(
        tenant=alice.tenant,
        tenant_slug="wonderland",
        language="python",
        env={"TOKEN": "t"},
        ref="sandbox-1",
    )
    settings.FERNET_KEYS = ["another key for tests, as long as keys are"]
    with CaptureQueriesContext(connection) as queries:
        answer = admin_client.get(of(alice.tenant))
    assert answer.status_code == 200
    page = answer.content.decode()
    assert f"session/{session.pk}" in page
    assert f"execution/{run.pk}" in page
    asked = " ".join(query["sql"] for query in queries)
    assert '"executions_execution"."status"' in asked
    for column in ("outputs", "result", "stdout", "stderr", "code", "arguments"):
        assert f'"executions_execution"."{column}"' not in asked


def test_revoked_keys_do_not_hide_a_valid_one(alice: Caller) -> None:
    now = timezone.now()
    for number in range(KEYS):
        key, _ = create_api_key(alice.tenant, f"revoked {number}")
        ApiKey.objects.filter(pk=key.pk).update(revoked_at=now - timedelta(days=number))
    shown = list(newest_keys(alice.tenant))
    assert len(shown) == KEYS
    assert [key.name for key in shown[1:3]] == ["revoked 0", "revoked 1"]
    assert shown[0] == alice.api_key


def test_the_form_says_what_follows_from_making_it_inactive(
    alice: Caller, admin_client: Client
) -> None:
    waiting(alice)
    page = admin_client.get(of(alice.tenant)).content.decode()
    assert "If deactivated: 1 key is rejected from the next request on." in page
    assert "1 queued execution will not run." in page
    asked = admin_client.get(of(alice.tenant).replace("change", "delete")).content.decode()
    assert "Consequences:" in asked
    assert "Its keys, schedules and saved files are deleted." in asked

    ApiKey.objects.update(revoked_at=timezone.now())
    Tenant.objects.update(is_active=False)
    assert "If deactivated" not in admin_client.get(of(alice.tenant)).content.decode()
