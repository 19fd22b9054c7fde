"""What a key's own pages offer: a line to try it with, and to revoke it."""

from __future__ import annotations

import html
import json
import re
import subprocess
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import User
from django.test import Client
from django.utils import timezone

from executions.capabilities.schedules.models import Schedule
from executions.runs.models import Execution
from executions.tenants.models import ApiKey
from executions.tenants.service import AUDITOR
from tests.admin.pages.key_pages import KEYS, SENT, shown_key
from tests.conftest import Caller, require
from tests.support.roles import member
from tests.support.running import LOCAL, activate


def shown_call(answer: Any) -> str:
    found = re.search(r'id="example-call">([^<]*)<', answer.content.decode())
    return html.unescape(found[1]) if found else ""


@pytest.mark.django_db(transaction=True)
def test_the_shown_line_works_when_it_is_pasted(caller: Caller, live_server: Any) -> None:
    require("curl")
    activate("local", LOCAL)
    client = Client(SERVER_NAME=live_server.url.removeprefix("http://"))
    client.force_login(_superuser())
    host = live_server.url.removeprefix("http://")
    sent = {**SENT, "tenant": caller.tenant.pk, "name": "it's <b>"}
    made = client.post(f"{KEYS}add/", sent, headers={"Host": host})
    line = shown_call(made)
    assert line.startswith(f"curl -sS {live_server.url}/api/v1/executions ")
    ran = subprocess.run(["sh", "-c", line], capture_output=True, check=True, text=True)
    assert json.loads(ran.stdout).get("stdout") == "42\n", ran.stdout
    assert Execution.objects.get().api_key_name == sent["name"]

    for scopes in (["read"], ["files"], ["admin"]):
        line = shown_call(
            client.post(f"{KEYS}add/", {**sent, "scopes": scopes}, headers={"Host": host})
        )
        command = line.replace("curl -sS", "curl -sS -o /dev/null -w '%{http_code}'")
        ran = subprocess.run(["sh", "-c", command], capture_output=True, check=True, text=True)
        assert ran.stdout == "200", scopes


def _superuser() -> Any:
    return User.objects.create_superuser("root")


@pytest.mark.django_db
def test_the_line_runs_what_the_key_may_run(alice: Caller, admin_client: Client) -> None:
    made = admin_client.post(
        f"{KEYS}add/", {**SENT, "tenant": alice.tenant.pk, "languages": "bash"}
    )
    assert "echo $((6 * 7))" in shown_call(made)
    foreign = admin_client.post(
        f"{KEYS}add/", {**SENT, "tenant": alice.tenant.pk}, headers={"Host": "evil.example'; x"}
    )
    assert foreign.status_code == 400


@pytest.mark.django_db
def test_loading_the_page_of_a_new_key_again_makes_no_other_one(alice: Caller) -> None:
    client = Client(enforce_csrf_checks=True)
    client.force_login(_superuser())
    token = _token(client.get(f"{KEYS}add/"))
    sent = {**SENT, "tenant": alice.tenant.pk, "csrfmiddlewaretoken": token}
    made = client.post(f"{KEYS}add/", sent)
    assert shown_key(made)
    assert client.post(f"{KEYS}add/", sent).status_code == 403
    assert ApiKey.objects.count() == 2

    key = ApiKey.objects.latest("pk")
    rotated = {"csrfmiddlewaretoken": _token(client.get(f"{KEYS}{key.pk}/rotate/"))}
    rotated["valid_until"] = (timezone.now() + timedelta(hours=1)).strftime("%Y-%m-%dT%H:%M")
    assert shown_key(client.post(f"{KEYS}{key.pk}/rotate/", rotated))
    assert client.post(f"{KEYS}{key.pk}/rotate/", rotated).status_code == 403
    assert ApiKey.objects.count() == 3


def _token(answer: Any) -> str:
    found = re.search(r'name="csrfmiddlewaretoken" value="([^"]+)"', answer.content.decode())
    assert found is not None
    return found[1]


@pytest.mark.django_db
def test_a_key_is_revoked_on_its_own_page_which_says_what_happens_then(
    alice: Caller, admin_client: Client
) -> None:
    body = {"name": "often", "cron": "* * * * *", "request": {"code": "1"}}
    assert alice.client.post("/api/v1/schedules", body).status_code == 201
    assert Schedule.objects.get().api_key == alice.api_key
    own = f"{KEYS}{alice.api_key.pk}/"
    assert f"{own}revoke/" in admin_client.get(f"{own}change/").content.decode()

    asked = admin_client.get(f"{own}revoke/").content.decode()
    assert "1 schedule uses this key" in asked
    assert "the last valid key of wonderland" in asked
    assert "It was last used" in asked
    assert ApiKey.objects.get().revoked_at is None

    told = admin_client.post(f"{own}revoke/", follow=True).content.decode()
    assert "was revoked" in told
    assert f"{own}revoke/" not in told
    assert alice.client.get("/api/v1/executions").status_code == 401
    assert LogEntry.objects.get().change_message == "Revoked."
    assert admin_client.post(f"{own}revoke/").status_code == 403


@pytest.mark.django_db
def test_who_may_only_look_cannot_revoke_a_key(alice: Caller) -> None:
    auditor = member(AUDITOR)
    own = f"{KEYS}{alice.api_key.pk}/"
    assert f"{own}revoke/" not in auditor.get(f"{own}change/").content.decode()
    for call in (auditor.get, auditor.post):
        assert call(f"{own}revoke/").status_code == 403
    forged = Client(enforce_csrf_checks=True)
    forged.force_login(_superuser())
    assert forged.post(f"{own}revoke/").status_code == 403
    assert ApiKey.objects.get().revoked_at is None
