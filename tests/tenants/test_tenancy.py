"""Whose rows a key reaches: at every endpoint of the URL table, and for every model of a tenant."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.apps import apps
from django.db.models import ForeignKey, Model, QuerySet

from executions.capabilities.network.attempts import attempts_of
from executions.capabilities.schedules.service import schedules_of
from executions.capabilities.templates.drafts import announce, drafts_of
from executions.capabilities.templates.names import templates_for
from executions.capabilities.tools.calls import tool_calls_of
from executions.runs.models import Execution
from executions.runs.results import artifacts_of, executions_of
from executions.sessions.models import Session
from executions.sessions.queries import sessions_of
from executions.sessions.storage.snapshots import snapshots_of
from executions.tenants.models import Tenant
from tests.conftest import Caller
from tests.support.processes import ROOT
from tests.support.sessions import cell, opened
from tests.support.templates import builder, built
from tests.tenants.endpoints import ENDPOINTS, ask, parameters_of

# These look at the body before they look the object up.
BODY_FIRST = ("session-executions",)
STREAMS = ("session-file-events", "session-process-events")
LISTS = ("executions", "schedules", "sessions", "snapshots", "templates")

# Each model whose rows are a tenant's, with the function that looks them up for a caller, or the
# reason why no caller names a row of it.
ASKED_BY: dict[str, Callable[[Tenant], QuerySet[Any]]] = {
    "Execution": executions_of,
    "Artifact": artifacts_of,
    "ToolCall": tool_calls_of,
    "Session": sessions_of,
    "Snapshot": snapshots_of,
    "Schedule": schedules_of,
    "Template": templates_for,
    "TemplateDraft": drafts_of,
    "NetworkAttempt": attempts_of,
}
NOT_NAMED: dict[str, str] = {
    "ApiKey": "It is who calls.",
    "ExecutionEvent": "They are read by the execution that they are of.",
    "RunSignal": "It is left for the execution that the caller named.",
    "TemplateUpload": "It is reached by its template.",
    "TemplateVersion": "It is reached by its template.",
    "WebhookSecret": "It is shown in the admin alone.",
    "WebhookDelivery": "It is shown in the admin alone.",
    "Workspace": "It is reached by its session or snapshot.",
    "WorkspaceFile": "It is reached by its session or snapshot.",
    "Blob": "It is reached by a file.",
    "LooseFile": "It waits for its row.",
    "Approval": "It is decided in the admin, and told with its execution.",
    "LateResult": "It is shown in the admin alone.",
    "RequestWindow": "It is the counter of the tenant that calls.",
    "StoredTotal": "It is the counter of the tenant that calls.",
}


@pytest.fixture
def ids(kept_here: None, alice: Caller) -> dict[str, Any]:
    """One object of each kind that an address names, all of them of Alice's."""
    session = opened(alice)
    ran = cell(alice, session, "open('a', 'w').write('x')").json()["id"]
    taken = alice.client.post(f"/api/v1/sessions/{session['id']}/snapshot", {}).json()["id"]
    body = {"name": "often", "cron": "* * * * *", "request": {"code": "1"}}
    template = built(alice.tenant).template.name
    often = alice.client.post("/api/v1/schedules", body).json()["id"]
    return {
        "session_id": session["id"],
        "sandbox_id": session["id"].replace("-", ""),
        "execution_id": ran,
        "snapshot_id": taken,
        "schedule_id": often,
        "template": template,
        "alias": template,
        "build_id": announce(alice.tenant, template, (), "test").pk,
    }


def test_an_object_of_another_tenant_is_answered_as_one_that_does_not_exist(
    ids: dict[str, Any], alice: Caller, bob: Caller, charlie: Caller
) -> None:
    alice, bob, charlie = map(builder, (alice, bob, charlie))
    with_id = [(name, method) for name, method in ENDPOINTS if parameters_of(name) & ids.keys()]
    assert len(with_id) > 30
    rows = state_of_rows()
    answers = 0
    for name, method in with_id:
        stranger = ask(charlie.key_text, name, method, **ids)
        unknown = ask(charlie.key_text, name, method)
        assert stranger.status_code == unknown.status_code, (name, method)
        named = unknown.content.replace(b"01a1fd3e58697be3b4adc3848c823008", b"")
        assert stranger.content.replace(ids["sandbox_id"].encode(), b"") == named, (name, method)
        # Where the body is looked at first, this one is refused for what it is.
        assert stranger.status_code in (404, 400, 415), (name, method)
        assert stranger.status_code == 404 or name in BODY_FIRST, (name, method)
        assert ask("", name, method, **ids).status_code == 401, (name, method)
        if method == "GET" and name not in STREAMS:
            mine = ask(alice.key_text, name, method, **ids)
            assert ask(bob.key_text, name, method, **ids).status_code == mine.status_code, name
            answers += mine.status_code == 200
    assert answers >= 6
    assert state_of_rows() == rows


def test_lists_hold_the_rows_of_their_tenant(
    ids: dict[str, Any], bob: Caller, charlie: Caller
) -> None:
    for name in LISTS:
        assert ask(bob.key_text, name, "GET").json()["results"], name
        assert not ask(charlie.key_text, name, "GET").json()["results"], name


def test_every_model_of_a_tenant_says_how_a_caller_reaches_it() -> None:
    assert {model.__name__ for model in models_of_tenants()} == {*ASKED_BY, *NOT_NAMED}


def test_each_lookup_finds_the_rows_of_its_tenant_alone(
    ids: dict[str, Any], alice: Caller, charlie: Caller
) -> None:
    filled = 0
    for name, find in ASKED_BY.items():
        filled += find(alice.tenant).exists()
        assert not find(charlie.tenant).exists(), name
    assert filled >= 4


def test_the_api_asks_for_what_tenants_own_in_one_place_alone() -> None:
    executions = ROOT / "executions"
    files = [*executions.glob("doors/**/*.py"), *executions.glob("capabilities/*/api.py")]
    assert len(files) > 20
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in (
                "objects",
                "_base_manager",
                "_default_manager",
            ):
                assert isinstance(node.value, ast.Name), file
                assert node.value.id not in {*ASKED_BY, *NOT_NAMED}, f"{file}: {node.value.id}"


def models_of_tenants() -> Iterator[type[Model]]:
    """Yield each model that a chain of required or optional relations leads from to a tenant."""
    models = [
        model for model in apps.get_app_config("executions").get_models() if not model._meta.proxy
    ]
    found: set[type[Model]] = {Tenant}
    while True:
        more = {model for model in models if relations_of(model) & found} - found
        if not more:
            break
        found |= more
    yield from found - {Tenant}


def relations_of(model: type[Model]) -> set[Any]:
    return {
        field.related_model
        for field in model._meta.get_fields()
        if isinstance(field, ForeignKey) and field.related_model is not model
    }


def state_of_rows() -> list[Any]:
    """What a stranger's request must leave as it is."""
    return [
        *Execution.objects.order_by("pk").values_list("pk", "status"),
        *Session.objects.order_by("pk").values_list("pk", "state", "max_seconds"),
    ]
