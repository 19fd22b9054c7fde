"""Who may see, change and activate providers in the admin, and what activating does."""

from __future__ import annotations

import pytest
from django.contrib.admin.models import LogEntry
from django.test import Client

from providers.models import ProviderConfig
from providers.services import activate, save_config
from tests.admin.pages.provider_pages import (
    ADD,
    GOOD,
    LIST,
    TOKEN,
    admin,
    as_posted,
    controls,
    packages,
    page_of,
    staff,
)

pytestmark = pytest.mark.django_db

__all__ = ("admin", "packages")


def test_the_action_activates_one_provider(admin: Client) -> None:
    local = save_config("local", {})
    activate("local")
    probe = save_config("probe", GOOD)
    choose = {"action": "activate_selected", "_selected_action": [probe.pk]}
    response = admin.post(LIST, choose, follow=True)
    assert "Probe is now the active provider." in response.content.decode()
    assert ProviderConfig.objects.get(is_active=True).provider_id == "probe"
    assert "Activated." in LogEntry.objects.get().change_message
    both = {"action": "activate_selected", "_selected_action": [local.pk, probe.pk]}
    assert "Select one provider" in admin.post(LIST, both, follow=True).content.decode()


def test_a_provider_that_no_longer_fits_its_schema_is_not_activated(admin: Client) -> None:
    row = ProviderConfig.objects.create(provider_id="probe", config={"endpoint": "http://a"})
    choose = {"action": "activate_selected", "_selected_action": [row.pk]}
    assert "Not activated. token:" in admin.post(LIST, choose, follow=True).content.decode()
    assert not ProviderConfig.objects.filter(is_active=True).exists()


def test_save_and_activate_does_both(admin: Client) -> None:
    data = as_posted(admin.get(ADD, {"provider": "probe"})) | GOOD
    admin.post(f"{ADD}?provider=probe", data | {"_activate": "Save and activate"})
    assert ProviderConfig.objects.get(is_active=True).provider_id == "probe"
    save_config("local", {})
    activate("local")
    row = ProviderConfig.objects.get(provider_id="probe")
    data = as_posted(admin.get(page_of(row))) | {"size": "3"}
    admin.post(page_of(row), data | {"_activate": "Save and activate"})
    row = ProviderConfig.objects.get(is_active=True)
    assert (row.provider_id, row.config["size"]) == ("probe", 3)


def test_a_viewer_sees_masked_values_and_no_form(client: Client) -> None:
    row = save_config("probe", GOOD)
    viewer = staff(client, "view")
    response = viewer.get(page_of(row))
    text = response.content.decode()
    assert "http://a" in text
    assert "••••wxyz" in text
    assert TOKEN not in text
    assert "token" not in controls(response)
    assert "_activate" not in controls(response)
    assert viewer.post(page_of(row), GOOD | {"_version": 1, "size": 3}).status_code == 403
    choose = {"action": "activate_selected", "_selected_action": [row.pk]}
    viewer.post(LIST, choose)
    assert viewer.get(ADD, {"provider": "probe"}).status_code == 403
    assert viewer.get(ADD).status_code == 403
    row = ProviderConfig.objects.get()
    assert (row.version, row.is_active) == (1, False)


def test_whoever_may_add_may_not_change_or_activate(client: Client) -> None:
    row = save_config("local", {})
    adder = staff(client, "add")
    response = adder.get(ADD, {"provider": "probe"})
    assert "_activate" not in controls(response)
    data = as_posted(response) | GOOD | {"_activate": "Save and activate"}
    assert adder.post(f"{ADD}?provider=probe", data).status_code == 302
    assert not ProviderConfig.objects.get(provider_id="probe").is_active
    assert adder.get(page_of(row)).status_code == 403


def test_staff_without_permission_is_refused(client: Client) -> None:
    row = save_config("probe", GOOD)
    stranger = staff(client)
    assert {stranger.get(url).status_code for url in (LIST, ADD, page_of(row))} == {403}


def test_whoever_is_not_logged_in_is_sent_to_the_login(client: Client) -> None:
    row = save_config("probe", GOOD)
    for url in (LIST, ADD, page_of(row)):
        assert client.get(url)["Location"].startswith("/admin/login/")
