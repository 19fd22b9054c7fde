"""The admin pages of providers, generated from what a provider declares."""

from __future__ import annotations

import re
from typing import Any

import pytest
from django.test import Client
from django.urls import reverse

from providers.models import ProviderConfig
from providers.services import save_config
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
from tests.support.provider_package import PROBE, Packages

pytestmark = [pytest.mark.django_db, pytest.mark.one_database]

__all__ = ("admin", "packages")


def test_adding_starts_with_a_choice_of_the_installed_providers(admin: Client) -> None:
    text = admin.get(ADD).content.decode()
    assert re.search(r'href="\?provider=probe">.*?<strong>Probe</strong>', text, re.S)
    assert 'href="?provider=local">' in text
    assert "Notes &lt;what&gt; happens to it." in text


def test_the_choice_says_which_package_is_broken_and_why(admin: Client, packages: Packages) -> None:
    packages.install(
        "sad_package", {"sad": "admin_sad:Sad"}, {"admin_sad": "raise OSError('<no>')"}
    )
    text = admin.get(ADD).content.decode()
    assert "sad_package" in text
    assert "OSError: &lt;no&gt;" in text


def test_an_unknown_provider_leads_back_to_the_choice(admin: Client) -> None:
    assert "Choose a provider" in admin.get(ADD, {"provider": "nope"}).content.decode()


def test_each_declared_field_has_its_control(admin: Client) -> None:
    response = admin.get(ADD, {"provider": "probe"})
    found = controls(response)
    assert found["endpoint"]["type"] == "text"
    assert found["endpoint"]["placeholder"] == "http://localhost:9385"
    assert "required" in found["endpoint"]
    assert (found["size"]["type"], found["size"]["min"], found["size"]["max"]) == (
        "number",
        "1",
        "100",
    )
    assert found["size"]["value"] == "10"
    assert "required" not in found["size"]
    assert (found["factor"]["max"], found["factor"]["step"]) == ("9.5", "any")
    assert [option for option in found["memory"]["options"] if option] == ["128m", "256m", "1g"]
    assert found["memory"]["value"] == "256m"
    assert found["strict"]["type"] == "checkbox"
    assert "checked" in found["strict"]
    assert found["token"]["type"] == "password"
    text = response.content.decode()
    assert "Pool size" in text
    assert "Where the &lt;service&gt; listens." in text
    assert re.search(r'<label class="[^"]*required" for="id_endpoint">\s*Endpoint', text)


def test_a_posted_form_is_stored(admin: Client) -> None:
    data = as_posted(admin.get(ADD, {"provider": "probe"}))
    data |= GOOD | {"size": "7", "factor": "2.5", "memory": "1g"}
    data.pop("strict")
    response = admin.post(f"{ADD}?provider=probe", data)
    assert response.status_code == 302
    row = ProviderConfig.objects.get()
    expected = {"size": 7, "factor": 2.5, "memory": "1g", "strict": False, **GOOD}
    assert {key: row.config[key] for key in expected} == expected
    assert (row.provider_id, row.version, row.is_active) == ("probe", 1, False)


def test_a_provider_whose_fields_have_awkward_names_needs_no_code(
    admin: Client, packages: Packages
) -> None:
    names = [
        "provider",
        "version",
        "config",
        "prefix",
        "initial",
        "instance",
        "data",
        "clean",
        "id",
    ]
    lines = "".join(f'"{name}": ConfigField("string", "{name}"), ' for name in names)
    fields = "config_fields = {" + lines + "}\n    ignored = {"
    source = PROBE.replace('"probe"', '"awkward"').replace("config_fields = {", fields)
    source = source.replace('config["behaviour"]', '"start"').replace('config["endpoint"]', '""')
    module = f"awkward_{packages.folder.name}"
    packages.install("awkward", {"awkward": f"{module}:Probe"}, {module: source})
    response = admin.get(ADD, {"provider": "awkward"})
    assert controls(response)["provider"].get("value") is None
    data = as_posted(response) | {name: f"value of {name}" for name in names}
    assert admin.post(f"{ADD}?provider=awkward", data).status_code == 302
    row = ProviderConfig.objects.get()
    assert row.config == {name: f"value of {name}" for name in names}
    data = as_posted(admin.get(page_of(row))) | {"version": "other"}
    assert admin.post(page_of(row), data).status_code == 302
    assert ProviderConfig.objects.get().config["version"] == "other"


