"""Administrators, their pages, and what they fill in."""

from __future__ import annotations

from typing import Any

from django.contrib.auth.models import Group, User
from django.test import Client
from django.urls import reverse

from executions.tenants.service import ADMINISTRATOR
from providers.models import PendingChange, ProviderConfig

STRONG = "a long and strange phrase"
GOOD = {"endpoint": "http://a", "token": "tok-0123456789-wxyz"}


def signed_in(user: User) -> Client:
    client = Client()
    client.force_login(user)
    return client


def superuser(name: str) -> User:
    return User.objects.create_superuser(name, password=STRONG)


def administrator(name: str) -> User:
    user = User.objects.create_user(name, password=STRONG, is_staff=True)
    user.groups.add(Group.objects.get(name=ADMINISTRATOR))
    return user


def page(row: Any, verb: str = "change") -> str:
    options = row._meta
    name = f"admin:{options.app_label}_{options.model_name}_{verb}"
    return reverse(name, args=[] if verb in ("add", "changelist") else [row.pk])


def approve(user: User, change: PendingChange | None = None) -> PendingChange:
    change = change or PendingChange.objects.latest("pk")
    signed_in(user).post(reverse("admin:providers_approve", args=[change.pk]))
    change.refresh_from_db()
    return change


def route_form(provider: ProviderConfig | None = None, **values: str) -> dict[str, str]:
    steps = {"steps-TOTAL_FORMS": "0", "steps-INITIAL_FORMS": "0"}
    if provider is not None:
        steps = {
            "steps-TOTAL_FORMS": "1",
            "steps-INITIAL_FORMS": "0",
            "steps-0-provider": str(provider.pk),
            "steps-0-position": "0",
            "steps-0-weight": "1",
        }
    return {"owner": "", "language": "", "strategy": "priority", "is_active": "on"} | steps | values


def user_form(user: User, **changes: Any) -> dict[str, Any]:
    flags = {
        name: "on" for name in ("is_active", "is_staff", "is_superuser") if getattr(user, name)
    }
    groups = [str(pk) for pk in user.groups.values_list("pk", flat=True)]
    form = {"username": user.username, "groups": groups, **flags} | changes
    return {name: value for name, value in form.items() if value is not None}
