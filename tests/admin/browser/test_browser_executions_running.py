"""An execution's page while it runs, when it was cancelled, and as a cell of a session, in Chromium.

SCREENSHOTS=folder keeps a picture of each.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Page, expect

from executions.runs.models import Execution
from tests.conftest import Caller
from tests.support import kept_here
from tests.support.browser import keep_picture, look_on_every_screen
from tests.support.sessions import cell, in_thread, opened, wait_for

SLOW = "import time\nprint('working on it')\nwhile True:\n    time.sleep(0.05)"

pytestmark = pytest.mark.usefixtures("kept_here")


@contextmanager
def running(caller: Caller) -> Iterator[Execution]:
    """A cell that runs until it is cancelled."""
    session = opened(caller, name="quarterly figures")
    thread = in_thread(lambda: cell(caller, session, SLOW, timeout=60))
    (sandbox,) = kept_here.sandboxes()
    wait_for(lambda: sandbox.known["default"][1].busy)
    execution = Execution.objects.get()
    yield execution
    caller.client.post(f"/api/v1/executions/{execution.pk}/cancel")
    thread.join()


def look(page: Page, execution: Execution, name: str) -> None:
    page.goto(f"/admin/executions/execution/{execution.pk}/change/")
    look_on_every_screen(page, f"execution-{name}")


def test_one_that_runs_is_cancelled_on_its_page(
    page: Page, caller: Caller, complaints: list[str]
) -> None:
    with running(caller) as execution:
        look(page, execution, "running")
        page.locator("summary", has_text="Cancel").click()
        keep_picture(page, "execution-cancel")
        page.get_by_role("button", name="Cancel this execution").click()
        expect(page.locator("#content")).to_contain_text("Cancelled by")
        expect(page.locator(".confirm")).to_have_count(0)
        keep_picture(page, "execution-cancelled", whole=True)
    execution.refresh_from_db()
    assert execution.status == "cancelled"
    assert complaints == []


def test_a_cell_says_where_it_ran_and_leads_there(
    page: Page, caller: Caller, complaints: list[str]
) -> None:
    session = opened(caller, name="quarterly figures")
    cell(caller, session, "print('done')")
    look(page, Execution.objects.get(), "cell")
    page.get_by_role("link", name=session["id"]).click()
    expect(page).to_have_title(re.compile(f"{session['id']} .* View session"))
    assert complaints == []
