"""The auditor's pages as a person sees them, in Chromium.

SCREENSHOTS=folder keeps a picture of each page.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from executions.runs.models import Execution
from providers.manager import manager
from providers.models import ConfigVersion
from providers.services import activate as switch_to
from providers.services import save_config
from tests.conftest import Caller
from tests.support.browser import keep_picture
from tests.support.execution_rows import LIST, make_rows
from tests.support.running import LOCAL, activate, run

PLOT = """
import os, struct, sys, zlib

def chunk(kind, data):
    return struct.pack('>I', len(data)) + kind + data + struct.pack('>I', zlib.crc32(kind + data))

def main(width, height):
    rows = b''.join(
        b'\\0' + b''.join(bytes((x * 2 % 256, y * 3 % 256, 160)) for x in range(width))
        for y in range(height)
    )
    os.makedirs('artifacts', exist_ok=True)
    with open('artifacts/plot.png', 'wb') as file:
        file.write(b'\\x89PNG\\r\\n\\x1a\\n')
        file.write(chunk(b'IHDR', struct.pack('>IIBBBBB', width, height, 8, 2, 0, 0, 0)))
        file.write(chunk(b'IDAT', zlib.compress(rows)) + chunk(b'IEND', b''))
    print('drawn', width, 'by', height, 'in', os.getpid())
    print('\\x1b[31mred\\x1b[0m and a bidi override: \\u202etxt.exe')
    print('<script>document.title = "owned"</script>', file=sys.stderr)
    return {'pixels': width * height}
"""


@pytest.fixture
def drawn(caller: Caller) -> Execution:
    activate("local", LOCAL)
    answer = run(caller, PLOT, arguments={"width": 120, "height": 60})
    assert answer.json()["status"] == "succeeded", answer.content
    return Execution.objects.get()


def test_an_auditor_reads_an_execution(page: Page, drawn: Execution) -> None:
    messages: list[str] = []
    page.on("console", lambda message: messages.append(message.text))
    page.goto(f"/admin/executions/execution/{drawn.pk}/change/")

    content = page.locator("#content")
    expect(content).to_contain_text("valid, entry")
    expect(content).to_contain_text(
        "[U+001B][31mred[U+001B][0m and a bidi override: [U+202E]txt.exe"
    )
    expect(content).to_contain_text('<script>document.title = "owned"</script>')
    expect(page).not_to_have_title(re.compile("owned"))
    picture = page.get_by_role("img", name="plot.png")
    picture.scroll_into_view_if_needed()
    expect(picture).to_have_js_property("naturalWidth", 120)
    expect(page.locator("svg.timeline rect")).to_have_count(5)
    assert not [text for text in messages if "Content Security" in text or "Error" in text]
    page.evaluate("scrollTo(0, 0)")
    keep_picture(page, "execution-hostile")


REPORT = """
import csv, sys, time
from pathlib import Path

ROWS = [(f"2026-{month:02}", 18_000 + 2_150 * month, 11_000 + 1_400 * month) for month in range(1, 13)]


def main(quarter):
    folder = Path("artifacts")
    folder.mkdir(exist_ok=True)
    with open(folder / "revenue.csv", "w") as file:
        csv.writer(file).writerows([("month", "revenue", "cost"), *ROWS])
    for month, revenue, cost in ROWS[3 * quarter - 3 : 3 * quarter]:
        print(f"{month}  {revenue:>8,}  {cost:>8,}", flush=True)
        time.sleep(0.05)
        if cost > 0.62 * revenue:
            print(f"{month}: cost is above 62 % of revenue", file=sys.stderr, flush=True)
            time.sleep(0.05)
    forecast = ROWS[12]
    return {"forecast": forecast}
