"""What each role may do, through the pages and the API it would do it with."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth import get_user_model
from django.contrib.auth.models import Group
from django.test import Client

from executions.tenants.models import ApiKey, Tenant
from executions.tenants.service import ADMINISTRATOR, AUDITOR, OPERATOR, ensure_roles
from providers.models import ProviderConfig
from providers.services import save_config
from tests.conftest import Caller
from tests.support.roles import member

pytestmark = [pytest.mark.django_db, pytest.mark.one_database]

PAGES = (
    "/admin/providers/providerconfig/",
    "/admin/providers/configversion/",
    "/admin/providers/pendingchange/",
    "/admin/executions/execution/",
    "/admin/executions/tenant/",
    "/admin/executions/apikey/",
)
ACCOUNTS = ("/admin/auth/user/", "/admin/auth/group/", "/admin/admin/logentry/")


def called(client: Client, method: str, path: str, body: Any) -> int:
    send = getattr(client, method)
    status: int = send(path, json.dumps(body), content_type="application/json").status_code
    return status


def test_migrating_made_the_roles() -> None:
    assert set(Group.objects.values_list("name", flat=True)) == {ADMINISTRATOR, OPERATOR, AUDITOR}


def test_making_them_again_adds_only_what_is_missing(django_assert_num_queries: Any) -> None:
    ensure_roles()
    group = Group.objects.get(name=AUDITOR)
    before = set(group.permissions.values_list("pk", flat=True))
    group.permissions.remove(next(iter(before)))
    ensure_roles()
    assert set(group.permissions.values_list("pk", flat=True)) == before


@pytest.mark.parametrize("role", [ADMINISTRATOR, OPERATOR, AUDITOR])
def test_an_account_with_a_role_signs_in(role: str, settings: Any) -> None:
    settings.TWO_PERSON_RULE = False
    users = get_user_model().objects
    made = users.create_user("newcomer", password="long and str0ng enough")
    admin = Client()
    admin.force_login(users.create_superuser("boss"))
    page = f"/admin/auth/user/{made.pk}/change/"
    form = {"username": "newcomer", "is_active": "on", "groups": [Group.objects.get(name=role).pk]}
    answer = admin.post(page, form)
    assert answer.status_code == 302, answer.content.decode()
    made.refresh_from_db()
    assert made.is_staff
    newcomer = Client()
    newcomer.force_login(made)
    assert newcomer.get("/admin/").status_code == 200
    # Without a role nothing is given, and nothing taken.
    users.create_user("guest")
    guest = users.get(username="guest")
    answer = admin.post(
        f"/admin/auth/user/{guest.pk}/change/", {"username": "guest", "is_active": "on"}
    )
    assert answer.status_code == 302
    guest.refresh_from_db()
    assert not guest.is_staff


def test_the_pages_speak_of_roles() -> None:
    client = Client()
    client.force_login(get_user_model().objects.create_superuser("boss"))
    account = get_user_model().objects.get().pk
    pages = ("group/", "group/add/", f"user/{account}/change/", "user/", "")
    for path in (f"/admin/auth/{page}" for page in pages):
        answer = client.get(path)
        assert answer.status_code == 200
        page = answer.content.decode()
        assert "role" in page.lower()
        text = re.sub(r"<(script|style).*?</\1>|<[^>]+>", " ", page, flags=re.S)
        assert not re.search(r"\bGroups?\b", text), path


@pytest.mark.parametrize("role", [ADMINISTRATOR, OPERATOR, AUDITOR])
def test_every_role_sees_the_pages(role: str) -> None:
    client = member(role)
    assert {path: client.get(path).status_code for path in PAGES} == dict.fromkeys(PAGES, 200)


def test_accounts_and_the_log_are_for_administrators_and_auditors() -> None:
    for role, status in ((ADMINISTRATOR, 200), (AUDITOR, 200), (OPERATOR, 403)):
        client = member(role)
        assert {client.get(path).status_code for path in ACCOUNTS} == {status}, role


def test_an_auditor_changes_nothing(alice: Caller) -> None:
    row = save_config("local", {"pool_size": 2})
    client = member(AUDITOR)
    for path in (
        "/admin/providers/providerconfig/add/",
        "/admin/executions/tenant/add/",
        "/admin/executions/apikey/add/",
        "/admin/auth/user/add/",
    ):
        assert client.get(path).status_code == 403
        assert client.post(path, {}).status_code == 403
    change = f"/admin/providers/providerconfig/{row.pk}/change/"
    assert client.post(change, {"pool_size": 3, "_version": 1}).status_code == 403
    config = {"provider_type": "local", "config": {"pool_size": 3}}
    assert called(client, "post", "/api/admin/sandbox/config", config) == 403
    assert called(client, "post", "/api/admin/sandbox/test", {"provider_type": "local"}) == 403
    assert called(client, "put", "/api/admin/sandbox/active", {"provider": "local"}) == 403
    assert client.get("/api/admin/sandbox/config").status_code == 200
    keys = {"action": "revoke_keys", "_selected_action": [alice.api_key.pk]}
    client.post("/admin/executions/apikey/", keys)
    assert ApiKey.objects.get().revoked_at is None
    assert ProviderConfig.objects.get().config["pool_size"] == 2


def test_an_operator_switches_and_tests_providers_but_does_not_configure_them() -> None:
    row = save_config("local", {"pool_size": 2})
    client = member(OPERATOR)
    assert called(client, "put", "/api/admin/sandbox/active", {"provider": "local"}) == 200
    config = {"provider_type": "local", "config": {"pool_size": 3}}
    assert called(client, "post", "/api/admin/sandbox/config", config) == 403
    change = f"/admin/providers/providerconfig/{row.pk}/change/"
    assert client.post(change, {"pool_size": 3, "_version": 1}).status_code == 403
    assert (
        client.post(
            "/admin/executions/tenant/add/", {"slug": "acme", "name": "Acme", "is_active": "on"}
        ).status_code
        == 302
    )
    assert Tenant.objects.filter(slug="acme").exists()


def test_an_operator_cannot_make_a_key_that_configures(alice: Caller) -> None:
    client = member(OPERATOR)
    body = {"tenant": alice.tenant.pk, "name": "climb", "scopes": ["admin"]}
    assert client.post("/admin/executions/apikey/add/", body).status_code == 200
    assert not ApiKey.objects.filter(name="climb").exists()
    client.post("/admin/executions/apikey/add/", body | {"scopes": ["execute"]})
    assert not ApiKey.objects.get(name="climb").has_scope("admin")
    member(ADMINISTRATOR).post("/admin/executions/apikey/add/", body | {"name": "boss"})
    assert ApiKey.objects.get(name="boss").has_scope("admin")


def test_what_is_done_in_the_admin_is_in_its_log_which_nobody_edits(alice: Caller) -> None:
    save_config("local", {})
    client = member(ADMINISTRATOR)
    called(client, "put", "/api/admin/sandbox/active", {"provider": "local"})
    config = {"provider_type": "local", "config": {"pool_size": 3}, "set_active": False}
    called(client, "post", "/api/admin/sandbox/config", config)
    client.post("/admin/executions/tenant/add/", {"slug": "acme", "name": "Acme"})
    client.post(
        "/admin/executions/apikey/",
        {"action": "revoke_keys", "_selected_action": [alice.api_key.pk]},
    )

    assert LogEntry.objects.count() == 4
    entry = LogEntry.objects.first()
    assert entry is not None
    page = f"/admin/admin/logentry/{entry.pk}"
    assert client.get(f"{page}/change/").status_code == 200
    assert client.post(f"{page}/change/", {"change_message": ""}).status_code == 403
    assert client.post(f"{page}/delete/", {"post": "yes"}).status_code == 403
    assert LogEntry.objects.count() == 4
