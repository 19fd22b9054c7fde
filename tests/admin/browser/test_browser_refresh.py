"""The list and the dashboard get on while somebody looks at them, in Chromium."""

from __future__ import annotations

import re
from typing import Any

from django.utils import timezone
from playwright.sync_api import Page, expect

from executions.capabilities.observability.counters import OUTCOME
from executions.runs.models import Execution, hour_of
from executions.runs.statistics import Increment, add
from tests.support.execution_rows import LIST, make_rows

# Coming back to the page looks at once, where the clock would be waited for.
COME_BACK = "document.dispatchEvent(new Event('visibilitychange'))"


def test_the_list_gets_on_without_losing_the_place(page: Page, complaints: list[str]) -> None:
    rows = make_rows(30, provider="e2b")
    asked: list[Any] = []
    page.on("response", lambda answer: asked.append(answer))
    page.goto(f"{LIST}?provider=e2b")
    kept = page.get_by_role("row").filter(has_text=str(rows[5].pk))
    kept.get_by_role("link").first.focus()
    kept.scroll_into_view_if_needed()
    kept.evaluate("row => { row.isTheSame = true; }")
    before = kept.bounding_box()

    new = make_rows(2, provider="e2b") + make_rows(1, provider="local")
    Execution.objects.filter(pk=rows[6].pk).update(status="failed")
    page.evaluate(COME_BACK)

    line = page.get_by_role("row").filter(has_text=str(new[0].pk))
    expect(line).to_have_count(1)
    expect(page.get_by_role("row").filter(has_text=str(rows[6].pk))).to_contain_text("Failed")
    expect(page.get_by_role("row").filter(has_text=str(new[2].pk))).to_have_count(0)
    expect(kept).to_have_js_property("isTheSame", True)
    page.evaluate(
        "() => new Promise(done => { let n = 4; const wait = () => n-- ? "
        "requestAnimationFrame(wait) : done(); wait(); })"
    )
    after = kept.bounding_box()
    assert before is not None
    assert after is not None
    assert abs(before["y"] - after["y"]) <= 2
    focused = page.evaluate("document.activeElement.pathname")
    assert focused == f"{LIST}{rows[5].pk}/change/"

    with page.expect_response(lambda answer: answer.request.headers.get("x-fragment")) as same:
        page.evaluate(COME_BACK)
    assert same.value.status == 304

    # Nobody is asked while nobody looks.
    page.evaluate("Object.defineProperty(document, 'hidden', {value: true, configurable: true})")
    asked.clear()
    page.evaluate(COME_BACK)
    page.evaluate("fetch('/healthz')")
    assert [answer.url for answer in asked if "provider=e2b" in answer.url] == []
    assert complaints == []


def test_the_first_line_of_an_empty_list_appears(page: Page) -> None:
    page.goto(f"{LIST}?provider=e2b")
    row = make_rows(1, provider="e2b")[0]
    page.evaluate(COME_BACK)
    expect(page.get_by_role("row").filter(has_text=str(row.pk))).to_have_count(1)


def test_the_dashboard_gets_on_and_stops_for_who_is_signed_out(
    page: Page, complaints: list[str]
) -> None:
    page.goto("/admin/?range=7d")
    chosen = page.get_by_role("link", name="Last 7d")
    chosen.focus()
    expect(page.get_by_role("heading", name="First steps")).to_be_visible()
    tile = page.locator(".tiles li").filter(has_text="Executions").first
    expect(tile).to_have_text(re.compile(r"Executions\s*0"))
    add([Increment(OUTCOME, "local", hour_of(timezone.now()), "succeeded", 4321)])
    # With so many runs the first steps go, and what follows them moves up.
    make_rows(50)
    page.evaluate(COME_BACK)
    expect(tile).to_contain_text("4,321")
    expect(page.get_by_role("heading", name="First steps")).to_have_count(0)
    expect(chosen).to_be_focused()
    # What renews itself is not put back to its beginning.
    expect(page.get_by_text("Loading…")).to_have_count(0)
    expect(chosen).to_have_attribute("aria-current", "true")

    page.context.clear_cookies()
    with page.expect_response(re.compile("/admin/login/")):
        page.evaluate(COME_BACK)
    expect(tile).to_contain_text("4,321")
    assert complaints == []
