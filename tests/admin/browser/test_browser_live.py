"""An execution's page of a running service while the run goes on, in Chromium."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone
from playwright.sync_api import Browser, Page, expect

from tests.support.browser import keep_picture, sign_in
from tests.support.raw_http import ask
from tests.support.site import EXECUTIONS, Site

HOSTILE = "<img src=x onerror=alert(1)> \\x1b[2J a\\u202eb"
PRINTS = f"""
import sys, time
print("first", flush=True)
print("{HOSTILE}", file=sys.stderr, flush=True)
print("x" * 5000 + "END", flush=True)
"""
GOES_ON = f"{PRINTS}time.sleep(120)"
FLOODS = f"{PRINTS}print(('y' * 99 + chr(10)) * 1500 + 'last line', flush=True); time.sleep(120)"


@pytest.fixture(scope="module")
def operator(browser: Browser, streaming_site: Site) -> Iterator[Page]:
    lines = (streaming_site.data_dir / "credentials.txt").read_text().splitlines()
    found = dict(line.split("=", 1) for line in lines if "=" in line)
    context = browser.new_context(
        base_url=streaming_site.service.url, viewport={"width": 1280, "height": 860}
    )
    page = context.new_page()
    sign_in(page, found["ADMIN_USER"], found["ADMIN_PASSWORD"])
    yield page
    context.close()


@pytest.fixture
def complained(operator: Page) -> Iterator[list[str]]:
    found: list[str] = []

    def note(said: Any) -> None:
        if said.type in ("error", "warning"):
            found.append(said.text)

    operator.on("console", note)
    yield found
    operator.remove_listener("console", note)


def queued(site: Site, code: str, seconds: float = 0) -> str:
    """Where its page is. It is not begun before so many seconds."""
    body = {"code": code, "mode": "async", "timeout": 200}
    if seconds:
        body["run_at"] = (timezone.now() + timedelta(seconds=seconds)).isoformat()
    answer = ask(site.service, "POST", EXECUTIONS, body, key=site.alice)
    assert answer.status == 202, answer.body
    return f"/admin/executions/execution/{answer.json['id']}/change/"


def test_what_a_run_puts_out_appears_and_the_run_is_cancelled(
    operator: Page, streaming_site: Site, complained: list[str]
) -> None:
    operator.goto(queued(streaming_site, GOES_ON, seconds=10))
    expect(operator.get_by_text("Scheduled for").first).to_be_visible()
    expect(operator.locator("#run")).not_to_contain_text("Receipt")
    status = operator.locator(".run-status")
    live = operator.get_by_role("region", name="Output, live")

    expect(live).to_contain_text("stdout: first")
    expect(live.locator(".from-stderr")).to_contain_text(
        "<img src=x onerror=alert(1)> [U+001B][2J a[U+202E]b"
    )
    # A line is cut where it is too long to be drawn.
    expect(live).to_contain_text("x" * 2000 + "…")
    expect(live).not_to_contain_text("END")
    expect(status).to_have_text("Running")
    expect(operator.locator("#run-said")).to_contain_text("Running")
    expect(operator.locator(".run-took")).to_have_text(re.compile(r"^\d+ s$"))
    expect(operator.locator(".run-facts")).to_contain_text("Provider")
    expect(operator.locator(".run-facts")).to_contain_text("Runtime")
    keep_picture(operator, "execution-live")

    operator.locator("summary", has_text="Cancel").click()
    operator.get_by_role("button", name="Cancel this execution").click()
    expect(status).to_have_text("Cancelled")
    expect(operator.locator("summary", has_text="Cancel")).to_have_count(0)
    expect(operator.locator("#run")).to_contain_text("Cancelled by")
    assert complained == []


def test_a_page_takes_what_came_while_it_was_hidden_and_shows_the_end_without_a_reload(
    operator: Page, streaming_site: Site, complained: list[str]
) -> None:
    address = queued(streaming_site, FLOODS)
    operator.goto(address)
    operator.evaluate("window.isTheSamePage = true")
    hide(operator, True)
    operator.locator("#run-id").focus()
    hide(operator, False)

    live = operator.get_by_role("region", name="Output, live")
    expect(live).to_contain_text("last line")
    assert live.evaluate("live => live.textContent.length") < 101_000
    expect(operator.get_by_text("What came before is not shown now.")).to_be_visible()

    path = f"{EXECUTIONS}/{address.split('/')[4]}/cancel"
    assert ask(streaming_site.service, "POST", path, {}, key=streaming_site.alice).status == 200
    expect(operator.locator(".run-status")).to_have_text("Cancelled")
    expect(operator.locator("#run-said")).to_have_text(re.compile("^Cancelled, "))
    expect(operator.locator("#run")).to_contain_text("valid, entry")
    assert operator.evaluate("window.isTheSamePage") is True
    assert operator.locator("[data-follow]").count() == 0
    assert complained == []


def hide(page: Page, is_hidden: bool) -> None:
    page.evaluate(
        "hidden => {"
        " Object.defineProperty(document, 'hidden', {value: hidden, configurable: true});"
        " document.dispatchEvent(new Event('visibilitychange')); }",
        is_hidden,
    )
