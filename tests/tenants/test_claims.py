"""Who asked for a run, as its caller says: kept, found, sealed, and erased with the code."""

from __future__ import annotations

import json
import logging
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth import get_user_model
from django.db import connection
from django.test import Client
from django.utils import timezone
from hypothesis import given
from hypothesis import strategies as st

from executions.capabilities.playground.service import recorded_request
from executions.capabilities.retention import service as retention
from executions.capabilities.search.export import export
from executions.doors.bridge import Bridge
from executions.ledger.entry import text_hash
from executions.ledger.verification import verify
from executions.runs.models import Execution
from executions.runs.requests import CLAIMS, read_traceparent
from tests.conftest import Caller
from tests.support.agent_sandbox import execute
from tests.support.running import run
from tests.support.sessions import URL, cell, opened

pytest_plugins = ["tests.support.agent_sandbox"]
pytestmark = pytest.mark.django_db

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"
SAID = {
    "agent": "reporter",
    "model": "model-7 (2026)",
    "conversation": "c/1",
    "on_behalf_of": "Zoë <zoe@example.com>",
}
# As a header has them: bytes of UTF-8, which WSGI reads as Latin-1.
HEADERS = {
    f"HTTP_X_{name.upper()}": value.encode().decode("latin-1") for name, value in SAID.items()
} | {"HTTP_TRACEPARENT": TRACEPARENT}


def said(record: Any) -> dict[str, Any]:
    return {name: record[name] for name in (*CLAIMS, "traceparent")}


ALL = {**SAID, "traceparent": TRACEPARENT}
NONE = dict.fromkeys(ALL)


def test_what_a_caller_says_is_in_answer_record_receipt_log_and_export(
    scripted: object, alice: Caller, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "executions.audit")
    alice.client.credentials(HTTP_X_API_KEY=alice.key_text, HTTP_TRACEPARENT=TRACEPARENT)
    answer = run(alice, "pass", **SAID).json()

    assert said(answer) == ALL
    assert said(alice.client.get(f"/api/v1/executions/{answer['id']}").json()) == ALL
    receipt = answer["receipt"]
    hashed = text_hash(SAID["on_behalf_of"])
    assert {name: receipt.get(name) for name in ALL} == {**ALL, "on_behalf_of": None}
    assert receipt["on_behalf_of_hash"] == hashed
    (line,) = [vars(each) for each in caplog.records if each.name == "executions.audit"]
    assert {name: line[name] for name in CLAIMS[:3]} == {name: SAID[name] for name in CLAIMS[:3]}
    assert (line["on_behalf_of_hash"], line["trace_id"]) == (hashed, TRACE)
    assert SAID["on_behalf_of"] not in str(line)
    (exported,) = b"".join(export(Execution.objects.all(), "jsonl")).splitlines()
    assert said(json.loads(exported)) == ALL
    assert verify().is_intact


def test_nothing_is_said_where_nobody_says_it(scripted: object, alice: Caller) -> None:
    answer = run(alice, "pass", agent=None, model="").json()
    assert said(answer) == NONE
    assert answer["receipt"]["on_behalf_of_hash"] is None


def test_headers_say_it_too_and_not_something_else(scripted: object, alice: Caller) -> None:
    post = alice.client.post
    assert said(post("/api/v1/executions", {"code": "pass"}, **HEADERS).json()) == ALL
    same = post("/api/v1/executions", {"code": "pass", **SAID}, **HEADERS)
    assert said(same.json()) == ALL

    refused = post("/api/v1/executions", {"code": "pass", "agent": "another"}, **HEADERS)
    assert (refused.status_code, refused.json()["error"]["field"]) == (400, "agent")
    for value in ("a\x01", "a" * 256, "\xff"):
        refused = post("/api/v1/executions", {"code": "pass"}, HTTP_X_AGENT=value)
        assert (refused.status_code, refused.json()["error"]["field"]) == (400, "X-Agent")
    assert Execution.objects.count() == 2


@pytest.mark.usefixtures("kept_here")
def test_cells_commands_and_streams_of_a_session_say_it(alice: Caller) -> None:
    session = opened(alice)
    assert said(cell(alice, session, "1", **SAID).json()) == {**ALL, "traceparent": None}
    for path, body in (("executions", {"code": "1"}), ("processes", {"shell": "true"})):
        for stream in ({}, {"HTTP_ACCEPT": "application/x-ndjson"}):
            answer = alice.client.post(f"{URL}/{session['id']}/{path}", body, **HEADERS, **stream)
            text = b"".join(answer.streaming_content) if answer.streaming else answer.content
            told = json.loads(text.splitlines()[-1])
            assert said(told.get("execution", told)) == ALL
    background = {"shell": "true", "background": True, **SAID}
    started = alice.client.post(f"{URL}/{session['id']}/processes", background).json()
    found = alice.client.get(f"/api/v1/executions/{started['execution']}").json()
    assert said(found) == {**ALL, "traceparent": None}


def test_the_other_shapes_of_the_api_say_it_in_headers_or_their_own_fields(
    conversations: None, alice: Caller
) -> None:
    alice.client.credentials(HTTP_X_API_KEY=alice.key_text, **HEADERS)
    record = execute(alice, "1")["X-Execution-ID"]
    assert said(alice.client.get(f"/api/v1/executions/{record}").json()) == ALL

    assert said(Bridge().call({"code": "1", **ALL})["metadata"]) == ALL
    # Who replays it is another, and the record has whom it repeats.
    request = recorded_request(Execution.objects.latest("pk"))
    assert [getattr(request, name) for name in ALL] == [""] * 5


