"""Under the two-person rule the admin's pages ask, and another administrator decides."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission, User
from django.test import Client
from django.urls import reverse

from providers import registry
from providers.models import ConfigVersion, PendingChange, ProviderConfig
from providers.services import save_config
from tests.support.provider_package import Packages, install_probe

pytestmark = pytest.mark.django_db

LIST = reverse("admin:providers_providerconfig_changelist")
ADD = reverse("admin:providers_providerconfig_add")
TOKEN = "tok-0123456789-wxyz"
GOOD = {"endpoint": "http://a", "token": TOKEN}
SENT = GOOD | {"size": "10", "factor": "1.5", "memory": "256m", "behaviour": "start"}


@pytest.fixture(autouse=True)
def _rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: Any) -> Iterator[None]:
    settings.TWO_PERSON_RULE = True
    install_probe(Packages(tmp_path, monkeypatch), f"two_{tmp_path.name}")
    yield
    registry.refresh()


def administrator(name: str) -> Client:
    client = Client()
    client.force_login(User.objects.create_superuser(name))
    return client


def decide(client: Client, what: str, change: PendingChange) -> int:
    return client.post(reverse(f"admin:providers_{what}", args=[change.pk])).status_code


def test_a_first_configuration_waits_and_is_noted_as_asked_for() -> None:
    ann, ben = administrator("ann"), administrator("ben")
    data = SENT | {"_version": "0", "_activate": "x", "_reason": "New."}
    answer = ann.post(f"{ADD}?provider=probe", data, follow=True)
    assert "submitted for approval" in answer.content.decode()
    assert not ProviderConfig.objects.exists()
    assert LogEntry.objects.get().change_message == "Requested a first configuration."

    change = PendingChange.objects.get()
    assert decide(ann, "approve", change) == 302
    assert not ProviderConfig.objects.exists()
    assert decide(ben, "approve", change) == 302
    assert ProviderConfig.objects.get().is_active
    version = ConfigVersion.objects.get()
    assert (version.author, version.approved_by, version.reason) == ("user:ann", "user:ben", "New.")


def test_a_change_a_removal_and_a_switch_wait() -> None:
    ann = administrator("ann")
    row = save_config("probe", GOOD)
    page = reverse("admin:providers_providerconfig_change", args=[row.pk])
    ann.post(page, SENT | {"_version": "1", "size": "20", "token": ""})
    ann.post(reverse("admin:providers_providerconfig_delete", args=[row.pk]), {"post": "yes"})
    ann.post(LIST, {"action": "activate_selected", "_selected_action": [row.pk]})

    row.refresh_from_db()
    assert (row.config["size"], row.is_active) == (10, False)
    asked = PendingChange.objects.order_by("pk").values_list("action", flat=True)
    assert list(asked) == ["save", "remove", "activate"]
    messages = LogEntry.objects.order_by("pk").values_list("change_message", flat=True)
    assert list(messages) == ["Requested a change.", "Requested removal.", "Requested: Activate."]
    assert set(LogEntry.objects.values_list("action_flag", flat=True)) == {2}


def test_a_restored_version_waits_and_is_approved() -> None:
    ann, ben = administrator("ann"), administrator("ben")
    save_config("probe", GOOD | {"size": 1})
    save_config("probe", GOOD | {"size": 2})
    first = ConfigVersion.objects.get(version=1)
    ann.post(reverse("admin:providers_restore", args=[first.pk]), {"reason": "Back."})
    assert ProviderConfig.objects.get().config["size"] == 2
    decide(ben, "approve", PendingChange.objects.get())
    assert ProviderConfig.objects.get().config["size"] == 1


def test_who_may_not_decide_is_refused() -> None:
    ann = administrator("ann")
    row = save_config("probe", GOOD)
    ann.post(LIST, {"action": "activate_selected", "_selected_action": [row.pk]})
    change = PendingChange.objects.get()
    viewer = User.objects.create_user("viewer", is_staff=True)
    viewer.user_permissions.add(Permission.objects.get(codename="view_pendingchange"))
    client = Client()
    client.force_login(viewer)
    page = reverse("admin:providers_pendingchange_change", args=[change.pk])
    assert client.get(page).status_code == 200
    assert decide(client, "approve", change) == decide(client, "reject", change) == 403
    assert decide(Client(), "approve", change) == 302
    change.refresh_from_db()
    assert change.status == "waiting"
    assert ann.get(reverse("admin:providers_approve", args=[change.pk])).status_code == 302
    decide(ann, "reject", change)
    change.refresh_from_db()
    assert (change.status, change.decided_by) == ("rejected", "user:ann")


def test_no_page_of_a_waiting_change_holds_its_secret() -> None:
    ann = administrator("ann")
    ann.post(f"{ADD}?provider=probe", SENT | {"_version": "0"})
    change = PendingChange.objects.get()
    for path in (
        reverse("admin:providers_pendingchange_changelist"),
        reverse("admin:providers_pendingchange_change", args=[change.pk]),
        reverse("admin:providers_pendingchange_history", args=[change.pk]),
        LIST,
    ):
        answer = ann.get(path)
        assert answer.status_code == 200
        assert TOKEN not in answer.content.decode()
