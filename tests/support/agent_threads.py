"""Executions as agents leave them: threads, with calls of tools."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django.test import Client

from executions.kernel.text import uuid7
from executions.runs.models import Execution
from executions.sessions.models import Session
from executions.tenants.models import Tenant
from tests.support.execution_rows import make_rows

THREADS = "/admin/executions/thread/"


def session_of(tenant: Tenant) -> Session:
    return Session.objects.create(tenant=tenant, tenant_slug=tenant.slug, language="bash")


def call(tenant: Tenant, thread: str | None, code: str = "ls", **values: Any) -> Execution:
    """One call of a tool, newer than all before it."""
    (row,) = make_rows(
        1,
        **{
            "id": uuid7(),
            "tenant": tenant,
            "tenant_slug": tenant.slug,
            "agent": "codex-environment",
            "conversation": thread,
            "code": code,
            "exit_code": 0,
            **values,
        },
    )
    return row


def page_of(client: Client, pk: UUID, **query: str) -> str:
    """The transcript that this execution is part of."""
    page = client.get(f"{THREADS}{pk}/change/", query)
    assert page.status_code == 200, page.content
    return page.content.decode()


def list_of(client: Client, **query: str) -> str:
    page = client.get(THREADS, query)
    assert page.status_code == 200, page.content
    return page.content.decode()
