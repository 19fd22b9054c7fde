"""An administrator who is no superuser, and would like to be."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.auth.models import Group, Permission, User
from django.urls import reverse
from django_otp.plugins.otp_totp.models import TOTPDevice

from executions.capabilities.spending.models import Budget
from executions.tenants.service import ADMINISTRATOR
from providers.models import (
    ConfigVersion,
)
from providers.services.guarded_rows import NotAllowed, carry_out
from tests.attacks.administrators import (
    STRONG,
    administrator,
    page,
    signed_in,
    superuser,
    user_form,
)

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def _no_rule(approvals: None, settings: Any) -> None:
    settings.TWO_PERSON_RULE = False


def test_she_sets_a_superusers_password() -> None:
    boss, adam = superuser("boss"), administrator("adam")
    TOTPDevice.objects.create(user=boss, name="x", confirmed=True)
    before = User.objects.values("password", "is_active", "username").get(pk=boss.pk)
    client = signed_in(adam)
    new = {
        "password1": "n3w " + STRONG,
        "password2": "n3w " + STRONG,
        "usable_password": "true",
    }
    client.post(reverse("admin:auth_user_password_change", args=[boss.pk]), new)
    client.post(page(boss), {"username": "nobody"})
    client.post(page(boss, "delete"), {"post": "yes"})
    for action in ("delete_selected", "reset_authenticator"):
        chosen = {"action": action, "_selected_action": [boss.pk], "post": "yes"}
        client.post(page(boss, "changelist"), chosen)
    assert User.objects.values("password", "is_active", "username").get(pk=boss.pk) == before
    assert TOTPDevice.objects.filter(user=boss).exists()


def test_she_gives_herself_or_her_role_what_she_lacks() -> None:
    adam = administrator("adam")
    permission = Permission.objects.get(codename="delete_logentry")
    powerful = Group.objects.create(name="Powerful")
    powerful.permissions.add(permission)
    role = Group.objects.get(name=ADMINISTRATOR)
    kept = list(role.permissions.values_list("pk", flat=True))
    client = signed_in(adam)
    client.post(page(adam), user_form(adam, groups=[role.pk, powerful.pk]))
    client.post(page(adam), user_form(adam, is_superuser="on", user_permissions=[permission.pk]))
    client.post(page(role), {"name": role.name, "permissions": [*kept, permission.pk]})
    client.post(reverse("admin:auth_group_add"), {"name": "New", "permissions": [permission.pk]})
    assert not User.objects.get(pk=adam.pk).has_perm("admin.delete_logentry")
    assert not Group.objects.filter(name="New").exists()
    # Of what she has herself she may give.
    ada = User.objects.create_user("ada", is_staff=True)
    client.post(page(ada), user_form(ada, groups=[role.pk]))
    assert ada.groups.get() == role


def test_what_she_gave_herself_does_not_count_as_hers() -> None:
    adam = administrator("adam")
    role = Group.objects.get(name=ADMINISTRATOR)
    permission = Permission.objects.get(codename="delete_logentry")
    # Nothing was asked of this object yet: what it may do is looked up by the check itself.
    fresh = User.objects.get(pk=adam.pk)
    with pytest.raises(NotAllowed):
        carry_out(fresh, lambda: role.permissions.add(permission))
    assert not role.permissions.filter(pk=permission.pk).exists()


def test_she_takes_over_an_account_that_may_do_more() -> None:
    clerk = User.objects.create_user("clerk", is_staff=True)
    clerk.user_permissions.add(
        *Permission.objects.filter(
            codename__in=("change_user", "view_user", "delete_accessattempt")
        )
    )
    adam = administrator("adam")
    before = adam.password
    new = {
        "password1": "n3w " + STRONG,
        "password2": "n3w " + STRONG,
        "usable_password": "true",
    }
    signed_in(clerk).post(reverse("admin:auth_user_password_change", args=[adam.pk]), new)
    adam.refresh_from_db()
    assert adam.password == before


def test_she_lets_guessing_go_on_at_a_superuser() -> None:
    from axes.models import AccessAttempt

    superuser("boss")
    attempt = AccessAttempt.objects.create(
        username="boss", ip_address="192.0.2.1", failures_since_start=5
    )
    client = signed_in(administrator("adam"))
    client.post(page(attempt, "delete"), {"post": "yes"})
    chosen = {"action": "delete_selected", "_selected_action": [attempt.pk], "post": "yes"}
    client.post(page(attempt, "changelist"), chosen)
    assert AccessAttempt.objects.exists()


def test_what_she_changes_is_a_version_with_her_name_and_is_restored() -> None:
    adam = administrator("adam")
    row = Budget.objects.create(limit=1)
    form = {"period": "month", "limit": "99", "warn_percent": 80, "_reason": "Growth."}
    signed_in(adam).post(page(row), form)
    row.refresh_from_db()
    assert row.limit == 99
    first, second = ConfigVersion.objects.order_by("version")
    assert (second.author, second.reason) == ("user:adam", "Growth.")
    signed_in(adam).post(reverse("admin:providers_restore", args=[first.pk]))
    row.refresh_from_db()
    assert row.limit == 1
