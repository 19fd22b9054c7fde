"""Whoever is lost in the admin is told where they are, and how to go on."""

from __future__ import annotations

import pytest
from django.contrib import admin
from django.contrib.auth.models import Group, User
from django.test import Client

from executions.capabilities.dashboard.service import NEW_BELOW, first_steps
from executions.kernel.presentation import EMPTY
from executions.ledger.models import LedgerEntry
from executions.runs.models import Execution
from executions.tenants.keys import create_api_key
from executions.tenants.models import Tenant
from executions.tenants.service import AUDITOR, ensure_roles
from providers.services import save_config
from tests.conftest import Caller
from tests.support.processes import ROOT
from tests.support.provider_fixtures import activate
from tests.support.routing import last_execution
from tests.support.running import LOCAL, run

pytestmark = pytest.mark.django_db


def test_a_missing_page_leads_back_and_a_program_is_answered_in_json(
    client: Client, admin_client: Client
) -> None:
    for path in ("/nothing", "/admin/nothing/", "/admin/executions/nothing/"):
        answer = admin_client.get(path)
        assert answer.status_code == 404, path
        assert b'href="/admin/"' in answer.content
        assert b"<script" not in answer.content
    for path in ("/api/v1/nothing", "/v1/nothing"):
        answer = client.get(path)
        assert (answer.status_code, answer.json()["id"]) == (404, None)
        assert answer.json()["error"]["code"] == "not_found"


def test_who_may_not_is_led_back(client: Client) -> None:
    User.objects.create_user("ada", password="p", is_staff=True)
    client.login(username="ada", password="p")
    answer = client.get("/admin/executions/tenant/")
    assert (answer.status_code, b'href="/admin/"' in answer.content) == (403, True)
    strict = Client(enforce_csrf_checks=True)
    refused = strict.post("/admin/login/", {"username": "ada", "password": "p"})
    assert (refused.status_code, b"Go back" in refused.content) == (403, True)


def test_every_list_says_what_fills_it_and_what_filters_hide(admin_client: Client) -> None:
    shown = {model._meta.label_lower for model in admin.site._registry}
    assert not set(EMPTY) - shown
    Tenant.objects.all().delete()
    empty = admin_client.get("/admin/executions/tenant/").content.decode()
    assert EMPTY["executions.tenant"] in empty
    filtered = admin_client.get("/admin/executions/tenant/?q=nobody").content.decode()
    assert "No matches" in filtered
    assert EMPTY["executions.tenant"] not in filtered


def test_a_history_is_the_things_own(alice: Caller, admin_client: Client) -> None:
    activate("local", LOCAL)
    row = save_config("local", LOCAL | {"pool_size": 3}, author="user:ann", reason="more room")
    page = admin_client.get(f"/admin/providers/providerconfig/{row.pk}/history/").content.decode()
    assert "more room" in page
    assert "user:ann" in page
    run(alice, "print(1)")
    execution = last_execution()
    page = admin_client.get(f"/admin/executions/execution/{execution.pk}/history/").content.decode()
    entry = LedgerEntry.objects.get(execution_id=execution.pk)
    assert f"/admin/executions/ledgerentry/{entry.pk}/change/" in page
    assert "No actions." in page


def test_a_new_installation_is_led_through_and_an_old_one_is_not(
    alice: Caller, admin_user: User, admin_client: Client
) -> None:
    ensure_roles()
    activate("local", LOCAL)
    todo = [step.title for step in first_steps(admin_user) if not step.is_done]
    assert "Run a program" in todo
    assert "Invite an auditor" in todo
    assert "First steps" in admin_client.get("/admin/").content.decode()
    # An auditor is not sent to pages that she may not use.
    ada = User.objects.create_user("ada", is_staff=True)
    ada.groups.add(Group.objects.get(name=AUDITOR))
    assert first_steps(ada) == []

    assert run(alice, "print(1)").status_code == 200
    create_api_key(alice.tenant, "another")
    save_config("local", LOCAL | {"pool_size": 3}, author="user:ann")
    save_config("e2b", {"api_key": "e2b_0123456789"}, author="user:ann")
    assert first_steps(admin_user) == []
    ada.groups.clear()
    assert [s.title for s in first_steps(admin_user) if not s.is_done] == ["Invite an auditor"]

    first = Execution.objects.get()
    Execution.objects.bulk_create(
        Execution(
            tenant=alice.tenant,
            tenant_slug=alice.tenant.slug,
            language="python",
            entrypoint="auto",
            timeout=1,
            code_hash=first.code_hash,
            status="succeeded",
            deadline=first.deadline,
            finished_at=first.finished_at,
        )
        for _ in range(NEW_BELOW)
    )
    assert first_steps(admin_user) == []
    assert "First steps" not in admin_client.get("/admin/").content.decode()


def test_no_page_shows_a_comment_of_its_template() -> None:
    """`{#` ends on its line, or is text."""
    for path in (ROOT / "templates").rglob("*.html"):
        for line in path.read_text().splitlines():
            assert line.count("{#") == line.count("#}"), path


@pytest.mark.parametrize("path", ["/api/v1/executions", "/v1/execute", "/mcp", "/healthz", "/no"])
def test_a_program_that_names_an_unknown_host_is_told_so_in_the_shape_of_the_api(
    client: Client, path: str
) -> None:
    for host in ("evil.example", "a b", "x" * 300):
        answer = client.get(path, headers={"host": host})
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert (error["code"], error["field"], answer.json()["id"]) == ("bad_request", "Host", None)
        assert "ALLOWED_HOSTS" in error["message"]
        assert host not in error["message"]


def test_a_person_who_names_an_unknown_host_gets_a_page(client: Client) -> None:
    answer = client.get("/admin/login/", headers={"host": "evil.example"})
    assert (answer.status_code, answer["Content-Type"]) == (400, "text/html; charset=utf-8")
