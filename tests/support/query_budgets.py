"""Budgets of queries, and many rows of everything."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from axes.models import AccessAttempt
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Group, User
from django.utils import timezone

from executions.capabilities.alerts.models import Alert
from executions.capabilities.network.models import (
    NetworkAttempt,
    NetworkCredential,
    NetworkList,
)
from executions.capabilities.observability.models import AuditExport
from executions.capabilities.policies.models import Policy
from executions.capabilities.reports.models import Report
from executions.capabilities.schedules.models import Schedule
from executions.capabilities.spending.models import Budget, Spending
from executions.capabilities.templates.models import Template, TemplateVersion
from executions.capabilities.tools.models import ToolCall
from executions.capabilities.webhooks.models import WebhookDelivery, WebhookSecret
from executions.ledger.models import LedgerCheck, LedgerEntry
from executions.runs.models import Approval, Execution, Process
from executions.sessions.models import Session, Snapshot, Workspace
from executions.tenants.keys import create_api_key
from executions.tenants.models import Tenant
from providers import registry
from providers.manager import manager
from providers.models import (
    CircuitBreaker,
    ConfigVersion,
    PendingChange,
    ProviderConfig,
    ProviderPrice,
    Route,
    RouteStep,
)
from providers.services import activate, save_config
from tests.support.networks import credential
from tests.support.processes import ROOT
from tests.support.provider_package import Packages, install_probe

BUDGETS = tomllib.loads((ROOT / "tests" / "query_budgets.toml").read_text())
MANY = 60
SCOPES = "admin execute read"
GOOD = {"endpoint": "http://a", "token": "tok-0123456789-wxyz"}


@pytest.fixture
def names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, admin_user: User
) -> Iterator[dict[str, Any]]:
    """Many rows of everything, and one of each for the addresses."""
    # What is kept for a second would be looked up once more where a page takes longer.
    monkeypatch.setattr("providers.services.settings_cache.KEPT_SECONDS", 3600)
    manager.close()
    install_probe(Packages(tmp_path, monkeypatch), f"budget_{tmp_path.name}")
    for size in range(1, MANY):
        save_config("probe", GOOD | {"size": size})
    activate("probe")
    route = Route.objects.create(owner="another tenant")
    LedgerCheck.objects.bulk_create(
        LedgerCheck(
            state="intact", asked_by="a", asked_at=timezone.now(), finished_at=timezone.now()
        )
        for _ in range(MANY)
    )
    for n in range(MANY):
        Route.objects.create(owner=f"another {n}")
        Budget.objects.create(tenant_slug=f"t{n}", limit=1)
        ProviderPrice.objects.create(provider_id=f"p{n}", per_second=1)
        CircuitBreaker.objects.create(provider_id=f"p{n}")
        AuditExport.objects.create(destination=f"syslog h{n}:1")
        alert = Alert.objects.create(
            rule="error_rate",
            subject=f"p{n}",
            active_key=f"error_rate p{n}",
            severity="critical",
            message="m",
            opened_at=timezone.now(),
            seen_at=timezone.now(),
        )
        Process.objects.create(instance=f"host{n}", kind="web", pid=n)
        RouteStep.objects.create(
            route=route, provider=ProviderConfig.objects.create(provider_id=f"p{n}")
        )
        Spending.objects.create(tenant_slug=f"t{n}", day=timezone.now(), amount=1)
    PendingChange.objects.bulk_create(
        PendingChange(subject="probe", action="activate", base_version=1, author=f"user:{n}")
        for n in range(MANY)
    )
    tenants = Tenant.objects.bulk_create(Tenant(slug=f"t{n}", name="T") for n in range(MANY))
    for tenant in tenants:
        key, key_text = create_api_key(tenant, "k", None, SCOPES)
        Policy.objects.create(tenant_slug=tenant.slug)
        NetworkList.objects.create(tenant_slug=tenant.slug, mode="none")
        credential(tenant=tenant.slug)
    reports = Report.objects.bulk_create(Report(made_by=f"user:{n}") for n in range(MANY))
    now = timezone.now()
    executions = Execution.objects.bulk_create(
        Execution(
            tenant=tenant,
            tenant_slug=tenant.slug,
            language="python",
            entrypoint="auto",
            timeout=1,
            code_hash="sha256:" + "0" * 64,
            status="succeeded",
            provider="probe",
            deadline=now,
            finished_at=now,
            agent="codex-environment",
            conversation="thread",
            request_id="call_1",
            code="ls",
        )
        for tenant in tenants
    )
    calls = ToolCall.objects.bulk_create(
        ToolCall(
            execution=execution,
            tenant_slug=execution.tenant_slug,
            name="delete",
            arguments="{}",
            writes=True,
            state="held",
            entry=1,
        )
        for execution in executions
    )
    Approval.objects.bulk_create(
        Approval(execution=execution, tenant_slug=execution.tenant_slug) for execution in executions
    )
    attempts = NetworkAttempt.objects.bulk_create(
        NetworkAttempt(
            execution=execution,
            tenant=execution.tenant,
            tenant_slug=execution.tenant_slug,
            at=now,
            host="pypi.org",
            port=443,
            outcome="allowed",
        )
        for execution in executions
    )
    sessions = Session.objects.bulk_create(
        Session(tenant=tenant, tenant_slug=tenant.slug, language="python") for tenant in tenants
    )
    Execution.objects.filter(tenant=tenants[-1]).update(session=sessions[-1], turn=1)
    snapshots = Snapshot.objects.bulk_create(
        Snapshot(
            tenant=tenant,
            tenant_slug=tenant.slug,
            source=sessions[0].pk,
            workspace=Workspace.objects.create(tenant=tenant),
            files=0,
            bytes=0,
        )
        for tenant in tenants
    )
    WebhookSecret.objects.bulk_create(
        WebhookSecret(tenant=tenant, secret="whsec_") for tenant in tenants
    )
    deliveries = WebhookDelivery.objects.bulk_create(
        WebhookDelivery(
            tenant=tenant, tenant_slug=tenant.slug, execution=execution, url="https://a"
        )
        for tenant, execution in zip(tenants, executions, strict=True)
    )
    schedules = Schedule.objects.bulk_create(
        Schedule(tenant=tenant, name="often", cron="* * * * *", request={}, next_at=now)
        for tenant in tenants
    )
    for tenant in tenants:
        template = Template.objects.create(tenant=tenant, name="data", created_by="k")
        for number in range(1, 4):
            TemplateVersion.objects.create(
                template=template,
                number=number,
                declaration={"environment": {"A": "1"}},
                state="failed",
                ended_at=now,
                requested_by="k",
            )
    users = User.objects.bulk_create(User(username=f"u{n}", is_staff=True) for n in range(MANY))
    for n, user in enumerate(users):
        user.groups.add(Group.objects.order_by("pk")[n % 3])
        LogEntry.objects.create(user=user, action_flag=2, object_repr="x", change_message="y")
    AccessAttempt.objects.bulk_create(
        AccessAttempt(username=f"u{n}", ip_address="192.0.2.1", failures_since_start=1)
        for n in range(MANY)
    )
    yield {
        "approval": Approval.objects.latest("pk").pk,
        "call": calls[-1].pk,
        "network_credential": NetworkCredential.objects.latest("pk").pk,
        "network_list": NetworkList.objects.latest("pk").pk,
        "attempt": attempts[-1].pk,
        "policy": Policy.objects.latest("pk").pk,
        "provider": ProviderConfig.objects.get(provider_id="probe").pk,
        "version": ConfigVersion.objects.first().pk,  # type: ignore[union-attr]
        "pending": PendingChange.objects.first().pk,  # type: ignore[union-attr]
        "execution": executions[-1].pk,
        "session": sessions[-1].pk,
        "snapshot": snapshots[-1].pk,
        "delivery": deliveries[-1].pk,
        "schedule": schedules[-1].pk,
        "report": reports[-1].pk,
        "template": template.pk,
        "template_version": template.versions.latest("pk").pk,
        "tenant": tenants[-1].pk,
        "key": key.pk,
        "user": users[0].pk,
        "group": Group.objects.order_by("pk")[0].pk,
        "entry": LogEntry.objects.order_by("pk")[0].pk,
        "route": route.pk,
        "alert": alert.pk,
        "check": LedgerCheck.objects.latest("pk").pk,
        "ledger_entry": LedgerEntry.objects.latest("sequence").pk,
        "key_text": key_text,
    }
    manager.close()
    monkeypatch.undo()
    registry.refresh()
