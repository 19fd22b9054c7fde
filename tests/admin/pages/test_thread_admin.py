"""Threads of agents in the admin: the list, a transcript, who sees them, and bounds."""

from __future__ import annotations

import html
import re
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
from django.contrib.auth import get_user_model
from django.contrib.auth.models import Permission
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from executions.capabilities.threads import service
from executions.capabilities.threads.admin import MOST_CODE, MOST_HOSTS, MOST_OUTPUT_BYTES
from executions.capabilities.threads.service import CALLS_PER_PAGE, MOST_FILES, sums_of, totals_of
from executions.doors.claude.tools import FILES_CONTEXT, prepare
from executions.doors.codex.http_requests import _PROGRAM, MOST_ANSWER_BYTES
from executions.kernel.text import uuid7
from executions.runs.models import Approval, Artifact, Execution
from executions.sessions.requests import CommandRequest
from executions.tenants.models import Tenant
from executions.tenants.service import AUDITOR, OPERATOR
from tests.conftest import Caller
from tests.support.agent_threads import THREADS, call, list_of, page_of, session_of
from tests.support.execution_rows import make_rows
from tests.support.roles import member

pytestmark = [pytest.mark.django_db, pytest.mark.database]

HOSTILE = "<script>alert(1)</script>\u202e\x1b[2J"
HARMLESS = "&lt;script&gt;alert(1)&lt;/script&gt;[U+202E][U+001B][2J"


def rows_of(page: str) -> list[UUID]:
    """The threads of a list, each by its last call."""
    return [UUID(pk) for pk in re.findall(r"<th[^>]*>.*?/thread/([0-9a-f-]{36})/change/", page)]


def calls_in(page: str) -> list[UUID]:
    return [UUID(pk) for pk in re.findall(r'id="call-([0-9a-f-]{36})"', page)]


def column(page: str, name: str) -> list[str]:
    cells = re.findall(rf'class="[^"]*field-{name}[^"]*"[^>]*>(.*?)</td>', page, re.DOTALL)
    return [" ".join(re.sub(r"<[^>]+>", " ", cell).split()) for cell in cells]


def test_each_thread_is_one_line_the_newest_first(
    alice: Caller, charlie: Caller, auditor: Client
) -> None:
    session = session_of(alice.tenant)
    call(alice.tenant, "first", cost=Decimal("0.01"))
    other = call(charlie.tenant, "first")
    call(alice.tenant, None)
    newest = call(alice.tenant, "second")
    last = call(
        alice.tenant, "first", status="failed", exit_code=1, cost=Decimal("0.02"), session=session
    )
    page = list_of(auditor)
    assert rows_of(page) == [last.pk, newest.pk, other.pk]
    assert column(page, "calls") == ["2", "1", "1"]
    assert column(page, "failed") == ["1", "0", "0"]
    assert column(page, "cost_of") == ["0.0300", "-", "-"]
    assert column(page, "sessions") == ["1", "0", "0"]
    assert "3</b>" in page
    assert rows_of(list_of(auditor, tenant_slug=charlie.tenant.slug)) == [other.pk]
    assert rows_of(list_of(auditor, conversation="second")) == [newest.pk]


def test_the_list_is_filtered_by_agent(alice: Caller, auditor: Client) -> None:
    call(alice.tenant, "a", agent="claude")
    ours = call(alice.tenant, "b", agent="Codex <1>")
    page = list_of(auditor, agent="Codex <1>")
    assert rows_of(page) == [ours.pk]
    assert auditor.get(THREADS, {"code__contains": "x"}).status_code == 400


def test_threads_of_a_removed_tenant_stay_apart(auditor: Client, alice: Caller) -> None:
    gone = [make_rows(1, id=uuid7(), tenant_slug=slug, conversation="c")[0] for slug in "abab"]
    ours = call(alice.tenant, "c")
    assert rows_of(list_of(auditor)) == [ours.pk, gone[3].pk, gone[2].pk]
    assert calls_in(page_of(auditor, gone[0].pk)) == [gone[0].pk, gone[2].pk]


def test_pages_of_the_list_go_by_key(alice: Caller, auditor: Client) -> None:
    rows = [call(alice.tenant, f"t{number}") for number in range(52)]
    again = call(alice.tenant, "t0")
    first = list_of(auditor)
    assert rows_of(first) == [again.pk, *(row.pk for row in rows[:2:-1])]
    following = re.search(r'href="(\?next=[^"]+)"', first)
    assert following is not None
    page = auditor.get(f"{THREADS}{following[1]}").content.decode()
    assert rows_of(page) == [rows[2].pk, rows[1].pk]


