"""The page of processes: who runs executions now, for looking at."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.auth import get_user_model
from django.contrib.auth.models import Group, User
from django.db.models.functions import Now
from django.test import Client

from executions.runs.models import Execution, Process
from executions.tenants.service import ADMINISTRATOR, AUDITOR, OPERATOR, ensure_roles
from tests.conftest import Caller
from tests.support.held import opened

PAGE = "/admin/executions/process/"


def signed_in(role: str) -> Client:
    user: Any = get_user_model().objects.create_user(f"a {role}", password="x", is_staff=True)
    if role:
        user.groups.add(Group.objects.get(name=role))
    client = Client()
    client.force_login(user)
    return client


@pytest.fixture
def process(db: None, alice: Caller) -> Process:
    ensure_roles()
    process = Process.objects.create(instance="web-2", kind="web", pid=4711)
    Process.objects.create(instance="web-1", kind="worker", pid=12, ended_at=Now())
    for _ in range(3):
        opened(alice)
    Execution.objects.update(process=process)
    return process


@pytest.mark.parametrize("role", [ADMINISTRATOR, OPERATOR, AUDITOR])
def test_whoever_has_a_role_sees_them_and_changes_nothing(process: Process, role: str) -> None:
    client = signed_in(role)

    page = client.get(PAGE)

    rows = [
        (row.instance, row.kind, row.pid, row.running, row.ended_at is None)
        for row in page.context["cl"].result_list
    ]
    assert rows == [("web-2", "web", 4711, 3, True), ("web-1", "worker", 12, 0, False)]
    assert client.get(f"{PAGE}add/").status_code == 403
    for address in (f"{PAGE}{process.pk}/delete/", f"{PAGE}{process.pk}/change/"):
        assert client.post(address, {"post": "yes", "pid": 1}).status_code == 403
    process.refresh_from_db()
    assert process.pid == 4711


def test_staff_without_a_role_do_not_see_them(process: Process) -> None:
    assert signed_in("").get(PAGE).status_code == 403


def test_an_api_key_is_no_way_in(process: Process, alice: Caller) -> None:
    assert alice.client.get(PAGE).status_code == 302
    assert not User.objects.filter(is_staff=True).exists()
