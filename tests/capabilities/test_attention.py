"""What calls for attention: counted in the sidebar, listed on the front page, for who may see it."""

from __future__ import annotations

import re
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest
from django.contrib.auth.models import Permission
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from executions.capabilities.alerts import service as alerts
from executions.capabilities.alerts.models import Alert
from executions.capabilities.alerts.rules import RULES
from executions.capabilities.alerts.service import watch_without_workers
from executions.capabilities.dashboard.service import MOST, attention
from executions.capabilities.spending.models import Budget, Spending
from executions.capabilities.tools.models import ToolCall
from executions.ledger.models import LedgerCheck
from executions.runs.models import Approval, Execution, Process
from executions.runs.queue import queue_state
from executions.tenants.models import Tenant
from executions.tenants.quotas import _own_running
from executions.tenants.service import AUDITOR, OPERATOR
from providers.models import CircuitBreaker, PendingChange, ProviderConfig, ProviderHealth
from tests.conftest import Caller
from tests.support.attention import NOW, waiting
from tests.support.roles import member

pytestmark = pytest.mark.django_db


def everything(caller: Caller) -> None:
    """One of each kind that calls for attention, and one of each that does not."""
    row = ProviderConfig.objects.create(provider_id="e2b")
    ProviderConfig.objects.create(provider_id="local")
    facts = {"healthy": False, "code": "SB009", "latency_ms": 1, "checked_at": NOW}
    ProviderHealth.objects.create(provider_id="e2b", config_version=row.version, **facts)
    ProviderHealth.objects.create(provider_id="local", config_version=77, **facts)
    CircuitBreaker.objects.create(
        provider_id="e2b",
        state="open",
        retry_at=NOW,
        failed_checks=3,
        error_code="SB003",
        error_message="The key is <b>not</b> known." + " It is so." * 50,
    )
    CircuitBreaker.objects.create(provider_id="local")
    seen = {"severity": "critical", "opened_at": NOW, "seen_at": NOW, "message": "It is so."}
    Alert.objects.create(rule="error_rate", subject="e2b", active_key="error_rate e2b", **seen)
    Alert.objects.create(rule="error_rate", state="resolved", resolved_at=NOW, **seen)
    Budget.objects.create(tenant_slug="wonderland", limit=10)
    Budget.objects.create(tenant_slug="", period="day", limit=100)
    Spending.objects.create(tenant_slug="wonderland", day=NOW.date(), amount=Decimal("8.5"))
    PendingChange.objects.create(
        subject="executions.tenant:1",
        shown_as="tenant <b>\u202ebad",
        action="save",
        base_version=1,
        author="user:ada",
    )
    PendingChange.objects.create(
        subject="auth.user:1", shown_as="user ben", action="save", base_version=1, author="user:ada"
    )
    held = waiting(caller)
    Approval.objects.create(execution=held, tenant_slug=caller.tenant.slug)
    waiting(caller)
    call = {"tenant_slug": "wonderland", "name": "delete", "writes": True, "arguments": "{}"}
    running = waiting(caller, status="running")
    ToolCall.objects.create(execution=running, state="held", **call)
    ToolCall.objects.create(execution=running, state="waiting", **call)
    over = waiting(caller, status="succeeded", finished_at=NOW)
    ToolCall.objects.create(execution=over, state="held", **call)
    LedgerCheck.objects.create(
        state="not_intact",
        asked_by="ada",
        asked_at=NOW,
        finished_at=NOW,
        findings=2,
        first_findings=["entry 1: altered: <b>x</b>"],
    )


def badges(page: str) -> dict[str, str]:
    """By the link that each stands in."""
    links = re.findall(r'<a href="(/admin/[^"]+)"[^>]*>((?:(?!</a>).)*?)</a>', page, re.DOTALL)
    found = ((link, re.search(r'menu-badge">([^<]+)<', text)) for link, text in links)
    return {link: badge[1] for link, badge in found if badge}


