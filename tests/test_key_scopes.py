"""What each key opens, and whose rows it sees: at every endpoint that the URL table has."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any
from uuid import UUID

import pytest
from django.urls import URLPattern, get_resolver, reverse
from rest_framework.test import APIClient

from executions.api.scopes import NEEDS, OPEN
from executions.models import Scope
from executions.models.api_key import as_words
from executions.services.keys import create_api_key
from tests.conftest import Caller
from tests.processes import ROOT
from tests.sessions import cell, opened

MISSING = UUID("01a1fd3e-5869-7be3-b4ad-c3848c823008")
SOME: dict[str, Any] = {
    **dict.fromkeys(
        ("execution_id", "session_id", "snapshot_id", "schedule_id", "call_id"), MISSING
    ),
    "context_id": "default",
    "pid": 1,
    "name": "plot.txt",
    "sandbox_id": MISSING.hex,
    "method": "Update",
}
# One, whose making costs more than a request.
CLIENT = APIClient()
# What belongs to a tenant.
OWNED = {
    *("Execution", "Artifact", "Session", "Schedule", "Snapshot"),
    *("Workspace", "WorkspaceFile", "Blob", "ToolCall"),
}


BODY_FIRST = ("session-executions",)
STREAMS = ("session-file-events", "session-process-events")


def patterns() -> Iterator[URLPattern]:
    yield from get_resolver("executions.api.urls").url_patterns


def names_of(name: str) -> set[str]:
    """The parameters of an endpoint's address."""
    (found,) = (each for each in patterns() if each.name == name)
    return set(found.pattern.converters)


ENDPOINTS = [(name, method) for name, methods in NEEDS.items() for method in methods]


def ask(key_text: str, name: str, method: str, **ids: Any) -> Any:
    values = {each: {**SOME, **ids}[each] for each in names_of(name)}
    body = None if method == "GET" else {}
    CLIENT.credentials(HTTP_X_API_KEY=key_text)
    return getattr(CLIENT, method.lower())(reverse(name, kwargs=values), body)


def test_every_endpoint_says_what_it_needs_of_each_method_that_it_has() -> None:
    names = {each.name for each in patterns() if each.name}
    assert names == NEEDS.keys() | OPEN
    verbs = ("get", "post", "put", "patch", "delete", "trace")
    for each in patterns():
        if each.name in NEEDS:
            view = each.callback.view_class  # type: ignore[attr-defined]
            has = {verb.upper() for verb in verbs if hasattr(view, verb)}
            assert has == set(NEEDS[each.name]), each.name


def test_a_key_opens_what_its_scopes_are_for_and_nothing_else(
    scripted: object, alice: Caller
) -> None:
    made: dict[str, str] = {}

    def key_with(scopes: set[str]) -> str:
        words = as_words(scopes)
        if words not in made:
            made[words] = create_api_key(alice.tenant, "k", None, words)[1]
        return made[words]

    for name, method in ENDPOINTS:
        needed = {scope.value for scope in NEEDS[name][method]}
        for lacking in needed:
            refused = ask(key_with(set(Scope.values) - {lacking}), name, method)
            assert refused.status_code == 403, (name, method, lacking)
            assert lacking in refused.content.decode(), (name, method)
        assert ask(key_with(needed), name, method).status_code not in (401, 403, 405), (
            name,
            method,
        )
        if needed:
            assert ask(key_with(set()), name, method).status_code == 403, (name, method)
    assert ask(key_with(set(Scope.values)), "languages", "DELETE").status_code == 405
    CLIENT.credentials(HTTP_X_API_KEY=key_with({"execute"}))
    assert CLIENT.head("/api/v1/executions").status_code == 403


@pytest.mark.usefixtures("kept_here")
@pytest.mark.parametrize("accept", ["application/json", "text/event-stream"])
def test_code_that_names_a_session_needs_the_scope_of_sessions(alice: Caller, accept: str) -> None:
    session = opened(alice)
    body = {"code": "1", "session": session["id"]}
    for scopes, status in (({"execute"}, 403), ({"execute", "sessions"}, 200)):
        _, text = create_api_key(alice.tenant, "narrow", scopes=as_words(scopes))
        CLIENT.credentials(HTTP_X_API_KEY=text, HTTP_ACCEPT=accept)
        answer = CLIENT.post("/api/v1/executions", body)
        assert answer.status_code == status
        b"".join(answer.streaming_content) if answer.streaming else answer.content
    CLIENT.credentials()


@pytest.mark.usefixtures("kept_here")
def test_what_is_a_colleagues_is_mine_and_a_strangers_is_not_there(
    alice: Caller, bob: Caller, charlie: Caller
) -> None:
    session = opened(alice)
    ran = cell(alice, session, "open('a', 'w').write('x')").json()["id"]
    taken = alice.client.post(f"/api/v1/sessions/{session['id']}/snapshot", {}).json()["id"]
    body = {"name": "often", "cron": "* * * * *", "request": {"code": "1"}}
    often = alice.client.post("/api/v1/schedules", body).json()["id"]
    ids = {
        "session_id": session["id"],
        "execution_id": ran,
        "snapshot_id": taken,
        "schedule_id": often,
    }
    with_id = [(name, method) for name, method in ENDPOINTS if names_of(name) & ids.keys()]
    assert len(with_id) > 25
    answers = 0
    for name, method in with_id:
        told = ask(charlie.key_text, name, method, **ids)
        unknown = ask(charlie.key_text, name, method)
        assert (told.status_code, told.content) == (unknown.status_code, unknown.content)
        # Where the body is looked at first, this one is refused for what it is.
        assert told.status_code in (404, 400, 415), (name, method)
        assert told.status_code == 404 or name in BODY_FIRST, (name, method)
        assert ask("", name, method, **ids).status_code == 401, (name, method)
        if method == "GET" and name not in STREAMS:
            mine = ask(alice.key_text, name, method, **ids)
            assert ask(bob.key_text, name, method, **ids).status_code == mine.status_code, name
            answers += mine.status_code == 200
    assert answers >= 6
    for name in ("executions", "schedules", "sessions", "snapshots"):
        assert ask(bob.key_text, name, "GET").json()["results"], name
        assert not ask(charlie.key_text, name, "GET").json()["results"], name


def test_the_api_asks_for_what_tenants_own_in_one_place_alone() -> None:
    for file in (ROOT / "executions" / "api").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in ("objects", "_base_manager"):
                assert isinstance(node.value, ast.Name), file
                assert node.value.id not in OWNED, f"{file}: {node.value.id}"
