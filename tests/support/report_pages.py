"""The pages of reports, and people who sign in."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from django.contrib.auth import get_user_model
from django.contrib.auth.models import Group
from django.test import Client

from executions.tenants.service import ensure_roles

LIST = "/admin/executions/report/"
Login = Callable[[str], Client]


@pytest.fixture
def login(db: None) -> Login:
    """Somebody signed in, with a role."""
    ensure_roles()

    def signed_in(role: str) -> Client:
        user = get_user_model().objects.create_user(f"a {role.lower()}", is_staff=True)
        user.groups.add(Group.objects.get(name=role))
        client = Client()
        client.force_login(user)
        return client

    return signed_in