def test_runs_are_found_by_it_and_only_ones_own(
    scripted: object, alice: Caller, bob: Caller, charlie: Caller
) -> None:
    alice.client.credentials(HTTP_X_API_KEY=alice.key_text, HTTP_TRACEPARENT=TRACEPARENT)
    ours = run(alice, "pass", **SAID).json()["id"]
    run(alice, "pass", **{name: f"{value}." for name, value in SAID.items()})
    theirs = run(charlie, "pass", **SAID).json()["id"]

    def listed(caller: Caller, **query: str) -> list[str]:
        found = caller.client.get("/api/v1/executions", query).json()["results"]
        return [each["id"] for each in found]

    for name, value in SAID.items():
        assert listed(alice, **{name: value}) == listed(bob, **{name: value}) == [ours]
        assert listed(charlie, **{name: value}) == [theirs]
    assert len(listed(bob, trace_id=TRACE)) == 2
    assert listed(charlie, trace_id=TRACE) == []

    auditor = Client()
    auditor.force_login(get_user_model().objects.create_superuser("auditor"))
    for term in (*(f"{name}:{value}" for name, value in SAID.items()), f"trace_id: {TRACE}"):
        page = auditor.get("/admin/executions/execution/", {"q": term}).content.decode()
        assert ours in page, term
    page = auditor.get(f"/admin/executions/execution/{ours}/change/").content.decode()
    assert "Zoë &lt;zoe@example.com&gt;" in page
    assert TRACEPARENT in page


@pytest.mark.parametrize("name", [*CLAIMS, "trace_id"])
def test_a_claim_is_found_by_its_index(name: str, alice: Caller) -> None:
    found = Execution.objects.filter(tenant=alice.tenant, **{name: "x"}).order_by("-id")[:51]
    if connection.vendor == "sqlite":
        assert f"execution_{name}" in found.explain()


def test_for_whom_goes_with_the_code_and_its_hash_stays(
    scripted: object, alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    alice.tenant.keep_code_days = 1
    alice.tenant.save()
    record = run(alice, "pass", **SAID).json()
    Execution.objects.filter(pk=record["id"]).update(on_behalf_of="")
    assert not verify().is_intact
    Execution.objects.filter(pk=record["id"]).update(on_behalf_of="Eve")
    assert not verify().is_intact
    Execution.objects.filter(pk=record["id"]).update(on_behalf_of=SAID["on_behalf_of"])

    class Later:
        now = staticmethod(lambda: timezone.now() + timedelta(days=2))

    monkeypatch.setattr(retention, "timezone", Later)
    (erasure,) = retention.apply_retention()
    assert (erasure.data, erasure.executions) == ("code", 1)
    after = alice.client.get(f"/api/v1/executions/{record['id']}").json()
    assert said(after) == {**ALL, "on_behalf_of": None, "traceparent": None}
    assert after["receipt"] == record["receipt"]
    assert verify().is_intact
    assert retention.apply_retention() == []


def test_a_repeated_key_with_other_claims_conflicts_and_with_another_trace_does_not(
    scripted: object, alice: Caller
) -> None:
    def post(person: str, parent: str) -> Any:
        trace = f"00-{TRACE}-{parent}-01"
        body = {"code": "pass", "idempotency_key": "once", "on_behalf_of": person}
        return alice.client.post("/api/v1/executions", body, HTTP_TRACEPARENT=trace)

    first = post("alice", PARENT).json()
    assert post("alice", PARENT[::-1]).json() == first
    assert post("mallory", PARENT).status_code == 409


@pytest.mark.parametrize(
    ("text", "read"),
    [
        (TRACEPARENT, TRACEPARENT),
        (f" {TRACEPARENT}\t", TRACEPARENT),
        (f"00-{TRACE}-{PARENT}-ff", f"00-{TRACE}-{PARENT}-ff"),
        # A later version: what 00 has of it.
        (f"cc-{TRACE}-{PARENT}-03", TRACEPARENT),
        (f"cc-{TRACE}-{PARENT}-02-what-the-future-brings", f"00-{TRACE}-{PARENT}-00"),
        (f"cc-{TRACE}-{PARENT}-01.what", ""),
        (f"00-{TRACE}-{PARENT}-01-more", ""),
        (f"ff-{TRACE}-{PARENT}-01", ""),
        (f"00-{'0' * 32}-{PARENT}-01", ""),
        (f"00-{TRACE}-{'0' * 16}-01", ""),
        (TRACEPARENT.upper(), ""),
        (f"{TRACEPARENT},{TRACEPARENT}", ""),
        (f"{TRACEPARENT}\n", ""),
        (f"00-{TRACE}-{PARENT}-1", ""),
        ("", ""),
    ],
)
def test_a_trace_context_is_read_as_the_specification_has_it(text: str, read: str) -> None:
    assert read_traceparent(text) == read


@given(st.text("0123456789abcdefgF-", max_size=60))
def test_whatever_is_read_as_a_trace_context_is_one_again(text: str) -> None:
    read = read_traceparent(text)
    assert read_traceparent(read) == read


def test_a_broken_trace_context_refuses_nothing(scripted: object, alice: Caller) -> None:
    answer = alice.client.post("/api/v1/executions", {"code": "pass"}, HTTP_TRACEPARENT="00-1")
    assert (answer.status_code, answer.json()["traceparent"]) == (200, None)
