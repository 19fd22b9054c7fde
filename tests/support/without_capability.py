"""What works without any one capability. `tests/kernel/test_capabilities.py` runs this module."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from django.conf import settings
from django.contrib import admin
from django.core.management import call_command
from django.test import Client
from django.urls import NoReverseMatch, reverse
from django_q.models import Schedule

from executions.ledger.verification import verify
from executions.runs.models import Execution
from executions.runs.worker import ensure_schedules, recurring_tasks
from tests.conftest import Caller
from tests.support.held import bounded
from tests.support.running import run, run_queued

WITHOUT = os.environ["WITHOUT_CAPABILITY"].rpartition(".")[2]
ANSWER = "answer = ExecutionResult(stdout='done', stderr='', exit_code=0, execution_time=0.1)"
FAILURE = "raise errors.ProviderUnavailable('away')"

# What each brings beside its hooks: a page, a task, an endpoint.
PAGES = {
    "alerts": "alert",
    "network": "networklist",
    "policies": "policy",
    "reports": "report",
    "retention": "legalhold",
    "schedules": "schedule",
    "spending": "budget",
    "templates": "template",
    "threads": "thread",
    "tools": "toolcall",
    "webhooks": "webhookdelivery",
}
TASKS = {
    "alerts": "watch_alerts",
    "observability": "export_ledger",
    "reports": "make_reports",
    "retention": "apply_retention",
    "schedules": "begin_schedules",
    "search": "index_new_code",
    "spending": "watch_spending",
    "templates": "build_templates",
    "webhooks": "tend_webhooks",
}
ENDPOINTS = {
    "network": "network-attempts",
    "schedules": "schedules",
    "templates": "templates",
    "tools": "execution-tool-calls",
}

pytestmark = pytest.mark.django_db


def test_code_runs_is_queued_and_fails(
    scripted: Callable[[], list[str]], alice: Caller, charlie: Caller
) -> None:
    answer = run(alice, ANSWER)
    assert (answer.status_code, answer.json()["status"]) == (200, "succeeded"), answer.content
    assert answer.json()["receipt"]
    queued = run(alice, ANSWER, mode="async")
    assert queued.status_code == 202
    assert run_queued() is not None
    address = f"/api/v1/executions/{queued.json()['id']}"
    assert alice.client.get(address).json()["status"] == "succeeded"
    assert charlie.client.get(address).status_code == 404
    assert run(alice, FAILURE).status_code == 503
    assert not Execution.objects.filter(finished_at=None).exists()
    assert verify().is_intact


def test_the_quotas_of_a_day_hold(
    scripted: Callable[[], list[str]], alice: Caller, charlie: Caller
) -> None:
    bounded(alice, max_executions_per_day=2)
    answers = [run(alice, ANSWER).status_code for _ in range(3)]
    assert answers == [200, 200, 429]
    assert run(charlie, ANSWER).status_code == 200


def test_pages_are_shown(
    scripted: Callable[[], list[str]], alice: Caller, admin_client: Client
) -> None:
    ran = run(alice, ANSWER).json()["id"]
    pages = [
        reverse("admin:index"),
        reverse("admin:executions_execution_changelist"),
        reverse("admin:executions_execution_change", args=[ran]),
        reverse("admin:executions_tenant_change", args=[alice.tenant.pk]),
        reverse("admin:executions_apikey_change", args=[alice.api_key.pk]),
        reverse("admin:executions_session_changelist"),
        reverse("admin:executions_ledgerentry_changelist"),
        "/api/v1/usage",
        "/api/schema",
    ]
    for page in pages:
        client = alice.client if page.startswith("/api/v1") else admin_client
        assert client.get(page).status_code == 200, page
    if model := PAGES.get(WITHOUT):
        missing = f"executions_{model}_changelist"
        with pytest.raises(NoReverseMatch):
            reverse(f"admin:{missing}")
        assert f"/executions/{model}/" not in admin_client.get(pages[0]).content.decode()
    assert admin.site.is_registered(Execution)


def test_its_endpoints_and_tasks_are_gone(alice: Caller) -> None:
    assert f"executions.tasks.{TASKS.get(WITHOUT)}" not in recurring_tasks()
    ensure_schedules()
    assert {row.name for row in Schedule.objects.all()} == set(recurring_tasks())
    if name := ENDPOINTS.get(WITHOUT):
        with pytest.raises(NoReverseMatch):
            reverse(name)
    call_command("check")


def test_one_capability_is_left_out() -> None:
    assert WITHOUT not in "".join(settings.INSTALLED_CAPABILITIES).split("executions.capabilities.")
    assert WITHOUT in {*PAGES, *TASKS, *ENDPOINTS}
