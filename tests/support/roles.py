"""People with a role."""

from __future__ import annotations

from django.contrib.auth import get_user_model
from django.contrib.auth.models import Group
from django.test import Client

from executions.tenants.service import ensure_roles


def member(role: str, name: str = "") -> Client:
    ensure_roles()
    user = get_user_model().objects.create_user(name or role.lower(), is_staff=True)
    user.groups.add(Group.objects.get(name=role))
    client = Client()
    client.force_login(user)
    return client
