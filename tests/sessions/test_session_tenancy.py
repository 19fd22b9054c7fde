"""Whose session it is: owner, colleague and stranger at every endpoint there is of one."""

from __future__ import annotations

from typing import Any

import pytest
from django.urls import get_resolver

from executions.runs.models import Execution
from executions.sessions.models import Session
from tests.conftest import Caller
from tests.support.sessions import URL, opened, row

pytestmark = pytest.mark.usefixtures("kept_here")

# Each endpoint's name, with a call that its owner may make.
CALLS: dict[str, tuple[str, str, Any]] = {
    "session": ("get", "", None),
    "session-executions": ("post", "/executions", {"code": "print(1)"}),
    "session-interrupt": ("post", "/interrupt", {}),
    "session-reset": ("post", "/reset", {}),
    "session-network": ("get", "/network", None),
    "session-contexts": ("get", "/contexts", None),
    "session-processes": (
        "post",
        "/processes",
        {"shell": "cat", "background": True, "stdin": True},
    ),
    "session-process-stdin": ("post", "/processes/1/stdin", None),
    "session-process-signal": ("post", "/processes/1/signal", {"signal": "SIGTERM"}),
    "session-process-events": ("get", "/processes/1/events", None),
    "session-files": ("get", "/files", None),
    "session-file-mkdir": ("post", "/files/mkdir", {"path": "a"}),
    "session-file-move": ("post", "/files/move", {"from": "a", "to": "b"}),
    "session-file-events": ("get", "/files/events?path=b", None),
    "session-file-content": ("put", "/files/content?path=b/file", None),
    "session-file-archive": ("get", "/files/archive?path=b", None),
    "session-snapshot": ("post", "/snapshot", {}),
    "session-context-restart": ("post", "/contexts/default/restart", {}),
    "session-context": ("delete", "/contexts/default", None),
}
OTHERS: list[tuple[str, str, Any]] = [
    ("get", "/files/content?path=b/file", None),
    ("put", "/files/archive?path=b", None),
    ("delete", "/files?path=b", None),
    ("patch", "", {"idle_seconds": 5}),
    ("put", "/network", {"mode": "none"}),
    ("post", "/contexts", {"language": "python"}),
    ("delete", "", None),
]


def test_every_endpoint_of_a_session_is_among_the_calls_of_these_tests() -> None:
    names = {pattern.name for pattern in get_resolver("executions.doors.native.urls").url_patterns}
    assert {name for name in names if name and name.startswith("session")} == {
        *CALLS,
        *NOT_HERE,
        "sessions",
    }


# What the fake has not, its owner is told, and a stranger is not. A template is tested with its
# capability: a key of the usual scopes makes none.
NOT_HERE = {"session-process-resize", "session-template"}


def calls(caller: Caller, session: dict[str, Any]) -> list[int]:
    return [
        getattr(caller.client, verb)(f"{URL}/{session['id']}{path}", body).status_code
        for verb, path, body in [*CALLS.values(), *OTHERS]
    ]


def test_the_owner_and_a_colleague_may(alice: Caller, bob: Caller) -> None:
    for caller in (alice, bob):
        session = opened(alice)
        assert all(200 <= status < 300 for status in calls(caller, session))
        assert row(session).state == "closed"


def test_for_a_stranger_there_is_nothing_open_or_closed(alice: Caller, charlie: Caller) -> None:
    session = opened(alice)
    before = Execution.objects.count()
    assert set(calls(charlie, session)) == {404}
    size = {"cols": 80, "rows": 24}
    url = f"{URL}/{session['id']}/processes/1/resize"
    assert charlie.client.post(url, size).status_code == 404
    assert (Execution.objects.count(), row(session).state) == (before, "open")
    alice.client.delete(f"{URL}/{session['id']}")
    assert set(calls(charlie, session)) == {404}
    assert charlie.client.get(URL).json() == {"results": [], "next": None}


def test_without_a_key_nobody_is_told_anything(alice: Caller) -> None:
    session = opened(alice)
    alice.client.credentials()
    assert set(calls(alice, session)) == {401}


def test_lists_hold_the_tenants_own_and_go_on_page_by_page(
    alice: Caller, bob: Caller, charlie: Caller
) -> None:
    mine = [opened(alice)["id"] for _ in range(3)]
    opened(charlie)
    alice.client.delete(f"{URL}/{mine[0]}")
    assert [each["id"] for each in bob.client.get(URL).json()["results"]] == mine[::-1]
    closed = bob.client.get(URL, {"state": "closed"}).json()["results"]
    assert [each["id"] for each in closed] == [mine[0]]
    page = bob.client.get(URL, {"limit": 2}).json()
    rest = bob.client.get(page["next"]).json()
    assert [each["id"] for each in page["results"] + rest["results"]] == mine[::-1]
    assert rest["next"] is None
    for bad in ({"state": "gone"}, {"limit": "0"}, {"cursor": "x"}, {"owner": "x"}):
        assert alice.client.get(URL, bad).status_code == 400, bad


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", "a/b"),
        ("name", "x" * 129),
        ("name", 7),
        ("language", ""),
        ("provider", "nowhere"),
        ("idle_seconds", 0),
        ("idle_seconds", 1.5),
        ("idle_seconds", True),
        ("max_seconds", 10**9),
        ("env", {"A=B": "x"}),
        ("env", {"A": "\0"}),
        ("env", ["A"]),
        ("metadata", "text"),
        ("metadata", {"a": "\0"}),
        ("metadata", {"a": "x" * 20_000}),
        ("ref", "forged"),
    ],
)
def test_a_bad_value_is_refused_by_name_and_opens_nothing(
    alice: Caller, field: str, value: Any
) -> None:
    refused = alice.client.post(URL, {field: value})
    assert (refused.status_code, refused.json()["error"]["field"]) == (400, field)
    assert not Session.objects.exists()


@pytest.mark.parametrize(
    ("field", "value"),
    [("session", "another"), ("language", "python"), ("context", 7), ("env", {"1": "x"})],
)
def test_a_bad_cell_is_refused_by_name_and_runs_nothing(
    alice: Caller, field: str, value: Any
) -> None:
    url = f"{URL}/{opened(alice)['id']}/executions"
    refused = alice.client.post(url, {"code": "1", field: value})
    assert (refused.status_code, refused.json()["error"]["field"]) == (400, field)
    assert not Execution.objects.exists()