def test_the_list_takes_as_many_queries_for_many_calls_and_threads(
    alice: Caller, auditor: Client
) -> None:
    call(alice.tenant, "t0")
    list_of(auditor)
    with CaptureQueriesContext(connection) as few:
        list_of(auditor)
    for number in range(50):
        make_rows(
            20,
            tenant=alice.tenant,
            tenant_slug=alice.tenant.slug,
            conversation=f"t{number}",
            code="x" * 1000,
        )
    with CaptureQueriesContext(connection) as many:
        page = list_of(auditor)
    assert len(rows_of(page)) == 50
    # One more for each piece of rows that is looked through.
    assert len(many) <= len(few) + 6
    assert len(many) <= 16


def test_a_long_thread_hides_no_other_one(
    alice: Caller, auditor: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("providers.admin_lists.SECONDS", 0.0)
    older = call(alice.tenant, "older")
    latest = [call(alice.tenant, "long") for _ in range(250)][-1]
    page = list_of(auditor)
    assert rows_of(page) == [latest.pk]
    assert "200 calls searched; older ones not yet." in page
    further = re.search(r'href="([^"]+)">Search further', page)
    assert further is not None
    page = auditor.get(f"{THREADS}{html.unescape(further[1])}").content.decode()
    assert rows_of(page) == [older.pk]


def test_a_transcript_has_its_calls_in_order(
    alice: Caller, charlie: Caller, auditor: Client
) -> None:
    first = call(alice.tenant, "t", "cat <a", request_id="call_1", total_ms=12.0)
    call(charlie.tenant, "t", "not ours")
    call(alice.tenant, "another", "nor this")
    second = call(
        alice.tenant,
        "t",
        "curl https://a.example",
        request_id="call_2",
        status="failed",
        exit_code=7,
        cost=Decimal("0.5"),
        model="model-7",
        stdout="x" * 5000 + "the end",
        stderr="no route",
        meta={"network": {"refused": 2, "attempts": [attempt("a.example")] * 2}},
    )
    for one in (first, second):
        page = page_of(auditor, one.pk)
        assert calls_in(page) == [first.pk, second.pk]
    for text in ("call_1", "call_2", "cat &lt;a", "12 ms", "exit code 7", "the end", "no route"):
        assert text in page, text
    assert "a.example:443 refused, 2 times" in page
    assert "0 allowed, 2 refused, 0 failed" in page
    assert "model-7" in page
    assert f"/admin/executions/execution/{second.pk}/change/" in page
    for text in ("not ours", "nor this"):
        assert text not in page


def attempt(host: str) -> dict[str, Any]:
    return {"at": 1.7e9, "host": host, "port": 443, "outcome": "refused"}


def test_a_call_says_which_tool_it_was(alice: Caller, auditor: Client) -> None:
    session = session_of(alice.tenant)

    def of_tool(name: str, **given: Any) -> str:
        return prepare(name, given).code

    url = "https://a.example/?q=1&r=<b>"
    sent = CommandRequest(
        command=[
            *("python3", "-c", _PROGRAM, "GET", url),
            *(f"/tmp/codex-{'0' * 32}", str(MOST_ANSWER_BYTES)),
        ]
    )
    for code, context in (
        (of_tool("write", file_path="a.txt", content="INPUT\n<b>"), FILES_CONTEXT),
        (of_tool("grep", pattern="x+", path="src"), FILES_CONTEXT),
        (of_tool("read", file_path="logo.png"), FILES_CONTEXT),
        # What is more than such a call is shown as it is.
        (of_tool("read", file_path="b.txt") + "rm -r /\n", FILES_CONTEXT),
        (sent.text, ""),
        (f"{sent.text} extra", ""),
        ("make test", ""),
    ):
        one = call(alice.tenant, "t", code, session=session, context=context)
    page = " ".join(page_of(auditor, one.pk).split())
    kinds = re.findall(r'cell-turn">([^<]*)</span>(?: <code[^>]*>([^<]*)</code>)?', page)
    assert [(kind, html.unescape(text)) for kind, text in kinds] == [
        ("write", "a.txt"),
        ("grep", "x+ in src"),
        ("read", "logo.png"),
        ("context files", ""),
        ("http/request", f"GET {url}"),
        ("command", ""),
        ("command", ""),
    ]
    assert "Files: a.txt" in page
    assert "make test" in page


def test_a_request_of_codex_is_named_on_the_page_of_its_session(
    alice: Caller, admin_client: Client
) -> None:
    session = session_of(alice.tenant)
    words = ["python3", "-c", _PROGRAM, "GET", "https://a.example", f"/tmp/codex-{'0' * 32}", "9"]
    call(alice.tenant, None, CommandRequest(command=words).text, session=session, turn=1)
    named = call(alice.tenant, "a <b>", session=session, turn=2)
    page = admin_client.get(f"/admin/executions/session/{session.pk}/change/").content.decode()
    assert "http/request GET https://a.example" in page
    assert f'{THREADS}{named.pk}/change/">a &lt;b&gt;</a>' in page


def test_what_is_hostile_is_text_everywhere(alice: Caller, auditor: Client) -> None:
    one = call(
        alice.tenant,
        HOSTILE,
        HOSTILE,
        agent=HOSTILE,
        model=HOSTILE,
        request_id=HOSTILE,
        stdout=HOSTILE,
        stderr=HOSTILE,
        error_message=HOSTILE,
        meta={"network": {"attempts": [attempt(HOSTILE)]}},
        artifact_count=1,
    )
    Artifact.objects.create(execution=one, name=HOSTILE, size_bytes=1)
    for page in (list_of(auditor), page_of(auditor, one.pk)):
        assert "<script>alert" not in page
        assert "\u202e" not in page
        assert "\x1b" not in page
        assert HARMLESS in page
        assert not re.search(r"<style|\sstyle=|<script(?![^>]*\bsrc=)", page)


def test_one_call_takes_bounded_room(alice: Caller, auditor: Client) -> None:
    hosts = [attempt(f"h{number}.example") for number in range(200)]
    one = call(
        alice.tenant,
        "t",
        "c" * 1_000_000,
        stdout="é" * 1_000_000,
        stderr="e" * 1_000_000,
        error_message="m" * 100_000,
        meta={"network": {"attempts": hosts}},
        artifact_count=300,
    )
    Artifact.objects.bulk_create(
        Artifact(execution=one, name=f"file{number}.txt", size_bytes=1) for number in range(300)
    )
    page = page_of(auditor, one.pk)
    assert page.count("c" * 100) <= MOST_CODE // 100 + 1
    assert page.count("é") <= MOST_OUTPUT_BYTES // 2
    assert "e" * (MOST_OUTPUT_BYTES + 1) not in page
    assert len(re.findall(r"file\d+\.txt", page)) == MOST_FILES
    assert "and 280 more" in page
    assert len(re.findall(r"h\d+\.example", page)) == MOST_HOSTS
    assert len(page) < 100_000


def test_a_long_transcript_has_pages_and_takes_no_more_queries(
    alice: Caller, auditor: Client
) -> None:
    calls = [call(alice.tenant, "t")]
    page_of(auditor, calls[0].pk)
    with CaptureQueriesContext(connection) as few:
        page_of(auditor, calls[0].pk)
    calls += [call(alice.tenant, "t", f"number {number}") for number in range(2 * CALLS_PER_PAGE)]
    keys = [each.pk for each in calls]
    with CaptureQueriesContext(connection) as many:
        first = page_of(auditor, keys[0])
    assert len(many) == len(few)
    assert calls_in(first) == keys[:CALLS_PER_PAGE]
    assert f'href="?from={keys[CALLS_PER_PAGE]}"' in first
    assert "Previous" not in first
    second = page_of(auditor, keys[0], **{"from": str(keys[CALLS_PER_PAGE])})
    assert calls_in(second) == keys[CALLS_PER_PAGE : 2 * CALLS_PER_PAGE]
    back = page_of(auditor, keys[0], before=str(keys[CALLS_PER_PAGE]))
    assert calls_in(back) == keys[:CALLS_PER_PAGE]
    assert f'href="?from={keys[CALLS_PER_PAGE]}"' in back
    last = page_of(auditor, keys[0], last="")
    assert calls_in(last) == keys[-CALLS_PER_PAGE:]
    assert "Next" not in last
    assert f'href="?before={keys[-CALLS_PER_PAGE]}"' in last


def test_what_is_counted_is_bounded_and_says_so(
    alice: Caller, auditor: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("service", "admin"):
        monkeypatch.setattr(f"executions.capabilities.threads.{name}.MOST_COUNTED", 3)
    first = call(alice.tenant, "t", status="failed")
    for _ in range(3):
        last = call(alice.tenant, "t")
    assert column(list_of(auditor), "calls") == ["3+"]
    (found,) = sums_of([last]).values()
    assert (found.calls, found.is_whole, found.first) == (3, False, first.created_at)
    assert totals_of(last).first == first.created_at
    assert "These numbers are of the last 3 calls." in page_of(auditor, last.pk)


def test_an_approval_says_who_decided_to_those_who_may_see_it(
    alice: Caller, auditor: Client
) -> None:
    one, waits = call(alice.tenant, "t"), call(alice.tenant, "t", status="queued", finished_at=None)
    given = {"tenant_slug": alice.tenant.slug, "code_hash": "x", "request_hash": "y"}
    Approval.objects.create(
        execution=one, status="approved", decided_by="user:<b>", decided_at=timezone.now(), **given
    )
    Approval.objects.create(execution=waits, **given)
    page = page_of(member(AUDITOR, "ann"), one.pk)
    assert re.search(r'approval/\d+/change/">Approved</a> by user:&lt;b&gt;, <time', page)
    assert "Pending approval</a>" in page
    assert "Approval:" not in page_of(auditor, one.pk)


def test_sessions_are_linked_for_those_who_may_see_them(alice: Caller, auditor: Client) -> None:
    session = session_of(alice.tenant)
    one = call(alice.tenant, "t", session=session)
    link = f'href="/admin/executions/session/{session.pk}/change/"'
    assert link in page_of(member(OPERATOR), one.pk)
    page = page_of(auditor, one.pk)
    assert str(session.pk) in page
    assert link not in page


def test_who_may_not_see_executions_sees_no_thread(alice: Caller) -> None:
    one = call(alice.tenant, "t", "secret code")
    clerk = get_user_model().objects.create_user("clerk", is_staff=True)
    session_permission = Permission.objects.get(
        codename="view_session", content_type__app_label="executions"
    )
    clerk.user_permissions.add(session_permission)
    client = Client()
    client.force_login(clerk)
    for path in (THREADS, f"{THREADS}{one.pk}/change/"):
        assert client.get(path).status_code == 403
        assert Client().get(path).status_code == 302
    assert THREADS not in client.get("/admin/").content.decode()
    session = session_of(alice.tenant)
    call(alice.tenant, "t", session=session, turn=1)
    page = client.get(f"/admin/executions/session/{session.pk}/change/").content.decode()
    assert THREADS not in page


def test_threads_are_read_and_not_changed(alice: Caller, admin_client: Client) -> None:
    one = call(alice.tenant, "t")
    for path in ("add/", f"{one.pk}/delete/"):
        assert admin_client.post(f"{THREADS}{path}", {"post": "yes"}).status_code == 403
    assert admin_client.post(f"{THREADS}{one.pk}/change/", {"id": "x"}).status_code == 404
    assert Execution.objects.filter(pk=one.pk).exists()


def test_what_is_no_thread_is_not_found(alice: Caller, auditor: Client) -> None:
    alone, one = call(alice.tenant, None), call(alice.tenant, "t")
    for pk in (alone.pk, uuid7(), "x", "%00"):
        assert auditor.get(f"{THREADS}{pk}/change/").status_code == 404
    for query in ({"from": "x"}, {"before": "<b>"}):
        assert auditor.get(f"{THREADS}{one.pk}/change/", query).status_code == 404


def test_an_execution_leads_to_its_thread_and_so_does_the_list(
    alice: Caller, charlie: Caller, auditor: Client
) -> None:
    one, other, alone = (
        call(alice.tenant, "t"),
        call(charlie.tenant, "t"),
        call(alice.tenant, None),
    )
    executions = "/admin/executions/execution/"
    page = auditor.get(f"{executions}{one.pk}/change/").content.decode()
    assert f'href="{THREADS}{one.pk}/change/?from={one.pk}"' in page
    assert THREADS not in main_of(auditor.get(f"{executions}{alone.pk}/change/"))
    listed = auditor.get(executions, {"conversation": "t"}).content.decode()
    for each in (one, other):
        assert f"{THREADS}{each.pk}/change/" in listed
    assert THREADS not in main_of(auditor.get(executions))


def main_of(answer: Any) -> str:
    """The page without the menu."""
    return str(answer.content.decode().partition('id="content"')[2])


def test_tenants_do_not_share_a_thread(alice: Caller, charlie: Caller) -> None:
    ours, theirs = call(alice.tenant, "t"), call(charlie.tenant, "t")
    assert Tenant.objects.count() >= 2
    assert list(service.calls_of(ours)) == [ours]
    assert list(service.calls_of(theirs)) == [theirs]
