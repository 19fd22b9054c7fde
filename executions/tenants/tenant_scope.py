"""Whose rows they are: the one place where what a tenant owns is looked up for a caller.

The API asks for rows here and nowhere else (tests/tenants/test_tenancy.py).
`tenant` is None for staff, whose permissions are not this module's to know.
"""

from __future__ import annotations

from django.db.models import QuerySet

from executions.capabilities.schedules.models import Schedule
from executions.capabilities.tools.models import ToolCall
from executions.runs.models import Artifact, Execution
from executions.sessions.models import Session
from executions.sessions.storage.models import Snapshot
from executions.tenants.models import Tenant

LARGE = ("pending", "code", "arguments")


def executions_of(tenant: Tenant | None) -> QuerySet[Execution]:
    found = Execution.objects.defer(*LARGE)
    return found if tenant is None else found.filter(tenant=tenant)


def artifacts_of(tenant: Tenant | None) -> QuerySet[Artifact]:
    found = Artifact.objects.all()
    return found if tenant is None else found.filter(execution__tenant=tenant)


def tool_calls_of(tenant: Tenant) -> QuerySet[ToolCall]:
    return ToolCall.objects.filter(execution__tenant=tenant)


def sessions_of(tenant: Tenant | None) -> QuerySet[Session]:
    found = Session.objects.all()
    return found if tenant is None else found.filter(tenant=tenant)


def snapshots_of(tenant: Tenant) -> QuerySet[Snapshot]:
    return Snapshot.objects.filter(tenant=tenant, workspace__isnull=False)


def schedules_of(tenant: Tenant) -> QuerySet[Schedule]:
    return Schedule.objects.defer("request").filter(tenant=tenant)
