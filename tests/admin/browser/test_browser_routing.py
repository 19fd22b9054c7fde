"""Routes, breakers, prices, budgets and what was spent, as a person sees them, in Chromium.

SCREENSHOTS=folder keeps a picture of each page.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Page, expect

from executions.capabilities.spending.models import Budget, SpendingAlert
from providers.errors import ConnectionFailed
from providers.models import CircuitBreaker, ProviderConfig, ProviderPrice, Route
from providers.services import breaker, save_config
from tests.conftest import Caller
from tests.support.browser import keep_picture, open_group
from tests.support.running import LOCAL, run


@pytest.fixture(autouse=True)
def _quiet(complaints: list[str]) -> Iterator[None]:
    yield
    assert not complaints


def test_a_tenant_is_given_a_floor_and_the_record_says_what_it_had(
    page: Page, caller: Caller
) -> None:
    save_config("local", LOCAL)
    Route.objects.create().steps.create(provider=ProviderConfig.objects.defer("config").get())
    answer = run(caller, "print(1)").json()
    page.goto(f"/admin/executions/tenant/{caller.tenant.pk}/change/")
    page.get_by_label("Minimum isolation").select_option("gvisor")
    keep_picture(page, "tenant")
    save(page)
    refused = run(caller, "print(1)").json()
    page.goto(f"/admin/executions/execution/{refused['id']}/change/")
    expect(page.locator("#content")).to_contain_text("minimum_isolation is gvisor")
    page.goto(f"/admin/executions/execution/{answer['id']}/change/")
    expect(page.locator("#content")).to_contain_text("Isolation namespaces")
    expect(page.locator("#content")).to_contain_text("Sandbox sharing execution")
    keep_picture(page, "execution-where")
    page.goto("/admin/executions/execution/")
    expect(page.get_by_role("row").filter(has_text="Succeeded")).to_contain_text("namespaces")
    keep_picture(page, "executions-isolation")


def save(page: Page) -> None:
    page.get_by_role("button", name="Save", exact=True).click()
    expect(page.get_by_text("successfully")).to_be_visible()


def test_a_route_is_made_and_what_ran_on_it_is_compared(page: Page, caller: Caller) -> None:
    save_config("local", LOCAL)
    save_config("e2b", {"api_key": "e2b_0123456789"})
    page.goto("/admin/providers/providerprice/add/")
    page.get_by_label("Provider").select_option("local")
    page.get_by_label("Per second").fill("0.002")
    save(page)
    assert ProviderPrice.objects.get().provider_id == "local"
    page.goto("/admin/providers/route/add/")
    page.get_by_label("Strategy").select_option("priority")
    page.get_by_label("Minimum isolation").select_option("namespaces")
    page.locator("#id_steps-0-provider").select_option(label="local")
    keep_picture(page, "route")
    save(page)
    assert Route.objects.get().minimum_isolation == "namespaces"
    assert [step.provider.provider_id for step in Route.objects.get().steps.all()] == ["local"]

    assert run(caller, "print(1)").json()["provider"] == "local"

    page.get_by_role("link", name="Compare providers").click()
    row = page.get_by_role("row").filter(has_text="local")
    expect(row).to_contain_text("0 (0.0 %)")
    page.get_by_role("link", name="7 days").click()
    expect(page.locator("#content")).to_contain_text("local")
    keep_picture(page, "comparison")
    open_group(page, "Tenants")
    page.get_by_role("link", name="Spending", exact=True).first.click()
    expect(page.get_by_role("row").filter(has_text="wonderland")).to_be_visible()


def test_a_breaker_is_seen_and_put_back_into_service(page: Page) -> None:
    for _ in range(breaker.THRESHOLD):
        breaker.report_failure("e2b", ConnectionFailed("The service does not answer."))
    page.goto("/admin/")
    page.get_by_role("link", name="Circuit breakers").click()
    row = page.get_by_role("row").filter(has_text="e2b")
    expect(row).to_contain_text("Out of service")
    expect(row).to_contain_text("SB003")
    keep_picture(page, "breakers")
    row.get_by_role("link", name="e2b").click()
    page.get_by_role("link", name="Delete").click()
    page.get_by_role("button", name="Yes").click()
    expect(page.get_by_text("successfully")).to_be_visible()
    assert not CircuitBreaker.objects.exists()


def test_a_budget_is_set_and_alerts_are_listed(page: Page) -> None:
    page.goto("/admin/")
    open_group(page, "Tenants")
    page.get_by_role("link", name="Budgets").click()
    page.goto("/admin/executions/budget/add/")
    page.get_by_label("Limit").fill("25")
    save(page)
    assert Budget.objects.get().limit == 25
    SpendingAlert.objects.create(kind="spike", day="2026-01-01", message="Twice the average.")
    page.get_by_role("link", name="Spending alerts").click()
    expect(page.get_by_role("row").filter(has_text="Twice the average.")).to_be_visible()
