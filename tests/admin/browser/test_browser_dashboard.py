"""The dashboard and signing in, in Chromium."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from datetime import timedelta

import pytest
from django.utils import timezone
from playwright.sync_api import Page, expect

from executions.capabilities.observability.counters import LATENCY, OUTCOME
from executions.runs.statistics import TENANT, Increment, add
from providers.models import ProviderConfig
from providers.services.health import check_all
from tests.conftest import Caller
from tests.support.browser import keep_picture
from tests.support.running import LOCAL, activate, run


@pytest.fixture(autouse=True)
def _quiet(complaints: list[str]) -> Iterator[None]:
    """No page of this file makes the browser complain."""
    yield
    assert not complaints


def a_day() -> None:
    rng = random.Random(3)
    now = timezone.now().replace(minute=0, second=0, microsecond=0)
    for back in range(24):
        hour = now - timedelta(hours=back)
        total = 0
        for provider in ("local", "self_managed", "e2b"):
            for status, code, most in (
                ("succeeded", "", 300), ("failed", "", 9), ("timed_out", "SB005", 4),
                ("out_of_memory", "SB006", 2), ("error", "SB003", 2),
            ):  # fmt: skip
                number = rng.randrange(1, most)
                total += number
                add([Increment(OUTCOME, provider, hour, f"{status} {code}".rstrip(), number)])
            add(
                Increment(LATENCY, provider, hour, str(bucket), rng.randrange(1, 60 - bucket))
                for bucket in range(22, 55)
            )
        for name, share in (
            ("acme", 0.4),
            ("globex", 0.25),
            ("initech", 0.15),
            ("umbrella", 0.1),
            ("hooli", 0.05),
            ("stark", 0.03),
            ("wayne", 0.02),
        ):
            add([Increment(TENANT, name, hour, "", int(total * share))])


def test_the_front_page_draws_what_happened(page: Page, caller: Caller) -> None:
    activate("local", LOCAL)
    check_all()
    a_day()
    assert run(caller, "print(1)").status_code == 200
    page.goto("/admin/")
    expect(page.get_by_role("img", name="Executions by provider")).to_be_visible()
    expect(
        page.get_by_role("img", name="Executions by tenant").locator("rect").first
    ).to_be_visible()
    pool = page.locator("section", has=page.get_by_role("heading", name="Pool of Local"))
    expect(pool).to_contain_text(re.compile(r"\d+ busy, \d+ idle"))
    expect(page.get_by_role("row", name=re.compile("SB005"))).to_contain_text("Execution timeout")
    fill = page.locator("rect.series-1").first.evaluate("bar => getComputedStyle(bar).fill")
    assert fill != "rgb(0, 0, 0)"
    keep_picture(page, "dashboard", whole=True)
    while "dark" not in (page.locator("html").get_attribute("class") or ""):
        page.keyboard.press("Control+e")
    page.get_by_role("link", name="Last 7d").click()
    expect(page.get_by_role("link", name="Last 7d")).to_have_attribute("aria-current", "true")
    keep_picture(page, "dashboard-dark", whole=True)
    page.set_viewport_size({"width": 390, "height": 844})
    assert page.evaluate("document.documentElement.scrollWidth - window.innerWidth") <= 0
    keep_picture(page, "dashboard-phone")


def test_the_pool_renews_itself_without_a_reload(page: Page, caller: Caller) -> None:
    activate("local", LOCAL)
    page.goto("/admin/")
    # A provider that is still starting is shown as that first.
    expect(page.locator("progress")).to_be_visible(timeout=30_000)
    page.evaluate("document.querySelector('progress').id = 'old'")
    expect(page.locator("#old")).to_have_count(0, timeout=10_000)
    expect(page.locator("progress")).to_be_visible()


def test_an_empty_front_page_says_so(page: Page) -> None:
    ProviderConfig.objects.all().delete()
    page.goto("/admin/")
    expect(page.get_by_text("No provider is configured yet.")).to_be_visible()
    expect(page.get_by_text("SB001")).to_be_visible()
