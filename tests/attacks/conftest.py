"""An installation with a row of every kind, for whoever tampers with it."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth import get_user_model
from django.contrib.auth.models import Group, Permission
from django.utils.timezone import now
from django_otp.plugins.otp_totp.models import TOTPDevice

from executions.capabilities.network.models import NetworkList
from executions.capabilities.playground.service import replay_sync
from executions.capabilities.policies.models import Policy
from executions.capabilities.spending.models import Budget
from executions.capabilities.templates.models import Template, TemplateVersion
from executions.capabilities.webhooks.service import create_secret
from executions.ledger.append import record_baseline
from executions.ledger.models import LegalHold
from executions.ledger.verification import verify
from executions.runs.models import Execution, LateResult
from executions.sessions.models import Session, Snapshot
from executions.tenants.keys import create_api_key, revoke
from executions.tenants.models import Tenant
from executions.tenants.service import ensure_roles
from providers import registry
from providers.models import AccountHold, PendingChange, ProviderPrice, Route
from providers.services.approval import reject, request_change
from providers.services.configuration import activate, save_config
from sandbox_site.recovery import issue_codes
from tests.conftest import Caller
from tests.support.networks import credential
from tests.support.provider_package import Packages, install_probe
from tests.support.running import run

RUN = (
    "answer = ExecutionResult('out', 'err', 0, 0.5, {'cpu_seconds': 0.25}, has_result=True,"
    " result=[1], outputs=[{'text/plain': 'x'}],"
    " artifacts=[ArtifactFile('a.txt', 'text/plain', b'content'),"
    " ArtifactFile('b.txt', 'text/plain', b'other')])"
)


@pytest.fixture
def everything(scripted: object, alice: Caller, charlie: Caller, settings: Any) -> None:
    """A row of every kind that the ledger binds, made as the service makes them."""
    settings.TWO_PERSON_RULE = False
    record_baseline()
    ProviderPrice.objects.create(provider_id="scripted", per_second=Decimal("0.0001"))
    row = save_config("local", {"pool_size": 2}, author="dora", reason="to begin")
    save_config("local", {"pool_size": 3}, author="dora", reason="more room")
    activate("local", author="dora")
    activate("scripted", author="dora")
    route = Route.objects.create(owner="elsewhere", strategy="cheapest")
    route.steps.create(provider=row, weight=3)
    Budget.objects.create(tenant_slug="wonderland", limit=5)
    Policy.objects.create(tenant_slug="wonderland")
    NetworkList.objects.create(tenant_slug="wonderland", rules="pypi.org")
    credential(tenant="wonderland")
    LegalHold.objects.create(tenant_slug="nobody", execution_id=uuid4(), reason="a matter")
    user = get_user_model().objects.create_user("dora", "dora@example.org", "a long pass phrase")
    user.groups.add(Group.objects.create(name="Inspector"))
    user.user_permissions.add(Permission.objects.order_by("pk")[0])
    Group.objects.get(name="Inspector").permissions.add(Permission.objects.order_by("pk")[1])
    issue_codes(TOTPDevice.objects.create(user=user, name="phone", confirmed=True))
    erin = get_user_model().objects.create_superuser("erin")
    AccountHold.objects.create(account_id=user.pk, holder_id=erin.pk)
    two = Tenant.objects.filter(slug__in=("wonderland", "elsewhere"))
    LogEntry.objects.log_actions(user.pk, two, 2, "changed both")
    gone, _ = create_api_key(alice.tenant, "second")
    revoke(gone)
    settings.TWO_PERSON_RULE = True
    for size in (4, 5):
        change = request_change(
            "local", PendingChange.Action.SAVE, {"pool_size": size}, author="dora", reason="more"
        )
    assert isinstance(change, PendingChange)
    reject(change, decider=erin)
    answer = run(alice, RUN, arguments={"a": 1}, idempotency_key="once").json()
    assert answer.get("status") == "succeeded", answer
    assert replay_sync(Execution.objects.get(pk=answer["id"])).error is None
    assert run(charlie, "pass").status_code == 200
    late = Execution.objects.order_by("-pk")[0]
    LateResult.objects.create(
        execution=late, status="succeeded", exit_code=0, finished_at=late.finished_at
    )
    LegalHold.objects.create(tenant_slug="wonderland", execution_id=answer["id"], reason="a matter")
    for number, caller in enumerate((alice, charlie), 1):
        create_secret(caller.tenant)
        body = {"name": "often", "cron": "* * * * *", "request": {"code": "1"}}
        assert caller.client.post("/api/v1/schedules", body).status_code == 201
        TemplateVersion.objects.create(
            template=Template.objects.create(
                tenant=caller.tenant, name=f"of-{caller.tenant.slug}", created_by="k"
            ),
            number=number,
            declaration={"environment": {"A": "1"}},
            lock=[],
            state="ready",
            digest="0" * 64,
            requested_by="k",
            ended_at=now(),
        )
        Session.objects.create(
            tenant=caller.tenant, tenant_slug=caller.tenant.slug, language="python"
        )
        Snapshot.objects.create(
            tenant=caller.tenant,
            tenant_slug=caller.tenant.slug,
            source=Session.objects.latest("created_at").pk,
            files=0,
            bytes=0,
        )
    report = verify()
    assert ([str(finding) for finding in report.findings], report.unproven) == ([], 0)


@pytest.fixture
def approvals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The roles, and a provider called probe."""
    ensure_roles()
    install_probe(Packages(tmp_path, monkeypatch), f"approval_{tmp_path.name}")
    yield
    registry.refresh()
