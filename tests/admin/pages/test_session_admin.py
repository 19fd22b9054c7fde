"""Sessions in the admin: a list, a page with what was run, and what staff may do to one."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext

from executions.admin.sessions import CELLS_PER_PAGE, MOST_CHARACTERS
from executions.ledger.models import LedgerEntry
from executions.ledger.verification import verify
from executions.runs.models import Execution
from executions.sessions.models import Session
from executions.tenants.service import AUDITOR, OPERATOR
from tests.conftest import Caller
from tests.support import kept_here
from tests.support.roles import member
from tests.support.sessions import aged, cell, opened, row

pytestmark = pytest.mark.usefixtures("kept_here")

LIST = "/admin/executions/session/"
ACTIONS = ("close", "reset", "extend")
LOOKS = ("now", "files", "change")


def at(session: dict[str, Any], name: str) -> str:
    return f"{LIST}{session['id']}/{name}" + ("/" if name == "change" else "")


def page_of(client: Client, session: dict[str, Any], name: str = "change", **query: str) -> str:
    page = client.get(at(session, name), query)
    assert page.status_code == 200, page.content
    return page.content.decode()


def posted(client: Client, session: dict[str, Any], name: str, **body: str) -> int:
    return client.post(at(session, name), body).status_code


def test_the_list_tells_of_sessions_and_is_filtered(alice: Caller, charlie: Caller) -> None:
    first, other = opened(alice, name="notes"), opened(charlie)
    cell(alice, first, "x = 1")
    cell(alice, first, "x += 1")
    alice.client.delete(f"/api/v1/sessions/{first['id']}")
    auditor = member(AUDITOR)
    whole = auditor.get(LIST).content.decode()
    assert '<span class="badge badge-good">Open</span>' in whole
    assert '<span class="badge badge-quiet">Closed</span>' in whole
    assert "notes" in whole
    assert alice.api_key.prefix in whole
    for query, found, left_out in (
        ({"state__exact": "open"}, other, first),
        ({"tenant_slug": alice.tenant.slug}, first, other),
    ):
        page = auditor.get(LIST, query).content.decode()
        assert found["id"] in page
        assert left_out["id"] not in page
    assert first["id"] in auditor.get(LIST, {"provider": "kept_here"}).content.decode()
    assert first["id"] not in auditor.get(LIST, {"provider": "elsewhere"}).content.decode()


def test_the_page_asks_no_provider_and_keeps_secrets(
    alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = opened(alice, env={"TOKEN": "very-secret"})

    def fail(*_: Any) -> Any:
        raise AssertionError("the provider was asked")

    monkeypatch.setattr(kept_here.KeptHere, "attach", fail)
    monkeypatch.setattr(kept_here.Kept, "state", fail)
    page = page_of(member(AUDITOR), session)
    assert "namespaces" in page
    assert "very-secret" not in page
    assert "secret-ref" not in page


def test_the_transcript_has_the_cells_in_the_order_of_their_turns(alice: Caller) -> None:
    session = opened(alice)
    ids = [cell(alice, session, f"print('cell', {n} * 11)").json()["id"] for n in range(1, 4)]
    cell(alice, session, "raise ValueError('not so')")
    page = page_of(member(AUDITOR), session)
    places = [page.index(text) for text in ("cell 11", "cell 22", "cell 33", "ValueError: not so")]
    assert places == sorted(places)
    assert all(f"/admin/executions/execution/{pk}/change/" in page for pk in ids)
    assert '<span class="hl-nb">print</span>' in page


def test_a_hostile_transcript_is_text(alice: Caller) -> None:
    session = opened(alice, name="a\u202eb")
    code = """
