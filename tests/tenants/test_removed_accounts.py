"""Removing an account, and the way back from that, in the admin."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Group, Permission, User
from django.test import Client
from django.urls import reverse

from executions.ledger.models import LedgerEntry
from providers.models import ConfigVersion, PendingChange
from providers.services.guarded_rows import carry_out

pytestmark = [pytest.mark.django_db, pytest.mark.database]

PASSWORD = "a long password of hers"
LIST = reverse("admin:auth_user_changelist")


@pytest.fixture
def ann() -> User:
    return User.objects.create_superuser("ann", password=PASSWORD)


@pytest.fixture
def ben() -> User:
    return User.objects.create_superuser("ben", password=PASSWORD)


@pytest.fixture
def ada(ann: User) -> User:
    """Somebody who may enter the admin and has done nothing there yet."""

    def make() -> User:
        made = User.objects.create_user("ada", "a@b.example", PASSWORD, is_staff=True)
        made.groups.add(Group.objects.get_or_create(name="Clerks")[0])
        return made

    return carry_out(ann, make)[0]


def signed_in(user: User) -> Client:
    client = Client()
    client.force_login(user)
    return client


def page(user: User, name: str = "delete") -> str:
    return reverse(f"admin:auth_user_{name}", args=[user.pk])


def restore(client: Client, user_id: int) -> Any:
    version = ConfigVersion.objects.filter(subject=f"auth.user:{user_id}").earliest("version")
    return client.post(reverse("admin:providers_restore", args=[version.pk]), follow=True)


def acts(user: User) -> None:
    """As every page that she saves does."""
    LogEntry.objects.log_actions(user.pk, [user], 2, "Acted.", single_object=True)


def entries(words: str) -> int:
    return LedgerEntry.objects.filter(kind="configuration", statement__contains=words).count()


def test_a_restored_account_has_its_rights_and_no_password(ann: User, ada: User) -> None:
    client = signed_in(ann)
    client.post(page(ada), {"post": "yes"})
    assert not User.objects.filter(username="ada").exists()
    before = entries(f"auth.user:{ada.pk}")

    answer = restore(client, ada.pk)

    assert "was restored" in answer.content.decode()
    back = User.objects.get(pk=ada.pk)
    assert (back.username, back.is_staff, back.email) == ("ada", True, "")
    assert [group.name for group in back.groups.all()] == ["Clerks"]
    assert not back.has_usable_password()
    assert not Client().login(username="ada", password=PASSWORD)
    assert entries(f"auth.user:{ada.pk}") == before + 1


def test_under_the_two_person_rule_both_ways_wait(
    ann: User, ben: User, ada: User, settings: Any
) -> None:
    settings.TWO_PERSON_RULE = True

    def approve() -> None:
        waiting = PendingChange.objects.get(status="waiting")
        signed_in(ben).post(reverse("admin:providers_approve", args=[waiting.pk]))
        waiting.refresh_from_db()
        assert waiting.status == "approved"

    signed_in(ann).post(page(ada), {"post": "yes"})
    assert User.objects.filter(pk=ada.pk).exists()
    approve()
    assert not User.objects.filter(pk=ada.pk).exists()

    restore(signed_in(ann), ada.pk)
    assert not User.objects.filter(pk=ada.pk).exists()
    approve()
    assert not User.objects.get(pk=ada.pk).has_usable_password()


def test_a_name_that_somebody_else_has_by_now_is_not_restored(ann: User, ada: User) -> None:
    client = signed_in(ann)
    client.post(page(ada), {"post": "yes"})
    User.objects.create_user("ada")
    answer = restore(client, ada.pk)
    assert "Not restored" in answer.content.decode()
    assert not User.objects.filter(pk=ada.pk).exists()


def test_who_has_acted_is_deactivated_in_place_of_being_deleted(ann: User, ada: User) -> None:
    acts(ada)
    client = signed_in(ann)
    shown = client.get(page(ada)).content.decode()
    assert "in the admin log, which is kept" in shown
    assert "Deactivate ada" in shown
    client.post(page(ada), {"post": "yes"})
    assert User.objects.get(pk=ada.pk).is_active

    client.post(page(ada), {"_deactivate": "yes", "_reason": "left"})

    ada.refresh_from_db()
    assert not ada.is_active
    assert not Client().login(username="ada", password=PASSWORD)
    assert LogEntry.objects.filter(user=ada).exists()
    latest = ConfigVersion.objects.filter(subject=f"auth.user:{ada.pk}").latest("version")
    assert (latest.author, latest.reason) == ("user:ann", "left")
    assert "already deactivated" in client.get(page(ada)).content.decode()


def test_deactivating_waits_under_the_two_person_rule(ann: User, ada: User, settings: Any) -> None:
    settings.TWO_PERSON_RULE = True
    acts(ada)
    signed_in(ann).post(page(ada), {"_deactivate": "yes"})
    ada.refresh_from_db()
    assert ada.is_active
    assert [entry["field"] for entry in PendingChange.objects.get().diff] == ["is_active"]


def test_the_list_says_what_to_do_instead(ann: User, ada: User) -> None:
    acts(ada)
    chosen = {"action": "delete_selected", "_selected_action": [ada.pk]}
    shown = signed_in(ann).post(LIST, chosen).content.decode()
    assert "deactivate the account" in shown
    signed_in(ann).post(LIST, chosen | {"post": "yes"})
    assert User.objects.filter(pk=ada.pk).exists()


def test_who_acts_while_her_removal_waits_keeps_her_entries(
    ann: User, ben: User, ada: User, settings: Any
) -> None:
    settings.TWO_PERSON_RULE = True
    signed_in(ann).post(page(ada), {"post": "yes"})
    acts(ada)
    waiting = PendingChange.objects.get()
    url = reverse("admin:providers_approve", args=[waiting.pk])
    answer = signed_in(ben).post(url, follow=True)
    assert "in the admin log, which is kept" in answer.content.decode()
    assert User.objects.filter(pk=ada.pk).exists()
    assert LogEntry.objects.filter(user=ada).exists()


def test_nobody_deactivates_who_may_do_more(ann: User, ada: User) -> None:
    acts(ann)
    clerk = User.objects.create_user("clerk", is_staff=True)
    for name in ("view_user", "change_user", "delete_user"):
        clerk.user_permissions.add(Permission.objects.get(codename=name))
    client = signed_in(clerk)
    assert client.post(page(ann), {"_deactivate": "yes"}).status_code == 403
    acts(ada)
    ada.user_permissions.add(Permission.objects.get(codename="view_budget"))
    client.post(page(ada), {"_deactivate": "yes"})
    assert User.objects.get(pk=ann.pk).is_active
    assert User.objects.get(pk=ada.pk).is_active