def test_each_kind_is_counted_and_listed_for_who_may_see_all_of_it(
    alice: Caller, admin_client: Client
) -> None:
    everything(alice)
    page = admin_client.get("/admin/").content.decode()
    assert badges(page) == {
        "/admin/executions/ledgercheck/": "1",
        "/admin/executions/process/": "1",
        "/admin/providers/providerconfig/": "1",
        "/admin/providers/pendingchange/": "2",
        "/admin/providers/circuitbreaker/": "1",
        "/admin/executions/alert/": "1",
        "/admin/executions/budget/": "1",
        "/admin/executions/approval/": "1",
        "/admin/executions/toolcall/": "1",
    }
    for text in (
        "2 findings on",
        "no worker is running",
        "e2b: Provider unavailable (SB009). Check the provider or use a fallback.",
        "e2b: The key is &lt;b&gt;not&lt;/b&gt; known.",
        "(SB003). Check network and credentials.",
        "delete of wonderland, since",
        "It is so.",
        "wonderland: 8.50 of 10.00 this month",
        "requested by user:ada",
        "wonderland, since",
    ):
        assert text in page
    # Names and findings are other people's words.
    assert "<b>\u202ebad" not in page
    assert "[U+202E]bad" in page
    assert "&lt;b&gt;x" in page
    # As many as the list behind it has.
    listed = admin_client.get("/admin/providers/pendingchange/?status__exact=waiting")
    assert listed.context["cl"].result_count == 2


def test_nobody_is_told_of_what_he_may_not_open(alice: Caller, django_user_model: Any) -> None:
    everything(alice)
    clerk = django_user_model.objects.create_user("clerk", is_staff=True)
    client = Client()
    client.force_login(clerk)
    page = client.get("/admin/").content.decode()
    assert badges(page) == {}
    assert "Needs attention" not in page

    clerk.user_permissions.add(
        *Permission.objects.filter(codename__in=("view_pendingchange", "view_tenant"))
    )
    page = client.get("/admin/").content.decode()
    # That of an account is on no page of his.
    assert badges(page) == {"/admin/providers/pendingchange/": "1"}
    assert "user ben" not in page
    assert "It is so." not in page

    for role in (OPERATOR, AUDITOR):
        of_accounts = role == AUDITOR
        found = badges(member(role).get("/admin/").content.decode())
        assert found["/admin/providers/pendingchange/"] == ("2" if of_accounts else "1")


def test_where_nothing_waits_no_count_is_shown(admin_client: Client) -> None:
    page = admin_client.get("/admin/").content.decode()
    assert badges(page) == {}
    assert "menu-badge" not in page
    assert "Nothing needs your attention." in page


