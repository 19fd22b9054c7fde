"""A secret that was entered is found again in no answer, log line, export, row or queued task."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.contrib import admin
from django.core.management import call_command
from django.db import connection
from django.test import Client
from django_q.tasks import async_task

from executions.tenants.keys import create_api_key
from providers import registry
from providers.models import ConfigVersion, PendingChange, ProviderConfig
from providers.services import request_change
from providers.services.health import check_all
from tests.conftest import Caller
from tests.support.broker import queued_tasks
from tests.support.provider_package import Packages, install_probe
from tests.support.running import run

pytestmark = [pytest.mark.django_db, pytest.mark.one_database]

FIRST = "planted-first-secret-aaaa"
SECOND = "planted-second-secret-bbbb"
PROXY = "planted-proxy-secret-cccc"
WRONG = "planted-wrong-password-dddd"
PLANTED = (FIRST, SECOND, PROXY, WRONG)
CONFIG = "/api/admin/sandbox/config"


@pytest.fixture(autouse=True)
def _probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    install_probe(Packages(tmp_path, monkeypatch), f"planted_{tmp_path.name}")
    yield
    registry.refresh()


def config(token: str, **values: Any) -> dict[str, Any]:
    return {"endpoint": "http://a", "token": token, "proxy_password": PROXY, **values}


def links(page: str) -> set[str]:
    """Where a page leads to within the admin, but for what ends the session."""
    found = set(re.findall(r'href="(/admin/[^"#]*)"', page.replace("&amp;", "&")))
    return {link for link in found if "logout" not in link and "_changelist_filters" not in link}


def crawled(client: Client) -> dict[str, str]:
    """Every page that can be reached from the front page by following links."""
    waiting, seen = {"/admin/"}, {}
    while waiting and len(seen) < 300:
        path = waiting.pop()
        answer = client.get(path)
        content = b"".join(answer) if answer.streaming else answer.content
        seen[path] = content.decode(errors="replace")
        if answer.status_code == 200:
            waiting |= links(seen[path]) - set(seen)
    assert len(seen) < 300
    return seen


def rows() -> str:
    """Every column of every table, as the database holds it."""
    text = []
    with connection.cursor() as cursor:
        for table in connection.introspection.table_names(cursor):
            cursor.execute(f'SELECT * FROM "{table}"')
            text += [
                bytes(v).decode(errors="replace") if isinstance(v, (bytes, memoryview)) else str(v)
                for row in cursor.fetchall()
                for v in row
            ]
    return "\n".join(text)


def test_planted_secrets_are_found_nowhere_and_every_page_was_looked_at(
    scripted: object,
    alice: Caller,
    admin_client: Client,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    for name in ("providers", "executions", "django.request", "django.db.backends"):
        caplog.set_level("DEBUG", name)
    said: dict[str, str] = {}

    def sent(name: str, answer: Any) -> None:
        said[f"{len(said)} {name}"] = answer.content.decode() + str(answer.headers)

    _, key = create_api_key(alice.tenant, "ops", None, "admin")
    api = Client(headers={"X-API-Key": key})
    for number, body in enumerate(
        (
            {"config": config(FIRST)},
            {"config": config(FIRST, size=0)},
            {"config": config(FIRST, unknown=PROXY)},
            {"config": config(SECOND), "test_connection": True},
            {"config": config(SECOND, behaviour="crash"), "test_connection": True},
            {"config": config(SECOND, behaviour="crash")},
        )
    ):
        text = json.dumps({"provider_type": "probe", "set_active": False, **body})
        sent(f"save {number}", api.post(CONFIG, text, content_type="application/json"))
    body = json.dumps({"provider_type": "probe", "config": config(FIRST, behaviour="crash")})
    sent("test", api.post("/api/admin/sandbox/test", body, content_type="application/json"))
    for path in (CONFIG, "/api/admin/sandbox/providers"):
        sent(path, api.get(path))

    row = ProviderConfig.objects.get(provider_id="probe")
    form = {
        "_version": row.version,
        "memory": "256m",
        "behaviour": "crash",
        "size": "3",
        "factor": "1",
    }
    page = f"/admin/providers/providerconfig/{row.pk}/change/"
    sent("form", admin_client.post(page, config(FIRST) | form, follow=True))
    sent("refused form", admin_client.post(page, config(SECOND) | form | {"size": "0"}))
    for what in ("validate", "test"):
        live = f"/admin/providers/providerconfig/live/probe/{what}/"
        sent(what, admin_client.post(live, config(SECOND) | form))
    Client().post("/admin/login/", {"username": "admin", "password": WRONG})
    check_all()
    async_task("providers.tasks.check_health")
    run(alice, "pass")

    out = io.StringIO()
    call_command("export_settings", stdout=out)
    call_command("dumpdata", "providers", "executions", "admin", stdout=out)
    said["commands"] = out.getvalue()
    said["queue"] = str(queued_tasks())
    said["rows"] = rows()
    said |= crawled(admin_client)
    said["logs"] = caplog.text + "".join(capfd.readouterr())
    assert queued_tasks()
    assert ConfigVersion.objects.filter(subject="probe").count() >= 3
    assert len(said) > 40
    assert "••••aaaa" in said[page]
    assert any("ends in bbbb" in text for text in said.values())
    for name, text in said.items():
        for secret in PLANTED:
            assert secret not in text, f"{secret} in {name}"
    for model in admin.site._registry:
        options = model._meta
        assert f"/admin/{options.app_label}/{options.model_name}/" in said


def test_a_waiting_secret_is_ciphertext_and_gone_once_decided(settings: Any) -> None:
    settings.TWO_PERSON_RULE = True
    change = request_change("probe", PendingChange.Action.SAVE, config(FIRST), author="user:ann")
    assert isinstance(change, PendingChange)
    assert FIRST not in rows()
    assert PendingChange.objects.get().config["token"] == FIRST
