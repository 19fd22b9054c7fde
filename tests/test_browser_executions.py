"""The auditor's pages as a person sees them, in Chromium.

SCREENSHOTS=folder keeps a picture of each page.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from executions.models import Execution
from tests.browser import browser, caller, complaints, keep_picture, page
from tests.conftest import Caller
from tests.running import LOCAL, activate, run

__all__ = ["browser", "caller", "complaints", "page"]

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
    expect(page.locator("svg.timeline rect")).to_have_count(3)
    assert not [text for text in messages if "Content Security" in text or "Error" in text]
    page.evaluate("scrollTo(0, 0)")
    keep_picture(page, "execution")


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


def test_an_auditor_reads_the_ledger(page: Page, drawn: Execution) -> None:
    page.goto("/admin/executions/ledgerentry/")
    row = page.locator("#result_list tbody tr", has_text=str(drawn.pk))
    row.get_by_role("link").first.click()
    content = page.locator("#content")
    expect(content).to_contain_text('"kind": "execution"')
    expect(content).to_contain_text(str(drawn.code_hash))
    keep_picture(page, "ledger")
