"""Configuring providers in Chromium: picked, checked while typing, tested, saved, restored."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from providers import registry
from providers.models import ConfigVersion, PendingChange, ProviderConfig, ProviderHealth
from providers.services import save_config
from providers.services.health import check_all
from tests.conftest import require
from tests.support.browser import keep_picture, sign_in_quickly
from tests.support.certificates import Authority
from tests.support.provider_package import Packages, install_probe

TOKEN = "tok-0123456789-wxyz"
GOOD = {"endpoint": "http://a", "token": TOKEN}
LIST = "/admin/providers/providerconfig/"


@pytest.fixture(autouse=True)
def _probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    install_probe(Packages(tmp_path, monkeypatch), f"browser_{tmp_path.name}")
    yield
    registry.refresh()


@pytest.fixture(autouse=True)
def _quiet(complaints: list[str]) -> Iterator[None]:
    """No page of this file makes the browser complain."""
    yield
    assert not complaints


def test_a_provider_nobody_wrote_a_page_for_is_picked_filled_in_and_saved(page: Page) -> None:
    page.goto(f"{LIST}add/")
    expect(page.get_by_text("Notes <what> happens to it.")).to_be_visible()
    keep_picture(page, "provider-picker")
    page.get_by_role("link", name=re.compile("Probe")).click()

    expect(page.get_by_label("Endpoint")).to_have_attribute("placeholder", "http://localhost:9385")
    expect(page.get_by_text("Where the <service> listens.")).to_be_visible()
    expect(page.get_by_label("Memory").locator("option")).to_have_count(4)
    page.get_by_label("Endpoint").fill("http://a")
    page.get_by_label("Token").fill(TOKEN)
    page.get_by_label("Reason").fill("The first one.")
    page.get_by_role("button", name="Save", exact=True).click()

    expect(page.get_by_text("was added successfully")).to_be_visible()
    assert ProviderConfig.objects.get().config["token"] == TOKEN
    version = ConfigVersion.objects.get()
    assert (version.author, version.reason) == ("user:admin", "The first one.")


def test_a_wrong_value_is_explained_before_it_is_saved(page: Page) -> None:
    row = save_config("probe", GOOD)
    page.goto(f"{LIST}{row.pk}/change/")
    page.get_by_label("Pool size").fill("1000")
    page.get_by_label("Endpoint").click()
    expect(page.get_by_text("less than or equal to 100")).to_be_visible()
    keep_picture(page, "provider-inline-validation")
    page.get_by_label("Pool size").fill("50")
    page.get_by_label("Endpoint").fill("ftp://a")
    page.get_by_label("Factor").click()
    expect(page.get_by_text("less than or equal to 100")).to_be_hidden()
    assert ProviderConfig.objects.get().version == 1


def test_a_connection_is_tested_with_unsaved_values_without_leaving_the_page(page: Page) -> None:
    require("bwrap")
    row = save_config("local", {"launcher": "auto", "pool_size": 2})
    page.goto(f"{LIST}{row.pk}/change/")
    marker = page.evaluate("window.marker = Math.random()")
    page.get_by_label("Runtime", exact=True).select_option("bubblewrap")
    page.get_by_role("button", name="Test connection").click()
    result = page.locator("#test-result")
    expect(result).to_contain_text("Works", timeout=20_000)
    expect(result).to_contain_text(re.compile(r"\d+(\.\d+)? ms"))
    expect(result).to_contain_text("bubblewrap")
    result.scroll_into_view_if_needed()
    keep_picture(page, "provider-test-connection")
    assert page.evaluate("window.marker") == marker
    assert ProviderConfig.objects.get().config["launcher"] == "auto"


def test_a_failed_test_shows_its_code_and_the_field_at_fault(page: Page) -> None:
    row = save_config("probe", GOOD)
    page.goto(f"{LIST}{row.pk}/change/")
    page.get_by_label("Behaviour").select_option("refuse")
    page.get_by_role("button", name="Test connection").click()
    result = page.locator("#test-result")
    expect(result).to_contain_text("SB003")
    expect(result).to_contain_text("Not reachable. The server's log has the reason.")
    page.get_by_label("Pool size").fill("0")
    page.get_by_role("button", name="Test connection").click()
    expect(result).to_contain_text("SB002")
    expect(page.get_by_text("greater than or equal to 1")).to_be_visible()


def test_with_another_address_the_stored_key_is_asked_for_again(page: Page) -> None:
    stored = {"api_key": "e2b_0123456789abcdef", "api_url": "https://e2b.example"}
    row = save_config("e2b", stored)
    page.goto(f"{LIST}{row.pk}/change/")
    page.get_by_label("API address").fill("https://evil.example")
    page.get_by_label("Certificate authority").fill(Authority().pem)
    page.get_by_label("Public key pins").fill("no pin")
    page.get_by_label("Domain").click()
    expect(page.get_by_text("'no' is not a SHA-256 in base64")).to_be_visible()
    page.get_by_label("Public key pins").fill("")
    page.get_by_label("Domain").click()
    asked = page.get_by_text("Enter it again, because API address, Certificate authority changed")
    expect(asked).to_be_visible()
    keep_picture(page, "provider-address-changed", whole=True)
    page.get_by_role("button", name="Test connection").click()
    expect(page.locator("#test-result")).to_contain_text("SB002")
    page.get_by_role("button", name="Save", exact=True).click()
    expect(asked).to_be_visible()
    page.get_by_label("API Key").fill("e2b_another-key-0123")
    page.get_by_role("button", name="Save", exact=True).click()
    expect(page.get_by_text("was changed successfully")).to_be_visible()
    saved = ProviderConfig.objects.get().config
    assert saved["api_url"] == "https://evil.example"
    assert saved["ca_certificates"].startswith("-----BEGIN CERTIFICATE-----")
    page.goto(f"/admin/providers/configversion/{ConfigVersion.objects.latest('pk').pk}/change/")
    keep_picture(page, "version-with-authority", whole=True)


def test_the_list_shows_health_and_who_is_active(page: Page) -> None:
    require("bwrap")
    save_config("local", {"launcher": "bubblewrap", "pool_size": 1})
    save_config("probe", GOOD | {"behaviour": "refuse"})
    assert check_all() == 1
    assert ProviderHealth.objects.get(provider_id="probe").code == "SB003"
    page.goto(LIST)
    expect(page.get_by_text("Healthy", exact=True)).to_be_visible()
    expect(page.get_by_text("SB003 Unhealthy")).to_be_visible()
    page.get_by_role("row", name=re.compile("Local")).get_by_role("checkbox").check()
    page.locator("select[name=action]").select_option("activate_selected")
    page.get_by_role("button", name="Run the selected action").or_(
        page.locator("button[name=index]")
    ).first.click()
    expect(page.get_by_text("Local is now the active provider.")).to_be_visible()
    expect(page.get_by_text("Active", exact=True)).to_be_visible()
    keep_picture(page, "providers")


def test_versions_are_compared_and_restored(page: Page) -> None:
    save_config("probe", GOOD | {"size": 1}, author="user:ann", reason="Small.")
    save_config("probe", GOOD | {"size": 2, "token": "tok-9876543210-1234"}, author="user:ben")
    page.goto("/admin/providers/configversion/")
    expect(page.get_by_text("Token changed, ends in 1234")).to_be_visible()
    keep_picture(page, "history")
    page.get_by_role("link", name="Probe 1").click()
    expect(page.get_by_text("user:ann")).to_be_visible()
    page.goto(f"/admin/providers/configversion/{ConfigVersion.objects.get(version=2).pk}/change/")
    page.get_by_role("link", name="Version 1").click()
    expect(page.locator("table.diff")).to_contain_text("Pool size")
    assert TOKEN not in page.content()
    keep_picture(page, "compare")
    page.get_by_role("link", name="version 1", exact=True).click()
    page.get_by_label("Reason", exact=True).fill("Smaller was better.")
    page.get_by_role("button", name="Restore version 1").click()
    expect(page.get_by_text("was restored")).to_be_visible()
    keep_picture(page, "version", whole=True)
    assert ProviderConfig.objects.get().config["size"] == 1
    assert ConfigVersion.objects.get(version=3).reason == "Smaller was better."


def test_a_second_administrator_approves(page: Page, other_page: Page, settings: Any) -> None:
    settings.TWO_PERSON_RULE = True
    second = other_page
    # An account that is younger than a change does not approve it.
    sign_in_quickly(second, "ben")
    save_config("probe", GOOD)
    row = ProviderConfig.objects.get()
    page.goto(f"{LIST}{row.pk}/change/")
    page.get_by_label("Pool size").fill("77")
    page.get_by_label("Reason").fill("Busy season.")
    page.get_by_role("button", name="Save", exact=True).click()
    expect(page.get_by_text("submitted for approval")).to_be_visible()
    change = PendingChange.objects.get()
    pending = f"/admin/providers/pendingchange/{change.pk}/change/"
    page.goto(pending)
    expect(page.get_by_text("Another administrator must approve it")).to_be_visible()
    expect(page.get_by_role("button", name="Approve")).to_have_count(0)

    second.goto(pending)
    expect(second.locator("table.diff")).to_contain_text("77")
    keep_picture(second, "pending-change")
    second.get_by_role("button", name="Approve").click()
    expect(second.get_by_text("Approved: Save Probe.")).to_be_visible()
    assert ProviderConfig.objects.get().config["size"] == 77


def test_light_and_dark_narrow_and_wide(page: Page) -> None:
    row = save_config("local", {"pool_size": 2})
    page.goto(f"{LIST}{row.pk}/change/")
    page.keyboard.press("Control+e")
    page.keyboard.press("Control+e")
    html = page.locator("html")
    if "dark" not in (html.get_attribute("class") or ""):
        page.keyboard.press("Control+e")
    expect(html).to_have_class(re.compile("dark"))
    keep_picture(page, "provider-dark")
    page.set_viewport_size({"width": 390, "height": 844})
    page.goto(f"{LIST}{row.pk}/change/")
    overflow = page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
    keep_picture(page, "provider-phone")
    assert overflow <= 0
