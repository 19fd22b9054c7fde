"""Sessions as notebooks: cells from the playground run in the session's context, by its rules."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.admin.models import ADDITION, LogEntry
from django.test import Client

from executions.ledger.models import LedgerEntry
from executions.runs.models import Execution
from executions.sessions.models import Session
from providers.models import ProviderConfig
from tests.conftest import Caller
from tests.support.approvals import signed_in
from tests.support.playground import PAGE, sent
from tests.support.routing import make_route
from tests.support.running import run_queued
from tests.support.sessions import cell, opened

pytestmark = [pytest.mark.usefixtures("kept_here"), pytest.mark.one_database]

LOOKS = ("use_playground", "view_execution", "view_session")


@pytest.fixture
def operator(transactional_db: None) -> Client:
    return signed_in("operator", *LOOKS, "operate_session", "cancel_execution")


def in_session(client: Client, session: Any, code: str, **fields: str) -> Any:
    return sent(client, code, session=str(session["id"]), **fields)


def test_a_cell_runs_where_the_tenants_own_cells_ran(alice: Caller, operator: Client) -> None:
    session = opened(alice, name="figures")
    cell(alice, session, "x = 41")
    change = operator.get(f"/admin/executions/session/{session['id']}/change/").content.decode()
    assert f'<a href="{PAGE}?session={session["id"]}">Open in the playground</a>' in change
    page = operator.get(f"{PAGE}?session={session['id']}").content.decode()
    assert page.index("Transcript") < page.index('id="play-code"')
    assert 'name="tenant"' not in page

    # Whatever tenant or provider a form names: a session is its tenant's, and stays where it is.
    fields = {"context": "default", "provider": "e2b", "language": "bash"}
    answer = in_session(operator, session, "print(x + 1)", tenant="elsewhere", **fields)

    assert answer.status_code == 202, answer.content
    run_queued()
    execution = Execution.objects.get(pk=answer.json()["id"])
    assert (execution.stdout, execution.tenant_slug, execution.turn) == ("42\n", "wonderland", 2)
    assert execution.subject == "playground by user:operator"
    field = in_session(operator, session, "pass", context="other").json()["error"]["field"]
    assert field == "context"


def test_only_who_operates_sessions_runs_or_opens_something_there(alice: Caller) -> None:
    session = opened(alice)
    once = signed_in("once", *LOOKS)
    assert once.get(PAGE).status_code == 200
    assert b"Open a session" not in once.get(PAGE).content
    change = once.get(f"/admin/executions/session/{session['id']}/change/")
    assert b"Open in the playground" not in change.content
    assert once.get(f"{PAGE}?session={session['id']}").status_code == 403
    assert in_session(once, session, "pass").status_code == 403
    assert sent(once, to="session").status_code == 403
    assert Session.objects.count() == 1
    assert not Execution.objects.exists()


def test_a_session_is_opened_at_any_provider_that_may_be_chosen(
    alice: Caller, operator: Client, settings: Any
) -> None:
    ProviderConfig.objects.create(provider_id="e2b", config={})
    make_route("e2b")

    answer = sent(operator, to="session", provider="kept_here")
    assert answer.status_code == 302, answer.content

    session = Session.objects.get()
    assert answer.headers["Location"] == f"{PAGE}?session={session.pk}"
    assert (session.provider, session.tenant_slug) == ("kept_here", "wonderland")
    assert session.subject == "playground by user:operator"
    entry = LedgerEntry.objects.filter(kind="session").latest("pk").stated
    assert (entry["subject"], entry["state"]) == (f"session {session.pk}", "open")
    by = LogEntry.objects.get(object_id=str(session.pk), action_flag=ADDITION).user
    assert by.get_username() == "operator"
    # With a key it is the route that counts.
    refused = alice.client.post("/api/v1/sessions", {"provider": "kept_here"})
    assert refused.json()["error"]["field"] == "provider"
    settings.TWO_PERSON_RULE = True
    error = sent(operator, to="session", provider="kept_here").json()["error"]
    assert error["field"] == "provider"


def test_a_session_that_cannot_be_noted_is_not_opened(
    alice: Caller, operator: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def note(*_: object) -> None:
        raise RuntimeError("no room in the log")

    monkeypatch.setattr("executions.sessions.queries.record_initiator", note)
    with pytest.raises(RuntimeError):
        sent(operator, to="session")
    assert not Session.objects.exists()


def test_nothing_runs_in_a_session_that_has_ended_or_whose_tenant_is_not_active(
    alice: Caller, charlie: Caller, operator: Client
) -> None:
    session, other = opened(alice), opened(charlie)
    alice.client.delete(f"/api/v1/sessions/{session['id']}")
    assert b"The session has ended" in operator.get(f"{PAGE}?session={session['id']}").content
    assert in_session(operator, session, "pass").status_code == 409
    charlie.tenant.is_active = False
    charlie.tenant.save()
    assert in_session(operator, other, "pass").json()["error"]["message"].startswith("tenant:")
    assert operator.get(f"{PAGE}?session=x").status_code == 404
    for wrong in ("x", str(charlie.tenant.pk), "00000000-0000-0000-0000-000000000000"):
        assert in_session(operator, {"id": wrong}, "pass").status_code == 404
    assert not Execution.objects.exists()
