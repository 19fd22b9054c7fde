"""A session that sleeps: what is there of it, for whom, and how it ends."""

from __future__ import annotations

from typing import Any

import pytest
from django.test import Client

from executions.kernel import background
from executions.kernel.coroutines import run_sync as carry_out
from executions.kernel.storage import WORKSPACES, file_store
from executions.ledger.verification import verify
from executions.runs.models import Execution
from executions.runs.requests import Caller as Asker
from executions.runs.requests import Conflict
from executions.sessions import capacity
from executions.sessions.control import open_session
from executions.sessions.ending import mark_lost
from executions.sessions.maintenance import OPENING_SECONDS, maintain
from executions.sessions.models import Session, Workspace
from executions.sessions.requests import SessionRequest
from executions.sessions.storage import blobs, file_saves
from providers.sandbox import Process
from providers.values import Command
from tests.conftest import Caller
from tests.support import kept_here
from tests.support.saved_files import actions, asleep, saved, write
from tests.support.sessions import URL, aged, cell, opened, row

pytestmark = [pytest.mark.usefixtures("own_storage", "kept_here"), pytest.mark.database]


def test_unused_it_sleeps_and_wakes_with_its_files_on_the_next_cell(
    alice: Caller, bob: Caller
) -> None:
    session = asleep(alice, write("f", "kept") + "; x = 1")
    assert kept_here.sandboxes() == []
    found = alice.client.get(f"{URL}/{session['id']}").json()
    assert (found["state"], found["closed_at"], found["woken_at"]) == ("asleep", None, None)
    assert found["files"]["unsaved_since"] is None
    listed = alice.client.get(URL, {"state": "asleep"}).json()["results"]
    assert [each["id"] for each in listed] == [session["id"]]
    first = cell(bob, session, "print(open('f').read(), 'x' in globals())").json()
    assert (first["stdout"], first["restored"]) == ("kept False\n", True)
    second = cell(alice, session, "print(1)").json()
    assert second["restored"] is False
    again = alice.client.get(f"/api/v1/executions/{first['id']}").json()
    assert again["restored"] is True
    found = alice.client.get(f"{URL}/{session['id']}").json()
    assert found["state"] == "open"
    assert found["woken_at"] is not None
    assert actions(session) == ["created", "opened", "asleep", "awake"]
    assert background.wait_for_keyed_work()
    assert [str(finding) for finding in verify().findings] == []


def test_a_long_sleep_is_not_taken_for_an_opening_that_never_ended(alice: Caller) -> None:
    session = asleep(alice, write("f", "kept"))
    aged(session, created_at=OPENING_SECONDS + 60, used_at=OPENING_SECONDS + 60)
    maintain()
    assert row(session).state == "asleep"
    assert cell(alice, session, "print(open('f').read())").json()["stdout"] == "kept\n"


def test_to_strangers_a_sleeping_session_is_not_there(alice: Caller, charlie: Caller) -> None:
    session = asleep(alice)
    assert cell(charlie, session, "1").status_code == 404
    assert charlie.client.get(f"{URL}/{session['id']}").status_code == 404
    assert charlie.client.get(f"{URL}/{session['id']}/files?path=").status_code == 404
    assert row(session).state == "asleep"


def test_to_look_at_it_in_the_admin_wakes_nobody(alice: Caller, admin_client: Client) -> None:
    session = asleep(alice)
    page = f"/admin/executions/session/{session['id']}"
    assert admin_client.get(f"{page}/change/").status_code == 200
    refused = admin_client.get(f"{page}/now")
    assert refused.status_code == 409
    assert b"asleep" in refused.content
    assert row(session).state == "asleep"


def test_of_one_conversation_there_is_one_open_session(alice: Caller, charlie: Caller) -> None:
    wanted = SessionRequest(conversation="c" * 64)
    first = carry_out(open_session(wanted, Asker(alice.tenant)))
    with pytest.raises(Conflict, match="conversation"):
        carry_out(open_session(wanted, Asker(alice.tenant)))
    assert carry_out(open_session(wanted, Asker(charlie.tenant))).pk != first.pk
    alice.client.delete(f"{URL}/{first.pk}")
    assert carry_out(open_session(wanted, Asker(alice.tenant))).pk != first.pk