def test_counts_are_bounded_and_looked_up_once_in_a_while(
    admin_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    PendingChange.objects.bulk_create(
        PendingChange(subject="local", action="activate", base_version=1, author=f"user:{n}")
        for n in range(MOST + 20)
    )
    with CaptureQueriesContext(connection) as first:
        assert badges(admin_client.get("/admin/").content.decode()) == {
            "/admin/providers/pendingchange/": "99+"
        }
    with CaptureQueriesContext(connection) as second:
        admin_client.get("/admin/")
    assert not [each for each in second if 'FROM "providers_pendingchange"' in each["sql"]]
    assert len(first) - len(second) <= 16
    PendingChange.objects.create(subject="local", action="activate", base_version=1, author="u")
    assert len(attention().changes) == MOST


def test_a_queue_is_dead_without_workers_or_when_nothing_is_taken(alice: Caller) -> None:
    assert queue_state(NOW).problem(300) == ""
    waiting(alice)
    assert "no worker is running" in queue_state(NOW).problem(300)
    Process.objects.create(instance="a", kind="worker", pid=1)
    assert queue_state(NOW).problem(300) == ""
    old = NOW + timedelta(minutes=70)
    assert "has been queued for" in queue_state(old).problem(300)
    (rule,) = (rule for rule in RULES if rule.name == "queue_dead")
    assert [each.subject for each in rule.found(old)] == ["queue"]

    # It waits because its tenant runs as many as it may: no fault of ours.
    Tenant.objects.filter(pk=alice.tenant.pk).update(max_running=0)
    _own_running.forget()
    assert queue_state(old).problem(300) == ""


def test_a_tenant_with_long_runs_makes_no_dead_queue(alice: Caller, charlie: Caller) -> None:
    worker = Process.objects.create(instance="a", kind="worker", pid=1)
    long_ago = NOW - timedelta(seconds=3000)
    for _ in range(4):
        run = {"status": "running", "process": worker, "started_at": long_ago}
        waiting(alice, created_at=long_ago, **run)
    queued = {"created_at": NOW - timedelta(seconds=400), "deadline": NOW + timedelta(seconds=3200)}
    waiting(alice, **queued)
    assert queue_state(NOW).problem(300) == ""

    # What can run no longer is no sign that anybody works.
    running = Execution.objects.filter(status="running")
    running.update(deadline=NOW - timedelta(seconds=1))
    assert "has been queued for 400 s" in queue_state(NOW).problem(300)
    running.update(deadline=NOW + timedelta(hours=1))

    # Nor is it work for others, unless something was taken lately.
    waiting(charlie, **queued)
    told = queue_state(NOW).problem(300)
    assert "nothing was taken for 300 s (queued: 1, workers: 1)" in told
    last = running.latest("pk")
    lately = {"started_at": NOW - timedelta(seconds=10), "finished_at": NOW, "process": None}
    Execution.objects.filter(pk=last.pk).update(status="failed", **lately)
    assert queue_state(NOW).problem(300) == ""
    Execution.objects.filter(pk=last.pk).update(mode="sync")
    assert queue_state(NOW).problem(300) == told

    # And one that is over has nobody run for anybody.
    Process.objects.update(ended_at=NOW)
    assert "2 executions are queued, and no worker is running" in queue_state(NOW).problem(300)


def test_what_waits_for_an_approval_or_a_later_time_is_no_dead_queue(alice: Caller) -> None:
    Approval.objects.create(execution=waiting(alice), tenant_slug="wonderland")
    waiting(alice, run_at=NOW + timedelta(days=1), deadline=NOW + timedelta(days=2))
    assert queue_state(NOW + timedelta(hours=2)).problem(300) == ""


@pytest.mark.only_on("sqlite")
def test_held_calls_are_looked_up_from_what_runs(alice: Caller) -> None:
    with CaptureQueriesContext(connection) as queries:
        attention()
    (sql,) = [each["sql"] for each in queries if "executions_toolcall" in each["sql"]]
    with connection.cursor() as cursor:
        cursor.execute(f"EXPLAIN QUERY PLAN {sql}")
        plan = " ".join(str(row[-1]) for row in cursor.fetchall())
    assert re.search(r"INDEX execution_(open|status)\w* ", plan)
    assert "INDEX tool_call_open" in plan
    assert "SCAN" not in plan


@pytest.mark.only_on("sqlite")
def test_approvals_of_what_has_ended_are_not_even_looked_at(alice: Caller) -> None:
    for _ in range(3):
        over = {"status": "cancelled", "finished_at": NOW}
        Approval.objects.create(execution=waiting(alice, **over), tenant_slug="wonderland")
    held = Approval.objects.create(execution=waiting(alice), tenant_slug="wonderland")
    waiting(alice)
    (rule,) = (rule for rule in RULES if rule.name == "approval_waits")
    with CaptureQueriesContext(connection) as queries:
        assert [pk for pk, _, _ in attention().approvals] == [held.pk]
        assert [each.value for each in rule.found(NOW)] == [1]
    asked = [query["sql"] for query in queries if "executions_approval" in query["sql"]]
    looked = [sql for sql in asked if sql.startswith("SELECT") and "executions_execution" in sql]
    assert len(looked) == 3
    with connection.cursor() as cursor:
        for sql in looked:
            cursor.execute(f"EXPLAIN QUERY PLAN {sql}")
            plan = " ".join(str(row[-1]) for row in cursor.fetchall())
            assert re.search(r"executions_execution USING .*INDEX execution_(open|status) ", plan)
            assert "approval_status" not in plan
            assert "TEMP B-TREE FOR ORDER BY" not in plan


def test_the_service_tells_of_what_waits_for_somebody(alice: Caller) -> None:
    everything(alice)
    now = timezone.now()
    found = {
        (rule.name, each.subject): each.message
        for rule in RULES
        if rule.name in ("change_waits", "provider_unhealthy", "queue_dead", "ledger_findings")
        for each in rule.found(now)
    }
    assert set(found) == {
        ("change_waits", "changes"),
        ("provider_unhealthy", "e2b"),
        ("queue_dead", "queue"),
        ("ledger_findings", "ledger"),
    }
    assert "2 changes wait" in found["change_waits", "changes"]


def test_without_a_worker_a_web_process_watches(
    alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting(alice)
    assert watch_without_workers()
    assert Alert.objects.filter(rule="queue_dead", state="open").exists()
    Alert.objects.all().delete()
    Process.objects.create(instance="a", kind="worker", pid=1)
    assert not watch_without_workers()
    assert not Alert.objects.exists()
    assert alerts.EVERY_SECONDS <= 60
