"""Threads of agents as a person sees them, in Chromium. SCREENSHOTS=folder keeps pictures."""

from __future__ import annotations

import tomllib
from decimal import Decimal

import pytest
from django.utils import timezone
from playwright.sync_api import Page, expect

from executions.doors.claude.tools import FILES_CONTEXT, prepare
from executions.doors.codex.connection import admit
from executions.runs.models import Approval, Artifact, Execution
from executions.tenants.keys import create_api_key
from tests.conftest import Caller
from tests.support.agent_threads import THREADS, call, session_of
from tests.support.browser import look_on_every_screen

HOSTILE = "<script>document.title = 'owned'</script>"


def attempt(host: str, outcome: str) -> dict[str, object]:
    return {"at": 1.7e9, "host": host, "port": 443, "outcome": outcome}


@pytest.fixture
def last(caller: Caller) -> Execution:
    """The last call of a thread of an agent."""
    tenant, session = caller.tenant, session_of(caller.tenant)
    thread = "019a8c1f-7d3e-7bb1-9c55-0a1b2c3d4e5f"
    for number in range(3):
        call(tenant, f"another {number} {HOSTILE}", agent="claude", session=session)
    ours = {"session": session, "model": "model-7", "total_ms": 84.0, "cost": Decimal("0.00012")}
    call(
        tenant, thread, "pytest -q", **ours, request_id="call_a1", stdout=".....\n5 passed in 0.4s"
    )
    write = prepare("write", {"file_path": "src/report.py", "content": "print(1)\n"}).code
    call(tenant, thread, write, **ours, request_id="call_a2", context=FILES_CONTEXT)
    asked = call(tenant, thread, "git push origin main", **ours, request_id="call_a3")
    Approval.objects.create(
        execution=asked,
        tenant_slug=tenant.slug,
        code_hash="x",
        request_hash="y",
        status="approved",
        decided_by="user:judge",
        decided_at=timezone.now(),
    )
    one = call(
        tenant,
        thread,
        f"curl -sS https://files.example/data.csv | head\n# {HOSTILE}\n" + "x" * 600,
        **ours,
        request_id=f"call_a4 {HOSTILE}",
        status="failed",
        exit_code=7,
        stdout=f"{'=' * 300}\n{HOSTILE}",
        stderr="curl: (7) Failed to connect to files.example port 443\n",
        artifact_count=1,
        meta={
            "network": {
                "allowed": 1,
                "refused": 2,
                "attempts": [
                    attempt("pypi.org", "allowed"),
                    attempt("files.example", "refused"),
                    attempt("files.example", "refused"),
                ],
            }
        },
    )
    Artifact.objects.create(execution=one, name="report.html", size_bytes=2048)
    return one


def test_a_thread_is_read_from_the_list_to_the_execution_and_back(
    page: Page, last: Execution, complaints: list[str]
) -> None:
    page.goto("/admin/")
    page.get_by_role("link", name="Threads").click()
    rows = page.locator("#result_list tbody tr")
    expect(rows).to_have_count(4)
    look_on_every_screen(page, "threads", is_list=True)
    rows.nth(0).get_by_role("link").first.click()
    calls = page.locator("article.cell")
    expect(calls).to_have_count(4)
    expect(calls.nth(1)).to_contain_text("write")
    expect(calls.nth(1)).to_contain_text("src/report.py")
    expect(calls.nth(2)).to_contain_text("Approved by user:judge")
    expect(calls.nth(3)).to_contain_text("files.example:443 refused, 2 times")
    expect(calls.nth(3)).to_contain_text(HOSTILE)
    assert "owned" not in page.title()
    look_on_every_screen(page, "thread")
    calls.nth(3).locator("header a").click()
    page.get_by_role("link", name="Thread", exact=True).click()
    expect(page.locator("article.cell")).to_have_count(1)
    page.get_by_role("link", name="Previous").click()
    expect(page.locator("article.cell")).to_have_count(3)
    assert page.url.split("?")[0].endswith(f"{THREADS}{last.pk}/change/")
    assert not complaints


def test_an_agent_is_connected_with_a_key(
    page: Page, caller: Caller, complaints: list[str]
) -> None:
    key = create_api_key(caller.tenant, "laptop", None, "execute sessions files")[0]
    page.goto(f"/admin/executions/apikey/{key.pk}/change/")
    page.get_by_role("link", name="Connect an agent").click()
    expect(page.locator("#claude-block")).to_contain_text("claude mcp add")
    look_on_every_screen(page, "connect")
    page.get_by_label("Folder").fill("/home/ann/project")
    page.get_by_label("Network").fill("packages")
    page.get_by_role("button", name="Show the configuration").click()
    block = page.locator("#codex-block")
    expect(block).to_be_visible()
    (found,) = tomllib.loads(block.inner_text())["environments"]
    path, _, query = found["url"].removeprefix("ws://").partition("/")[2].partition("?")
    meta = {
        "HTTP_AUTHORIZATION": f"Bearer {found['auth_bearer_token']}",
        "QUERY_STRING": query,
    }
    assert admit(f"/{path}", meta).key_id == key.pk
    look_on_every_screen(page, "connect-shown")
    page.get_by_role("button", name="Copy configuration").click()
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    assert not complaints
