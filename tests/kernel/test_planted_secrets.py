"""Secrets are planted everywhere; nothing that leaves the service may hold one."""

from __future__ import annotations

import base64
import json
import logging
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings as project
from django.contrib.admin.models import LogEntry
from django.contrib.auth import get_user_model
from django.core.management import call_command
from django.test import Client
from django_q.tasks import async_task

from executions.capabilities.network.credentials import revoke as revoke_credential
from executions.capabilities.network.models import NetworkCredential
from executions.capabilities.playground.service import replay_sync
from executions.capabilities.search.export import export
from executions.ledger.models import LedgerEntry
from executions.runs.models import Execution
from executions.tenants.keys import create_api_key, revoke
from executions.tenants.models import ApiKey
from providers.models import ProviderConfig
from sandbox_site.logs import JsonLines
from tests.conftest import Caller
from tests.support.broker import payloads, queued_tasks
from tests.support.networks import VALUE, credential
from tests.support.running import run

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.one_database]

CONFIGURED = "cfg-planted-0123456789-secret"
PASSWORD = "planted password of the administrator"
# What a tenant sends and gets back. Whoever may look at the record may see it; no log, queue or
# ledger holds it.
BODY = "planted-in-a-body"


class Everything:
    """What left the service, by where it went."""

    def __init__(self) -> None:
        self.collected: dict[str, str] = {}

    def add(self, where: str, content: str | bytes) -> None:
        text = content.decode("utf-8", "replace") if isinstance(content, bytes) else content
        self.collected[where] = self.collected.get(where, "") + text

    def holding(self, secret: str) -> list[str]:
        encoded = base64.b64encode(secret.encode()).decode().rstrip("=")
        return [
            where for where, text in self.collected.items() if secret in text or encoded in text
        ]


@pytest.fixture
def admin(db: None) -> Client:
    client = Client()
    client.force_login(get_user_model().objects.create_superuser("admin", password=PASSWORD))
    return client


def test_no_secret_leaves_the_service(
    scripted: object,
    alice: Caller,
    admin: Client,
    settings: Any,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    settings.LEDGER_CHECKPOINTS = str(tmp_path)
    ProviderConfig(pk=9, provider_id="other", config={"token": CONFIGURED}).save(force_insert=True)
    planted = credential()
    spare, spare_text = create_api_key(alice.tenant, "spare")
    seen = Everything()

    _use_the_api(alice, seen)
    _use_the_admin(admin, alice, seen)
    revoke(spare)
    assert revoke_credential(planted)
    _use_the_commands(seen)
    for file_format in ("csv", "jsonl", "xlsx"):
        seen.add(f"export {file_format}", b"".join(export(Execution.objects.all(), file_format)))
    async_task("executions.tasks.end_stale_executions")
    for task, payload in zip(queued_tasks(), payloads(), strict=True):
        seen.add("queue", f"{task} {payload}")
    for path in tmp_path.glob("*.json*"):
        seen.add("checkpoints", path.read_text())
    for entry in LedgerEntry.objects.all():
        seen.add("ledger", f"{entry.statement} {entry.signature}")
    seen.add("admin log", json.dumps(list(LogEntry.objects.values_list()), default=str))
    for record in caplog.records:
        if not record.name.startswith("django.db"):
            seen.add("log", JsonLines().format(record))

    assert {"queue", "ledger", "log", "checkpoints", "admin log"} <= set(seen.collected)
    secrets = {
        "an API key": alice.key_text,
        "another API key": spare_text,
        "the hash of a key": alice.api_key.key_hash,
        "a configured secret": CONFIGURED,
        "a network credential": VALUE,
        "the password": PASSWORD,
        "SECRET_KEY": project.SECRET_KEY,
        "FERNET_KEYS": project.FERNET_KEYS[0],
        "LEDGER_KEYS": project.LEDGER_KEYS[0],
        "the password's hash": get_user_model().objects.get().password,
    }
    found = {name: seen.holding(secret) for name, secret in secrets.items()}
    assert not {name: places for name, places in found.items() if places}
    unheard = ("queue", "ledger", "log", "checkpoints", "admin log", "export csv", "export jsonl")
    assert not [where for where in seen.holding(BODY) if where in unheard]
    # The search itself works: what may be seen was found.
    assert "POST" in seen.holding(BODY)


def _use_the_api(alice: Caller, seen: Everything) -> None:
    code = f"answer = ExecutionResult({BODY!r}, '', 0, 0.0, has_result=True, result={BODY!r})"
    seen.add("POST", run(alice, code, arguments={"a": BODY}).content)
    seen.add("POST", run(alice, code, mode="async").content)
    seen.add("POST", run(alice, f"answer = ExecutionResult('', {BODY!r}, 1, 0.0)").content)
    seen.add("POST", run(alice, code, language="no such").content)
    seen.add("POST", run(alice, code, session="x").content)
    for path in ("executions", "languages", "ledger/keys", "nothing"):
        seen.add(f"GET {path}", alice.client.get(f"/api/v1/{path}").content)
    for execution in Execution.objects.all():
        answer = alice.client.get(f"/api/v1/executions/{execution.pk}")
        seen.add("GET one", answer.content)
    seen.add("GET", Client().get("/api/schema").content)
    wrong = Client().get("/api/v1/executions", headers={"X-API-Key": alice.key_text + "x"})
    seen.add("GET", wrong.content)


def _use_the_admin(admin: Client, alice: Caller, seen: Everything) -> None:
    ended = Execution.objects.filter(finished_at__isnull=False, status="succeeded")[0]
    replay_sync(ended)
    one = f"executions/execution/{ended.pk}/"
    key = f"executions/apikey/{ApiKey.objects.get(name='alice').pk}/"
    for path in (
        "",
        "executions/execution/",
        f"{one}change/",
        f"{one}replay",
        f"{one}receipt",
        "executions/apikey/",
        f"{key}change/",
        f"{key}history/",
        f"executions/tenant/{alice.tenant.pk}/change/",
        "executions/ledgerentry/",
        f"executions/ledgerentry/{LedgerEntry.objects.order_by('-pk')[0].pk}/change/",
        "executions/networkcredential/",
        f"executions/networkcredential/{NetworkCredential.objects.get().pk}/change/",
        "providers/providerconfig/",
        "auth/user/",
    ):
        page = admin.get(f"/admin/{path}")
        assert page.status_code == 200, path
        seen.add(f"admin {path}", page.content)
    admin.post(f"/admin/executions/tenant/{alice.tenant.pk}/change/", {"name": "New"})


def _use_the_commands(seen: Everything) -> None:
    for command in (
        ["verify_ledger", "--json", "--ledger-only"],
        ["checkpoint_ledger"],
        ["apply_retention", "--dry-run"],
        ["end_stale_executions"],
    ):
        out, progress = StringIO(), StringIO()
        call_command(*command, stdout=out, stderr=progress)
        seen.add(f"command {command[0]}", out.getvalue() + progress.getvalue())
