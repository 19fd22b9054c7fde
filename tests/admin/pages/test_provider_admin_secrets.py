"""Secrets on the admin pages of providers: masked, kept, replaced or removed, and never shown."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.test import Client
from django.urls import reverse

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
    errors_by_field,
    packages,
    page_of,
)

pytestmark = [pytest.mark.django_db, pytest.mark.one_database]

__all__ = ("admin", "packages")


def test_a_secret_shows_only_as_its_mask(admin: Client) -> None:
    row = save_config("probe", GOOD | {"proxy_password": "short"})
    response = admin.get(page_of(row))
    found = controls(response)
    assert found["token"]["placeholder"] == "••••wxyz"
    assert found["token"].get("value") is None
    assert "Stored: ••••wxyz." in response.content.decode()
    assert found["proxy_password"]["placeholder"] == "••••"
    assert TOKEN not in response.content.decode()
    assert "short" not in response.content.decode()


def test_a_secret_that_was_typed_does_not_come_back_with_an_error(admin: Client) -> None:
    data = as_posted(admin.get(ADD, {"provider": "probe"})) | GOOD | {"size": "0"}
    response = admin.post(f"{ADD}?provider=probe", data)
    assert "size" in errors_by_field(response)
    assert TOKEN not in response.content.decode()


def test_an_untouched_secret_is_kept(admin: Client) -> None:
    row = save_config("probe", GOOD)
    data = as_posted(admin.get(page_of(row))) | {"size": "5"}
    assert admin.post(page_of(row), data).status_code == 302
    row = ProviderConfig.objects.get()
    assert (row.config["size"], row.config["token"], row.version) == (5, TOKEN, 2)


def test_with_another_address_the_secret_is_asked_for_again(admin: Client) -> None:
    row = save_config("probe", GOOD)
    data = as_posted(admin.get(page_of(row))) | {"endpoint": "http://b"}
    (said,) = errors_by_field(admin.post(page_of(row), data))["token"]
    assert said.startswith("Enter it again, because Endpoint changed")
    assert ProviderConfig.objects.get().version == 1
    assert admin.post(page_of(row), data | {"token": "tok-new"}).status_code == 302
    assert ProviderConfig.objects.get().config["endpoint"] == "http://b"


def test_a_new_secret_replaces_the_old_one(admin: Client) -> None:
    row = save_config("probe", GOOD)
    data = as_posted(admin.get(page_of(row))) | {"token": "tok-new"}
    assert admin.post(page_of(row), data).status_code == 302
    assert ProviderConfig.objects.get().config["token"] == "tok-new"


def test_an_optional_secret_can_be_removed_and_a_required_one_not(admin: Client) -> None:
    row = save_config("probe", GOOD | {"proxy_password": "pass-word"})
    response = admin.get(page_of(row))
    assert "_clear_token" not in controls(response)
    data = as_posted(response) | {"_clear_proxy_password": "on"}
    assert admin.post(page_of(row), data).status_code == 302
    row = ProviderConfig.objects.get()
    assert row.config["proxy_password"] is None
    assert "_clear_proxy_password" not in controls(admin.get(page_of(row)))


def test_the_list_needs_no_key_and_shows_no_secret(admin: Client, settings: Any) -> None:
    save_config("probe", GOOD)
    activate("probe")
    settings.FERNET_KEYS = ["another key"]
    response = admin.get(LIST)
    assert response.status_code == 200
    assert "Probe" in response.content.decode()
    assert TOKEN not in response.content.decode()


def test_what_cannot_be_decrypted_is_only_to_be_read_and_to_be_removed(
    admin: Client, settings: Any
) -> None:
    row = save_config("probe", GOOD)
    data = as_posted(admin.get(page_of(row))) | {"endpoint": "http://b", "token": "tok-new"}
    given = settings.FERNET_KEYS
    settings.FERNET_KEYS = ["another key"]
    page = admin.get(page_of(row)).content.decode()
    assert "cannot be decrypted" in page
    assert 'name="token"' not in page
    assert admin.post(page_of(row), data).status_code == 403
    settings.FERNET_KEYS = given
    assert ProviderConfig.objects.get().config["token"] == TOKEN

    settings.FERNET_KEYS = ["another key"]
    address = reverse("admin:providers_providerconfig_delete", args=[row.pk])
    assert admin.post(address, {"post": "yes"}).status_code == 302
    assert not ProviderConfig.objects.exists()


def test_the_admin_log_names_fields_and_holds_no_value(admin: Client) -> None:
    row = save_config("probe", GOOD)
    data = as_posted(admin.get(page_of(row))) | {"token": "tok-new", "size": "3"}
    admin.post(page_of(row), data)
    (entry,) = LogEntry.objects.all()
    assert "Token" in entry.change_message
    assert "Pool size" in entry.change_message
    assert "tok-new" not in entry.change_message
