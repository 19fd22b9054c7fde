"""The admin as a person sees it, in Chromium, over the real provider.

SCREENSHOTS=folder keeps a picture of each page.
"""

from __future__ import annotations

import re

from playwright.sync_api import Page, expect

from executions.runs.models import Execution
from providers.models import ProviderConfig
from tests.conftest import Caller
from tests.support.browser import keep_picture
from tests.support.running import LOCAL, activate, run

HOSTILE = "<script>document.title='owned'</script> <b>bold</b>"


def test_an_admin_changes_the_provider_and_the_change_is_stored(page: Page) -> None:
    activate("local", LOCAL)
    page.goto("/admin/providers/providerconfig/")
    page.get_by_role("link", name=re.compile("local", re.I)).first.click()
    size = page.get_by_label(re.compile("Idle sandboxes"))
    expect(size).to_have_value("2")
    keep_picture(page, "provider")
    size.fill("3")
    page.get_by_label(re.compile("Memory per sandbox")).select_option("512m")
    page.get_by_role("button", name="Save", exact=True).click()
    expect(page.get_by_text("changed successfully")).to_be_visible()
    stored = ProviderConfig.objects.get(provider_id="local")
    assert (stored.config["pool_size"], stored.config["max_memory"]) == (3, "512m")


def test_a_value_out_of_range_is_explained_at_its_field_and_not_stored(page: Page) -> None:
    activate("local", LOCAL)
    page.goto("/admin/providers/providerconfig/")
    page.get_by_role("link", name=re.compile("local", re.I)).first.click()
    size = page.get_by_label(re.compile("Idle sandboxes"))
    # The browser's own check would keep the form from being sent at all.
    page.locator("form").evaluate_all("forms => forms.forEach(form => form.noValidate = true)")
    size.fill("1000")
    page.get_by_role("button", name="Save", exact=True).click()
    expect(page.get_by_text("less than or equal to 32").first).to_be_visible()
    assert ProviderConfig.objects.get(provider_id="local").config["pool_size"] == 2


def test_an_execution_is_found_and_its_output_is_shown_harmless(page: Page, caller: Caller) -> None:
    activate("local", LOCAL)
    answer = run(caller, f"print({HOSTILE!r})\nraise ValueError('the end')")
    assert answer.status_code == 200, answer.content
    page.goto("/admin/executions/execution/")
    keep_picture(page, "executions")
    page.locator("#result_list tbody tr").first.get_by_role("link").first.click()
    expect(page.locator("#content")).to_contain_text(HOSTILE)
    expect(page.locator("#content")).to_contain_text("ValueError: the end")
    expect(page).not_to_have_title(re.compile("owned"))
    expect(page.get_by_role("button", name="Save")).to_have_count(0)
    keep_picture(page, "execution")
    assert Execution.objects.get().status == Execution.Status.FAILED


def test_the_api_page_lists_the_endpoints_without_help_from_outside(
    page: Page, live_server: object
) -> None:
    elsewhere: list[str] = []
    page.on("request", lambda request: elsewhere.append(request.url))
    page.goto("/api/docs")
    expect(page.get_by_text("/api/v1/executions", exact=True).first).to_be_visible()
    keep_picture(page, "api")
    assert not [url for url in elsewhere if not url.startswith((str(live_server), "data:"))]
