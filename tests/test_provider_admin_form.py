"""The admin pages of providers, generated from what a provider declares."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission, User
from django.test import Client
from django.urls import reverse

from providers import registry
from providers.models import ProviderConfig
from providers.services import activate, save_config
from tests.provider_package import PROBE, Packages, install_probe

pytestmark = pytest.mark.django_db

LIST = reverse("admin:providers_providerconfig_changelist")
ADD = reverse("admin:providers_providerconfig_add")
TOKEN = "tok-0123456789-wxyz"
GOOD = {"endpoint": "http://a", "token": TOKEN}


@pytest.fixture(autouse=True)
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Packages]:
    installed = Packages(tmp_path, monkeypatch)
    install_probe(installed, f"admin_{tmp_path.name}")
    yield installed
    registry.refresh()


@pytest.fixture
def admin(client: Client) -> Client:
    client.force_login(User.objects.create_superuser("admin"))
    return client


def staff(client: Client, *permissions: str) -> Client:
    user = User.objects.create_user("staff", is_staff=True)
    for permission in permissions:
        user.user_permissions.add(Permission.objects.get(codename=f"{permission}_providerconfig"))
    client.force_login(user)
    return client


def page_of(row: ProviderConfig) -> str:
    return reverse("admin:providers_providerconfig_change", args=[row.pk])


class _Controls(HTMLParser):
    """The controls of a page by name, each with its attributes; a select with its options."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, dict[str, Any]] = {}
        self._select: dict[str, Any] | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values: dict[str, Any] = dict(attrs) | {"tag": tag}
        if tag in ("input", "select") and values.get("name"):
            self.found[values["name"]] = values
        if tag == "select":
            self._select = values
            values["options"] = []
        if tag == "option" and self._select is not None:
            self._select["options"].append(values["value"])
            if "selected" in values:
                self._select["value"] = values["value"]


def controls(response: Any) -> dict[str, dict[str, Any]]:
    parser = _Controls()
    parser.feed(response.content.decode())
    return parser.found


def as_posted(response: Any) -> dict[str, str]:
    """What a browser would send for the page as it is."""
    data = {}
    for name, control in controls(response).items():
        kind = control.get("type")
        if kind == "submit" or (kind == "checkbox" and "checked" not in control):
            continue
        data[name] = control.get("value") or ("on" if kind == "checkbox" else "")
    return data


def errors_by_field(response: Any) -> dict[str, list[str]]:
    return {
        field: list(messages)
        for field, messages in response.context["adminform"].form.errors.items()
    }


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
    assert said.startswith("Enter it again: Endpoint changed")
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


def test_the_second_of_two_admins_sees_a_conflict(admin: Client) -> None:
    row = save_config("probe", GOOD)
    seen = as_posted(admin.get(page_of(row)))
    assert admin.post(page_of(row), seen | {"size": "1"}).status_code == 302
    response = admin.post(page_of(row), seen | {"size": "2"})
    assert "somebody else" in errors_by_field(response)["__all__"][0]
    assert "somebody else" in response.content.decode()
    assert ProviderConfig.objects.get().config["size"] == 1


def test_two_first_configurations_conflict(admin: Client) -> None:
    seen = as_posted(admin.get(ADD, {"provider": "probe"})) | GOOD
    row = save_config("probe", GOOD | {"size": 1})
    response = admin.post(f"{ADD}?provider=probe", seen | {"size": "2"}, follow=True)
    assert "somebody else" in response.content.decode()
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


def test_the_list_needs_no_key_and_shows_no_secret(admin: Client, settings: Any) -> None:
    save_config("probe", GOOD)
    activate("probe")
    settings.FERNET_KEYS = ["another key"]
    response = admin.get(LIST)
    assert response.status_code == 200
    assert "Probe" in response.content.decode()
    assert TOKEN not in response.content.decode()


def test_the_list_takes_a_fixed_number_of_queries(
    admin: Client, django_assert_max_num_queries: Any
) -> None:
    for number in range(30):
        ProviderConfig.objects.create(provider_id=f"other{number}", config={})
    with django_assert_max_num_queries(6) as captured:
        assert admin.get(LIST).status_code == 200
    assert not any('"config"' in query["sql"] for query in captured.captured_queries)


def test_with_the_key_lost_the_configuration_can_be_entered_anew(
    admin: Client, settings: Any
) -> None:
    row = save_config("probe", GOOD)
    settings.FERNET_KEYS = ["another key"]
    response = admin.get(page_of(row))
    assert "cannot be decrypted" in response.content.decode()
    data = as_posted(response) | {"endpoint": "http://b"}
    assert errors_by_field(admin.post(page_of(row), data)) == {"token": ["This field is required."]}
    assert admin.post(page_of(row), data | {"token": "tok-new"}).status_code == 302
    assert ProviderConfig.objects.get().config["token"] == "tok-new"


def test_the_action_activates_one_provider(admin: Client) -> None:
    local = save_config("local", {})
    activate("local")
    probe = save_config("probe", GOOD)
    choose = {"action": "activate_selected", "_selected_action": [probe.pk]}
    response = admin.post(LIST, choose, follow=True)
    assert "Probe runs the code now." in response.content.decode()
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


def test_the_admin_log_names_fields_and_holds_no_value(admin: Client) -> None:
    row = save_config("probe", GOOD)
    data = as_posted(admin.get(page_of(row))) | {"token": "tok-new", "size": "3"}
    admin.post(page_of(row), data)
    (entry,) = LogEntry.objects.all()
    assert "Token" in entry.change_message
    assert "Pool size" in entry.change_message
    assert "tok-new" not in entry.change_message


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


def test_a_provider_whose_package_is_gone_can_be_seen_and_deleted(admin: Client) -> None:
    row = ProviderConfig.objects.create(provider_id="gone", config={"api_key": TOKEN})
    response = admin.get(page_of(row))
    assert "gone (not available)" in response.content.decode()
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