""".strip()


def test_a_failed_run_says_why_first_and_its_code_can_be_linked_to_and_copied(
    page: Page, caller: Caller, complaints: list[str]
) -> None:
    row = save_config("local", LOCAL)
    switch_to("local")
    # What another test has loaded goes; the next one who asks waits for what is active.
    manager.close()
    answer = run(caller, REPORT, arguments={"quarter": 2}, agent="reporter")
    assert answer.json()["status"] == "failed", answer.content
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.goto(f"/admin/executions/execution/{answer.json()['id']}/change/#L18")

    expect(page.locator(".run-error")).to_have_text("IndexError: list index out of range")
    expect(page.locator(".run-status")).to_have_text("Failed")
    links = page.locator(".run-facts")
    version = ConfigVersion.objects.get(subject="local", version=row.version)
    for name, path in (
        ("wonderland", f"executions/tenant/{caller.tenant.pk}"),
        ("local", f"providers/providerconfig/{row.pk}"),
        ("bubblewrap", f"providers/configversion/{version.pk}"),
    ):
        link = links.get_by_role("link", name=name)
        expect(link).to_have_attribute("href", f"/admin/{path}/change/")
    line = page.locator("#L18")
    expect(line).to_contain_text("forecast = ROWS[12]")
    expect(line).to_be_in_viewport()
    plain = page.locator("#L1").evaluate("line => getComputedStyle(line).backgroundColor")
    expect(line).not_to_have_css("background-color", plain)
    expect(page.get_by_role("region", name="Output").locator(".from-stderr")).to_have_count(3)
    preview = page.get_by_role("region", name="The beginning of revenue.csv").get_by_role("table")
    expect(preview).to_contain_text("2026-02")
    page.evaluate("scrollTo(0, 0)")
    keep_picture(page, "execution")

    page.get_by_role("button", name="Copy Code").click()
    expect(page.get_by_text("Copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == REPORT
    page.get_by_role("button", name="Copy the id").click()
    assert page.evaluate("navigator.clipboard.readText()") == answer.json()["id"]
    wrap = page.get_by_role("button", name="Wrap the lines of Code")
    code = page.get_by_role("region", name="Code")
    is_wide = "code => code.scrollWidth > code.clientWidth"
    assert code.evaluate(is_wide)
    wrap.click()
    expect(wrap).to_have_attribute("aria-pressed", "true")
    assert not code.evaluate(is_wide)

    page.set_viewport_size({"width": 390, "height": 860})
    assert page.evaluate("document.documentElement.scrollWidth - window.innerWidth") <= 0
    page.evaluate("scrollTo(0, 0)")
    for wide in page.locator(".run .wide").all():
        assert wide.evaluate("box => box.scrollWidth <= box.clientWidth"), wide.inner_text()
    page.evaluate("document.documentElement.classList.add('dark')")
    keep_picture(page, "execution-phone")
    assert complaints == []


def test_an_auditor_replays_an_execution(page: Page, drawn: Execution) -> None:
    page.goto(f"/admin/executions/execution/{drawn.pk}/change/")
    page.get_by_role("link", name="Replay").click()
    page.get_by_role("button", name="Replay").click()

    outcomes = page.locator("table.outcomes")
    expect(outcomes).to_be_visible()
    expect(outcomes.locator("tbody").first).to_have_class("same")
    expect(outcomes.locator("tbody").first).to_contain_text("status")
    expect(outcomes.locator("tbody", has_text="artifacts")).to_have_class("same")
    expect(outcomes).to_contain_text("plot.png")
    keep_picture(page, "replay")
    assert Execution.objects.filter(replay_of=drawn).count() == 1


def test_an_auditor_exports_what_the_list_shows(
    page: Page, drawn: Execution, tmp_path: Any
) -> None:
    page.goto("/admin/executions/execution/?status__exact=succeeded")
    with page.expect_download() as download:
        page.get_by_role("link", name="Export CSV").click()
    saved = tmp_path / "export.csv"
    download.value.save_as(saved)
    assert str(drawn.pk) in saved.read_text()
    keep_picture(page, "executions")


def test_a_list_fits_the_screen_and_leaves_out_on_a_phone_what_is_empty(
    page: Page, complaints: list[str]
) -> None:
    rows = make_rows(2, provider="e2b", isolation="microvm", runtime="firecracker", total_ms=1234.0)
    waiting = make_rows(1, status="queued", finished_at=None)[0]
    page.goto(LIST)
    table = page.locator("#result_list")
    assert table.evaluate("table => table.scrollWidth <= table.parentElement.clientWidth")
    expect(table).to_contain_text("1.23 s")
    expect(page.get_by_role("row").filter(has_text=str(waiting.pk))).to_contain_text("-")

    page.set_viewport_size({"width": 390, "height": 860})
    assert page.evaluate("document.documentElement.scrollWidth - window.innerWidth") <= 0
    line = page.get_by_role("row").filter(has_text=str(waiting.pk))
    expect(line.locator(".nothing").first).to_be_hidden()
    expect(page.get_by_role("row").filter(has_text=str(rows[0].pk))).to_contain_text("microvm")
    cut = "cells => cells.filter(cell => cell.scrollWidth > cell.clientWidth + 1).length"
    assert page.locator("#result_list td, #result_list th").evaluate_all(cut) == 0
    keep_picture(page, "executions-phone")

    # The keyboard opens the menu there, too.
    menu = page.get_by_role("button", name="Menu").locator("visible=true")
    menu.focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("link", name="Playground")).to_be_in_viewport()
    assert complaints == []


def test_an_auditor_reads_the_ledger(page: Page, drawn: Execution) -> None:
    page.goto("/admin/executions/ledgerentry/")
    row = page.locator("#result_list tbody tr", has_text=str(drawn.pk))
    row.get_by_role("link").first.click()
    content = page.locator("#content")
    expect(content).to_contain_text('"kind": "execution"')
    expect(content).to_contain_text(str(drawn.code_hash))
    keep_picture(page, "ledger")