import sys
print('<script>alert(1)</script> a\\u202eb \\x1b[2J')
print('<img src=x onerror=alert(2)>', file=sys.stderr)
print('z' * 5_000_000)
"""
    answer = cell(alice, session, code).json()
    outputs = '[{"text/html": "<script>alert(3)</script>", "image/png": "bm8="}]'
    Execution.objects.filter(pk=answer["id"]).update(outputs=outputs)
    page = page_of(member(AUDITOR), session)
    for tag in ("<script>alert", "<img src=x", "\u202e", "\x1b"):
        assert tag not in page, tag
    assert "&lt;script&gt;alert(1)&lt;/script&gt; a[U+202E]b [U+001B][2J" in page
    assert "&lt;script&gt;alert(3)&lt;/script&gt;" in page
    assert "&lt;img src=x" in page
    assert len(page) < 10 * MOST_CHARACTERS + 100_000


def test_outputs_too_large_for_a_notebook_are_left_to_the_execution(alice: Caller) -> None:
    session = opened(alice)
    answer = cell(alice, session, "1").json()
    big = '[{"text/plain": "' + "y" * 3_000_000 + '"}]'
    Execution.objects.filter(pk=answer["id"]).update(outputs=big)
    page = page_of(member(AUDITOR), session)
    assert "Rich outputs are large. See the execution." in page
    assert "yyyy" not in page


def test_a_long_transcript_is_paged_and_takes_no_more_queries(alice: Caller) -> None:
    session = opened(alice)
    auditor = member(AUDITOR)
    cell(alice, session, "print('cell 1')")
    page_of(auditor, session)
    with CaptureQueriesContext(connection) as few:
        page_of(auditor, session)
    one = Execution.objects.get()
    for turn in range(2, CELLS_PER_PAGE + 3):
        one.pk, one.turn, one.code = None, turn, f"# number {turn}."
        one.save(force_insert=True)
    with CaptureQueriesContext(connection) as many:
        last = page_of(auditor, session)
    assert len(many) == len(few)
    assert f"# number {CELLS_PER_PAGE + 2}." in last
    assert "# number 2." not in last
    assert "# number 2." in page_of(auditor, session, page="1")
    assert "# number" in page_of(auditor, session, page="<script>")


def test_an_auditor_sees_what_is_in_the_sandbox_now_and_that_is_no_use_of_it(
    alice: Caller,
) -> None:
    session = opened(alice)
    cell(alice, session, "import os; os.mkdir('data'); open('data/<b>.txt', 'w').write('abc')")
    url = f"/api/v1/sessions/{session['id']}/processes"
    alice.client.post(url, {"shell": "cat", "background": True, "stdin": True})
    used_at = row(session).used_at
    auditor = member(AUDITOR)
    now = page_of(auditor, session, "now")
    assert "running" in now
    assert "default" in now
    assert "?path=data" in page_of(auditor, session, "files")
    below = page_of(auditor, session, "files", path="data")
    assert "&lt;b&gt;.txt" in below
    assert "<b>.txt" not in below
    assert auditor.get(at(session, "files"), {"path": "../.."}).status_code == 400
    assert row(session).used_at == used_at


def test_a_state_that_is_none_is_refused_and_claims_are_shown_as_text(
    alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = opened(alice)
    auditor = member(AUDITOR)
    hostile = kept_here.Process(7, ["<script>", "a\u202e"], "\ud800", None)
    claimed: Any = kept_here.SandboxState((), [hostile] * 5000, "much")  # type: ignore[arg-type]
    monkeypatch.setattr(kept_here.Kept, "state", lambda _: claimed)
    page = page_of(auditor, session, "now")
    assert "&lt;script&gt; a[U+202E]" in page
    assert "unknown" in page
    assert page.count("&lt;script&gt;") == 200
    monkeypatch.setattr(kept_here.Kept, "state", lambda _: {"memory_bytes": 1})
    assert auditor.get(at(session, "now")).status_code in (502, 503)


def test_a_sandbox_that_does_not_answer_is_not_waited_for(
    alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = opened(alice)
    asked, let_go = threading.Event(), threading.Event()

    def hang(_: Any) -> Any:
        asked.set()
        let_go.wait(60)
        return kept_here.SandboxState()

    monkeypatch.setattr(kept_here.Kept, "state", hang)
    monkeypatch.setattr("executions.sessions.files.LOOK_SECONDS", 0.5)
    try:
        answer = member(AUDITOR).get(at(session, "now"))
        assert asked.wait(60)
    finally:
        let_go.set()
    assert answer.status_code in (502, 503)
    assert row(session).state == "open"


def test_looking_at_a_sandbox_that_is_gone_tells_so(alice: Caller) -> None:
    session = opened(alice)
    kept_here.sandboxes()[0].close()
    auditor = member(AUDITOR)
    assert auditor.get(at(session, "now")).status_code == 409
    assert row(session).state == "lost"
    assert "badge-bad" in page_of(auditor, session)


def test_an_operator_extends_resets_and_closes(alice: Caller) -> None:
    session = opened(alice, idle_seconds=60, max_seconds=120)
    (sandbox,) = kept_here.sandboxes()
    operator = member(OPERATOR)
    cell(alice, session, "x = 1")
    assert 'name="minutes"' in page_of(operator, session)
    aged(session, created_at=100)
    assert posted(operator, session, "extend", minutes="30") == 302
    assert (row(session).idle_seconds, row(session).max_seconds >= 1900) == (1800, True)
    assert posted(operator, session, "extend", minutes="1") == 302
    assert row(session).idle_seconds == 1800
    for wrong in ("0", "-1", "x", "", "9" * 30):
        assert posted(operator, session, "extend", minutes=wrong) == 400, wrong
    assert posted(operator, session, "reset") == 302
    assert "NameError" in cell(alice, session, "x").json()["stderr"]
    assert posted(operator, session, "close") == 302
    assert sandbox.gone
    assert posted(operator, session, "close") == 302
    assert posted(operator, session, "reset") == 409
    entries = LedgerEntry.objects.filter(kind="session").order_by("pk")
    by_operator = [e.stated["action"] for e in entries if e.stated.get("by") == "user:operator"]
    assert by_operator == ["changed", "changed", "reset", "closed"]
    noted = LogEntry.objects.filter(object_id=session["id"]).order_by("pk")
    assert [entry.change_message for entry in noted][-2:] == ["Reset.", "Closed."]
    assert [str(finding) for finding in verify().findings] == []
    assert 'name="minutes"' not in page_of(operator, session)


def test_an_auditor_acts_on_nothing(alice: Caller) -> None:
    session = opened(alice)
    auditor = member(AUDITOR)
    assert [posted(auditor, session, name, minutes="5") for name in ACTIONS] == [403] * 3
    assert 'name="minutes"' not in page_of(auditor, session)
    assert row(session).state == "open"
    assert not LogEntry.objects.exists()


def test_a_stranger_sees_and_does_nothing(alice: Caller, django_user_model: Any) -> None:
    session = opened(alice)
    nobody, customer = Client(), Client()
    customer.force_login(django_user_model.objects.create_user("customer"))
    staff = Client()
    staff.force_login(django_user_model.objects.create_user("staff", is_staff=True))
    for client, status in ((nobody, 302), (customer, 302), (staff, 403)):
        assert [client.get(at(session, name)).status_code for name in LOOKS] == [status] * 3
        assert [posted(client, session, name, minutes="5") for name in ACTIONS] == [status] * 3
        assert client.get(LIST).status_code == status
    assert row(session).state == "open"


def test_nobody_adds_changes_or_deletes_one_and_nothing_is_done_by_get(
    alice: Caller, admin_client: Client
) -> None:
    session = opened(alice)
    assert admin_client.get(f"{LIST}add/").status_code == 403
    assert admin_client.post(at(session, "change"), {"name": "x"}).status_code == 403
    assert admin_client.post(f"{LIST}{session['id']}/delete/").status_code == 403
    assert [admin_client.get(at(session, name)).status_code for name in ACTIONS] == [404] * 3
    unknown = {"id": "00000000-0000-7000-8000-000000000000"}
    assert [posted(admin_client, unknown, name) for name in ACTIONS] == [404] * 3
    assert Session.objects.get().state == "open"


def test_an_execution_links_to_its_session(alice: Caller) -> None:
    session = opened(alice)
    answer = cell(alice, session, "1").json()
    page = member(AUDITOR).get(f"/admin/executions/execution/{answer['id']}/change/")
    assert at(session, "change") in page.content.decode()
