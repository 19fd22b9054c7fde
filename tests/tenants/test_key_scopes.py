"""What each key opens, at every endpoint that the URL table has."""

from __future__ import annotations

import pytest

from executions.doors.native.authentication import NEEDS, OPEN
from executions.tenants.keys import create_api_key
from executions.tenants.models import Scope, as_words
from tests.conftest import Caller
from tests.support.sessions import opened
from tests.tenants.endpoints import CLIENT, ENDPOINTS, ask, patterns


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