def test_errors_show_at_their_fields_and_nothing_is_stored(admin: Client) -> None:
    data = as_posted(admin.get(ADD, {"provider": "probe"}))
    data |= {"endpoint": "abc", "token": "abc", "size": "101", "factor": "much", "memory": "2g"}
    response = admin.post(f"{ADD}?provider=probe", data)
    found = errors_by_field(response)
    assert set(found) == {"endpoint", "token", "size", "factor", "memory"}
    assert all(len(messages) == 1 for messages in found.values())
    assert found["token"] == ["Must be at least 4 characters long."]
    assert 'id="id_token_error"' in response.content.decode()
    assert not ProviderConfig.objects.exists()


def test_a_rule_of_the_provider_shows_on_the_form(admin: Client) -> None:
    data = as_posted(admin.get(ADD, {"provider": "probe"})) | GOOD | {"endpoint": "ftp://a"}
    response = admin.post(f"{ADD}?provider=probe", data)
    assert errors_by_field(response) == {"__all__": ["The endpoint must be an HTTP address."]}


def test_the_second_of_two_admins_sees_a_conflict(admin: Client) -> None:
    row = save_config("probe", GOOD)
    seen = as_posted(admin.get(page_of(row)))
    assert admin.post(page_of(row), seen | {"size": "1"}).status_code == 302
    response = admin.post(page_of(row), seen | {"size": "2"})
    assert "Another user" in errors_by_field(response)["__all__"][0]
    assert "Another user" in response.content.decode()
    assert ProviderConfig.objects.get().config["size"] == 1


def test_two_first_configurations_conflict(admin: Client) -> None:
    seen = as_posted(admin.get(ADD, {"provider": "probe"})) | GOOD
    row = save_config("probe", GOOD | {"size": 1})
    response = admin.post(f"{ADD}?provider=probe", seen | {"size": "2"}, follow=True)
    assert "Another user" in response.content.decode()
    assert response.redirect_chain[-1][0] == f"../{row.pk}/change/"
    assert ProviderConfig.objects.get().config["size"] == 1


def test_adding_what_is_configured_leads_to_its_page(admin: Client) -> None:
    row = save_config("probe", GOOD)
    response = admin.get(ADD, {"provider": "probe"}, follow=True)
    assert response.request["PATH_INFO"] == page_of(row)


def test_a_form_without_its_version_is_refused(admin: Client) -> None:
    row = save_config("probe", GOOD)
    data = as_posted(admin.get(page_of(row))) | {"size": "1"}
    data.pop("_version")
    assert "_version" in errors_by_field(admin.post(page_of(row), data))
    assert ProviderConfig.objects.get().version == 1


def test_the_list_takes_a_fixed_number_of_queries(
    admin: Client, django_assert_max_num_queries: Any
) -> None:
    for number in range(30):
        ProviderConfig.objects.create(provider_id=f"other{number}", config={})
    # The menu's counts are looked up once for some seconds.
    admin.get(LIST)
    with django_assert_max_num_queries(6) as captured:
        assert admin.get(LIST).status_code == 200
    assert not any('"config"' in query["sql"] for query in captured.captured_queries)


def test_a_provider_whose_package_is_gone_can_be_seen_and_deleted(admin: Client) -> None:
    row = ProviderConfig.objects.create(provider_id="gone", config={"api_key": TOKEN})
    response = admin.get(page_of(row))
    assert "gone (unavailable)" in response.content.decode()
    assert TOKEN not in response.content.decode()
    assert "_save" not in controls(response)
    delete = reverse("admin:providers_providerconfig_delete", args=[row.pk])
    assert admin.post(delete, {"post": "yes"}).status_code == 302
    assert not ProviderConfig.objects.exists()


def test_the_pages_hold_no_inline_script(admin: Client) -> None:
    row = save_config("probe", GOOD)
    for url in (ADD, f"{ADD}?provider=probe", page_of(row)):
        text = admin.get(url).content.decode()
        assert not re.search(r"<script(?![^>]*\bsrc=)", text)
        assert not re.search(r"\son\w+=", text)
