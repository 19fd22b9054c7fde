"""The playground in Chromium: an editor under the strict policy, a run that is followed to its end.

SCREENSHOTS=folder keeps pictures of it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from playwright.sync_api import Locator, Page, expect

from executions.runs.models import Execution
from executions.sessions.models import Session
from tests.conftest import Caller
from tests.support.browser import keep_picture
from tests.support.playground import PAGE
from tests.support.policies import in_force
from tests.support.running import LOCAL, activate, run_queued
from tests.support.sessions import cell, in_thread, opened

CODE = """import sys


def main(numbers):
    for number in numbers:
        print('the square of', number, 'is', number * number)
    print('<b>no markup</b> \\u202etxt.exe', file=sys.stderr)
    return {'mean': sum(numbers) / len(numbers), 'note': '\\u202e'}
"""
QUICK = "answer = ExecutionResult('', '', 0, 0.0)"
MUCH = """answer = ExecutionResult(
    "", "", 0, 0.0, has_result=True, result="a\\u3164b",
    outputs=[{"text/plain": "z" * 7000 + "\\n" + "word \\u202e\\n" * 700_000}],
)"""
HOSTILE = "# </textarea></script><script>document.title = 'owned'</script>\nprint('again')"


@pytest.fixture
def worker(caller: Caller) -> Iterator[None]:
    """Runs what is queued, as a worker does."""
    over = threading.Event()

    def work() -> None:
        while not over.is_set():
            if run_queued() is None:
                over.wait(0.02)

    thread = in_thread(work)
    yield
    over.set()
    thread.join()


def editor_of(page: Page) -> Locator:
    """Once the editor is there: the plain field, which has its name too, has given way to it."""
    expect(page.locator(".cm-editor")).to_be_visible()
    expect(page.locator("#play-code")).to_be_hidden()
    return page.get_by_role("textbox", name="Code")


def write(page: Page, editor: Locator, code: str) -> None:
    """Put `code` in place of all that is in the editor. Chrome styles what it puts over lines that
    are selected, which the page forbids and complains of: they are deleted before."""
    editor.press("Control+a")
    page.keyboard.press("Delete")
    editor.fill(code)


@pytest.mark.usefixtures("worker")
def test_code_is_typed_run_cancelled_and_shown_as_a_request(
    page: Page, complaints: list[str]
) -> None:
    activate("local", LOCAL)
    page.goto("/admin/")
    page.get_by_role("link", name="Playground").click()
    editor = editor_of(page)
    expect(editor).to_contain_text("Hello from the sandbox")
    write(page, editor, CODE)
    page.get_by_label("Tenant").fill("wonderland")
    arguments = page.get_by_label("Arguments (JSON)")
    arguments.fill("{numbers}")
    page.get_by_role("button", name="Run", exact=True).click()
    expect(page.locator("#error-arguments")).to_contain_text("Must be JSON")
    expect(arguments).to_have_attribute("aria-invalid", "true")

    arguments.fill('{"numbers": [3, 5, 8]}')
    editor.press("Control+Enter")
    told = page.locator("#play-output")
    expect(told).to_contain_text("succeeded")
    expect(told).to_contain_text("the square of 8 is 64")
    expect(told).to_contain_text("<b>no markup</b> [U+202E]txt.exe")
    expect(told).to_contain_text('"note": "[U+202E]"')
    expect(page.locator("#error-arguments")).to_be_empty()
    execution = Execution.objects.get()
    assert (execution.code, execution.subject) == (CODE, "playground by user:admin")
    keep_picture(page, "playground")

    page.get_by_role("button", name="Show as curl, Python, JavaScript").click()
    shown = page.locator("#play-shown")
    expect(shown).to_contain_text("urllib.request")
    expect(shown.get_by_role("button", name="Copy curl")).to_be_visible()
    keep_picture(page, "playground-snippets", whole=True)

    editor.press("Control+a")
    page.keyboard.press("Delete")
    page.keyboard.type("while True: pass")
    arguments.fill("")
    page.get_by_role("button", name="Run", exact=True).click()
    page.get_by_role("button", name="Cancel").click()
    expect(told).to_contain_text("cancelled")
    expect(page.get_by_role("button", name="Run", exact=True)).to_be_enabled()
    told.get_by_role("link", name="Execution").click()
    expect(page.locator("#content")).to_contain_text("Cancelled by")
    # That it was refused once is all that the browser complains of.
    assert [each for each in complaints if "status of 400" not in each] == []


@pytest.mark.usefixtures("policies_forgotten")
def test_a_run_that_waits_for_somebody_does_not_lock_the_playground(
    own_page: Page, caller: Caller, scripted: object, complaints: list[str]
) -> None:
    in_force("wonderland", analysis="ask", calls="print")
    page = own_page
    page.clock.install()
    page.goto(f"{PAGE}?tenant=wonderland")
    editor = editor_of(page)
    button = page.get_by_role("button", name="Run", exact=True)
    told = page.locator("#play-output article")
    write(page, editor, "print('x')")
    button.click()
    expect(told).to_contain_text("It waits until somebody approves it.")
    expect(button).to_be_enabled()

    # Nobody works here, either.
    write(page, editor, QUICK)
    button.click()
    expect(told).not_to_contain_text("It waits")
    expect(button).to_be_disabled()
    page.clock.fast_forward("00:15")
    expect(button).to_be_enabled()

    # What is not followed any more counts no seconds.
    page.route("**/events?*", lambda route: route.fulfill(status=404))
    button.click()
    expect(told).to_contain_text("It cannot be followed any more.")
    expect(button).to_be_enabled()
    counted = told.locator("[data-part=time]").text_content() or ""
    page.clock.fast_forward("00:30")
    expect(told.locator("[data-part=time]")).to_have_text(counted)
    page.unroute("**/events?*")

    # What comes back is spelled out and cut as everywhere.
    write(page, editor, MUCH)
    button.click()
    expect(button).to_be_disabled()
    while run_queued():
        pass
    expect(told).to_contain_text("succeeded")
    expect(button).to_be_enabled()
    expect(told.get_by_role("region", name="Result")).to_have_text('"a[U+3164]b"')
    drawn = told.get_by_role("region", name="Output 1")
    expect(drawn).to_contain_text("word [U+202E]")
    assert drawn.evaluate("drawn => drawn.textContent.length") < 250_000
    expect(told).to_contain_text(
        "1 long line is shortened. 4,807,001 more characters are not shown."
    )
    assert Execution.objects.filter(status="queued").count() == 1
    assert [each for each in complaints if "status of 404" not in each] == []


@pytest.mark.usefixtures("kept_here", "worker")
def test_a_run_is_filled_in_again_and_goes_on_as_a_notebook(
    page: Page, caller: Caller, complaints: list[str]
) -> None:
    execution = cell(caller, opened(caller), HOSTILE).json()["id"]
    page.set_viewport_size({"width": 390, "height": 860})
    page.goto(f"{PAGE}?execution={execution}")
    editor = editor_of(page)
    expect(editor).to_contain_text("</textarea></script>")
    assert "owned" not in page.title()
    expect(page.get_by_label("Tenant")).to_have_value("wonderland")

    page.get_by_role("button", name="Open a session").click()
    # What was typed is not lost on the way.
    expect(page.get_by_text("No executions yet.")).to_be_visible()
    expect(editor).to_contain_text("print('again')")
    editor.press("Control+Enter")
    cells = page.locator("#play-output article")
    expect(cells).to_contain_text("succeeded")
    page.keyboard.type("x = 41")
    editor.press("Control+Enter")
    expect(cells.nth(1)).to_contain_text("It printed nothing.")
    page.keyboard.type("print(x + 1)")
    editor.press("Control+Enter")
    expect(cells.nth(2)).to_contain_text("42")
    page.reload()
    expect(page.locator("#transcript article")).to_have_count(3)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    keep_picture(page, "playground-session", whole=True)
    session = Session.objects.latest("pk")
    assert (session.tenant_slug, session.turns) == ("wonderland", 3)
    # By the keyboard alone there is a way out of the editor.
    editor.focus()
    page.keyboard.press("Escape")
    page.keyboard.press("Tab")
    expect(page.get_by_role("button", name="Run", exact=True)).to_be_focused()
    assert complaints == []
