"""Runs that wait for an approval, and people who decide."""

from __future__ import annotations

from typing import Any

from django.contrib.auth.models import Permission, User
from django.test import Client
from django.urls import reverse

from executions.runs.models import Approval, Execution

ANSWER = "answer = ExecutionResult('', '', 0, 0.0)"
ASKED = f"print('x')\n{ANSWER}"
RULES: dict[str, Any] = {"analysis": "ask", "calls": "print"}


def signed_in(name: str, *permissions: str) -> Client:
    user = User.objects.create_user(name, password="x", is_staff=True)
    user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
    client = Client()
    client.force_login(user)
    return client


def page(name: str, approval: Approval) -> str:
    return reverse(f"admin:executions_approval_{name}", args=[approval.pk])


def decided(client: Client, approval: Approval, how: str, **more: str) -> Execution:
    hashed = {"request_hash": approval.request_hash, **more}
    assert client.post(page("decide", approval), {how: "1", **hashed}).status_code == 302
    approval.refresh_from_db()
    return Execution.objects.get(pk=approval.execution_id)
