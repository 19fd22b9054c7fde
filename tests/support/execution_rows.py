"""Rows of executions, and the pages that show them."""

from __future__ import annotations

import re
from typing import Any

import pytest
from django.contrib.auth import get_user_model
from django.contrib.auth.models import Permission
from django.test import Client
from django.utils import timezone

from executions.runs.models import Execution

LIST = "/admin/executions/execution/"


@pytest.fixture
def auditor(db: None) -> Client:
    """Staff who may look at executions and at nothing else."""
    user = get_user_model().objects.create_user("auditor", password="x", is_staff=True)
    user.user_permissions.add(
        Permission.objects.get(codename="view_execution", content_type__app_label="executions")
    )
    client = Client()
    client.force_login(user)
    return client


def make_rows(count: int, **values: Any) -> list[Execution]:
    now = timezone.now()
    defaults = {
        "tenant_slug": "acme",
        "language": "python",
        "entrypoint": "auto",
        "timeout": 1,
        "code_hash": "sha256:" + "0" * 64,
        "status": "succeeded",
        "provider": "local",
        "deadline": now,
        "finished_at": now,
    }
    return Execution.objects.bulk_create(Execution(**{**defaults, **values}) for _ in range(count))


def shown(client: Client, **query: str) -> set[str]:
    """The ids a list page shows."""
    page = client.get(LIST, query)
    assert page.status_code == 200
    return set(re.findall(r"/execution/([0-9a-f-]{36})/change/", page.content.decode()))