def test_what_began_while_it_was_falling_asleep_keeps_it_awake(
    alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = opened(alice)
    real = file_saves.save

    def save(given: Session, **how: Any) -> Any:
        found = real(given, **how)
        cell(alice, session, write("late", "x"))
        return found

    with monkeypatch.context() as patch:
        patch.setattr(capacity, "save", save)
        assert capacity.suspend(row(session).pk, "a test") is False
    assert row(session).state == "open"
    assert len(kept_here.sandboxes()) == 1


def test_what_nobody_noticed_is_saved_before_it_sleeps(alice: Caller) -> None:
    session = opened(alice)
    cell(alice, session, write("f", "x"))
    assert background.wait_for_keyed_work()
    (sandbox,) = kept_here.sandboxes()
    (sandbox.folder / "daemons").write_text("own")
    aged(session, used_at=601)
    maintain()
    assert row(session).state == "asleep"
    assert saved(session) == {"f": b"x", "daemons": b"own"}


def test_what_ran_in_the_background_when_it_fell_asleep_is_not_said_to_be_saved(
    alice: Caller,
) -> None:
    session = opened(alice, saves="answer")
    url = f"{URL}/{session['id']}/processes"
    started = alice.client.post(url, {"shell": "sleep 60", "background": True}).json()
    assert capacity.suspend(row(session).pk, "a test")
    assert cell(alice, session, "1").json()["files_saved"] is True
    found = alice.client.get(f"/api/v1/executions/{started['execution']}").json()
    assert (found["status"], found["files_saved"]) == ("cancelled", False)


def in_background(caller: Caller, session: dict[str, Any]) -> Any:
    body = {"shell": "cat", "stdin": True, "background": True}
    return caller.client.post(f"{URL}/{session['id']}/processes", body)


def test_what_begins_in_its_next_sandbox_while_the_former_is_let_go_is_not_ended(
    alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = opened(alice)
    former = in_background(alice, session).json()
    (sandbox,) = kept_here.sandboxes()
    close, begun = sandbox.close, []

    def close_slowly() -> bool:
        begun.append(in_background(alice, session))
        return close()

    monkeypatch.setattr(sandbox, "close", close_slowly)
    assert capacity.suspend(row(session).pk, "a test")
    (started,) = begun
    assert started.status_code == 201, started.content
    (following,) = kept_here.sandboxes()
    assert following.processes.of(started.json()["pid"]).poll() is None
    assert Execution.objects.get(pk=started.json()["execution"]).is_open
    assert Execution.objects.get(pk=former["execution"]).status == "cancelled"


@pytest.mark.parametrize("how", ["asleep", "lost"])
def test_a_command_whose_sandbox_goes_while_it_is_started_there_is_recorded_and_told(
    alice: Caller, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Its number is another's in the next sandbox: there is nothing to be ended there."""
    session = opened(alice, saves="answer" if how == "asleep" else "never")
    cell(alice, session, write("f", "kept"))
    (sandbox,) = kept_here.sandboxes()
    start = sandbox.processes.start

    def start_slowly(wanted: Command) -> Process:
        started = start(wanted)
        sandbox.close()
        mark_lost(row(session), "it is gone")
        return started

    monkeypatch.setattr(sandbox.processes, "start", start_slowly)
    answer = in_background(alice, session)
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "conflict")
    assert (row(session).state, row(session).wakes) == (how, 0)
    record = Execution.objects.get(background=True)
    assert (record.status, record.pid) == ("cancelled", None)
    assert kept_here.sandboxes() == []


def test_over_its_total_age_a_sleeping_session_is_closed_and_its_files_go(alice: Caller) -> None:
    session = asleep(alice)
    expires = alice.client.get(f"{URL}/{session['id']}").json()["expires_at"]
    assert expires > row(session).used_at.isoformat()
    aged(session, used_at=5000)
    maintain()
    assert row(session).state == "asleep"
    aged(session, created_at=1801)
    maintain()
    assert row(session).state == "closed"
    assert not Workspace.objects.exists()
    blobs.collect()
    assert list(file_store(WORKSPACES).entries()) == []
    assert actions(session)[-2:] == ["closed", "cleaned"]
    assert cell(alice, session, "1").status_code == 409


def test_a_sleeping_session_is_closed_without_being_woken(alice: Caller) -> None:
    session = asleep(alice)
    assert alice.client.delete(f"{URL}/{session['id']}").status_code == 204
    assert (row(session).state, row(session).wakes) == ("closed", 0)
    assert saved(session) == {}
