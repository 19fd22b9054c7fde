"""Saved files and snapshots as a person sees them, in Chromium. SCREENSHOTS=folder keeps pictures."""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from executions.kernel import background
from executions.sessions import capacity
from executions.sessions.models import Session
from tests.admin.browser.plots import plot
from tests.conftest import Caller
from tests.support.browser import look_on_every_screen
from tests.support.session_files import put
from tests.support.sessions import cell, opened
from tests.support.snapshots import taken

FOLDERS = (
    "import os; os.makedirs('results/plots'); open('notes.txt', 'w').write('mean 7.25\\n' * 9)"
)


@pytest.fixture
def slept(kept_here: None, caller: Caller, tmp_path: Path, settings: Any) -> Session:
    settings.DATA_DIR = tmp_path
    session = opened(caller, name="quarterly figures")
    assert cell(caller, session, FOLDERS).json()["status"] == "succeeded"
    put(caller, session, "results/plots/sales.png", base64.b64decode(plot()))
    wide = ",".join(f"column_{number}" for number in range(12))
    rows = "\n".join(",".join(str(n * m) for m in range(12)) for n in range(8))
    put(caller, session, "results/table.csv", f"{wide}\n{rows}\n".encode())
    put(
        caller,
        session,
        "a" * 200 + ".html",
        b'<script>document.title = "owned"</script>' + b"=" * 500,
    )
    taken(caller, session, name="before the merger")
    assert background.wait_for_keyed_work()
    assert capacity.suspend(Session.objects.get().pk, "a test")
    return Session.objects.get()


def test_saved_files_are_read_on_any_screen(
    page: Page, slept: Session, complaints: list[str]
) -> None:
    page.goto(f"/admin/executions/session/{slept.pk}/change/")
    page.get_by_role("link", name="Saved files").click()
    expect(page.locator(".session-now")).to_contain_text("notes.txt")
    look_on_every_screen(page, "saved-root")
    page.get_by_role("link", name="notes.txt").click()
    expect(page.locator("pre.record")).to_contain_text("mean 7.25")
    look_on_every_screen(page, "saved-text")
    page.get_by_role("link", name="Folder").click()
    page.get_by_role("link", name="results", exact=True).click()
    page.get_by_role("link", name="results/table.csv").click()
    expect(page.get_by_role("columnheader", name="column_11")).to_be_attached()
    look_on_every_screen(page, "saved-table")
    page.get_by_role("link", name="Folder").click()
    page.get_by_role("link", name="results/plots").click()
    page.get_by_role("link", name="sales.png").click()
    picture = page.get_by_role("img", name="The picture in this file")
    expect(picture).to_have_js_property("naturalWidth", 240)
    look_on_every_screen(page, "saved-picture")
    page.goto(f"/admin/executions/session/{slept.pk}/saved")
    page.get_by_role("link", name=re.compile("a{20}")).click()
    expect(page.locator("pre.record")).to_contain_text("<script>document.title")
    assert "owned" not in page.title()
    look_on_every_screen(page, "saved-hostile")
    page.goto("/admin/executions/snapshot/")
    expect(page.locator("#content")).to_contain_text("before the merger")
    look_on_every_screen(page, "snapshots", is_list=True)
    page.locator("#result_list th a").first.click()
    look_on_every_screen(page, "snapshot")
    page.get_by_role("link", name="Saved files").click()
    expect(page.locator(".session-now")).to_contain_text("notes.txt")
    page.goto(f"/admin/executions/tenant/{slept.tenant_id}/change/")
    expect(page.locator("#content")).to_contain_text("Tenant storage files")
    look_on_every_screen(page, "tenant", is_list=True)
    assert not complaints
