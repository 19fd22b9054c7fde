"""A session's page as a person sees it, in Chromium. SCREENSHOTS=folder keeps pictures of it."""

from __future__ import annotations

import json

import pytest
from playwright.sync_api import Page, expect

from executions.runs.models import Execution
from executions.sessions.models import Session
from tests.admin.browser.plots import plot
from tests.conftest import Caller
from tests.support.browser import look_on_every_screen
from tests.support.sessions import cell, opened

WIDE = "print('=' * 400)\nprint('a bidi override: \\u202etxt.exe')"
HOSTILE = "print('<script>document.title = \"owned\"</script>')"


@pytest.fixture
def talked(kept_here: None, caller: Caller) -> Session:
    session = opened(caller, name="quarterly figures")
    code = "import statistics\n\nsales = [3, 5, 8, 13]\nprint('mean', statistics.mean(sales))"
    cell(caller, session, code)
    shown = cell(caller, session, "sales.append(21)\nprint(sum(sales))").json()
    Execution.objects.filter(pk=shown["id"]).update(
        outputs=json.dumps(
            [{"image/png": plot()}, {"text/html": '<script>document.title = "owned"</script>'}]
        )
    )
    cell(caller, session, "sales['north']")
    cell(caller, session, f"{WIDE}\n{HOSTILE}")
    return Session.objects.get()


def test_a_session_reads_like_a_notebook(
    page: Page, talked: Session, complaints: list[str]
) -> None:
    page.goto(f"/admin/executions/session/{talked.pk}/change/")
    cells = page.locator("article.cell")
    expect(cells).to_have_count(4)
    expect(cells.nth(0)).to_contain_text("mean 7.25")
    expect(cells.nth(2)).to_contain_text("TypeError")
    expect(cells.nth(3)).to_contain_text('<script>document.title = "owned"</script>')
    expect(cells.nth(3)).to_contain_text("[U+202E]txt.exe")
    picture = cells.nth(1).get_by_role("img", name="output 1")
    picture.scroll_into_view_if_needed()
    expect(picture).to_have_js_property("naturalWidth", 240)
    assert "owned" not in page.title()
    look_on_every_screen(page, "session")
    page.goto("/admin/executions/session/")
    expect(page.locator("#content")).to_contain_text("quarterly figures")
    look_on_every_screen(page, "sessions", is_list=True)
    for name in ("now", "files"):
        page.goto(f"/admin/executions/session/{talked.pk}/{name}")
        expect(page.locator(".session-now")).to_contain_text(
            "Reported by the sandbox, not verified."
        )
        look_on_every_screen(page, f"session-{name}")
    assert not complaints


def test_an_operator_closes_a_session_from_its_page(page: Page, talked: Session) -> None:
    page.goto(f"/admin/executions/session/{talked.pk}/change/")
    page.get_by_role("button", name="Extend").click()
    expect(page.locator(".session-actions")).to_be_visible()
    page.get_by_role("button", name="Close session").click()
    expect(page.locator(".session-actions")).to_have_count(0)
    expect(page.locator("#content")).to_contain_text("by user:admin")
    talked.refresh_from_db()
    assert talked.state == "closed"
