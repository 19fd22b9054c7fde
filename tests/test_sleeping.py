"""A session that sleeps: what is there of it, for whom, and how it ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from django.test import Client

from executions.models import Session, Workspace
from executions.services.ledger.verification import verify
from executions.services.record import Caller as Asker
from executions.services.sessions.errors import Conflict
from executions.services.sessions.opening import opening
from executions.services.sessions.requests import SessionRequest
from executions.services.sessions.tending import OPENING_SECONDS, tend
from executions.services.waiting import wait_for as carry_out
from executions.services.workspaces import blobs, saving, sleeping, threads
from executions.storage import WORKSPACES, kept
from tests import kept_here
from tests.conftest import Caller
from tests.saved_files import actions, asleep, saved, write
from tests.sessions import URL, aged, cell, opened, row


@pytest.fixture
def _storage(tmp_path: Path, settings: Any) -> None:
    settings.DATA_DIR = tmp_path


pytestmark = pytest.mark.usefixtures("_storage", "kept_here")


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
    assert threads.wait_until_idle()
    assert [str(finding) for finding in verify().findings] == []


def test_a_long_sleep_is_not_taken_for_an_opening_that_never_ended(alice: Caller) -> None:
    session = asleep(alice, write("f", "kept"))
    aged(session, created_at=OPENING_SECONDS + 60, used_at=OPENING_SECONDS + 60)
    tend()
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
    first = carry_out(opening(wanted, Asker(alice.tenant)))
    with pytest.raises(Conflict, match="conversation"):
        carry_out(opening(wanted, Asker(alice.tenant)))
    assert carry_out(opening(wanted, Asker(charlie.tenant))).pk != first.pk
    alice.client.delete(f"{URL}/{first.pk}")
    assert carry_out(opening(wanted, Asker(alice.tenant))).pk != first.pk


def test_what_began_while_it_was_falling_asleep_keeps_it_awake(
    alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = opened(alice)
    real = saving.save

    def save(given: Session, **how: Any) -> Any:
        found = real(given, **how)
        cell(alice, session, write("late", "x"))
        return found

    with monkeypatch.context() as patch:
        patch.setattr(sleeping, "save", save)
        assert sleeping.put_to_sleep(row(session).pk, "a test") is False
    assert row(session).state == "open"
    assert len(kept_here.sandboxes()) == 1


def test_what_nobody_noticed_is_saved_before_it_sleeps(alice: Caller) -> None:
    session = opened(alice)
    cell(alice, session, write("f", "x"))
    assert threads.wait_until_idle()
    (sandbox,) = kept_here.sandboxes()
    (sandbox.folder / "daemons").write_text("own")
    aged(session, used_at=601)
    tend()
    assert row(session).state == "asleep"
    assert saved(session) == {"f": b"x", "daemons": b"own"}


def test_what_ran_in_the_background_when_it_fell_asleep_is_not_said_to_be_saved(
    alice: Caller,
) -> None:
    session = opened(alice, saves="answer")
    url = f"{URL}/{session['id']}/processes"
    started = alice.client.post(url, {"shell": "sleep 60", "background": True}).json()
    assert sleeping.put_to_sleep(row(session).pk, "a test")
    assert cell(alice, session, "1").json()["files_saved"] is True
    found = alice.client.get(f"/api/v1/executions/{started['execution']}").json()
    assert (found["status"], found["files_saved"]) == ("cancelled", False)


def test_over_its_total_age_a_sleeping_session_is_closed_and_its_files_go(alice: Caller) -> None:
    session = asleep(alice)
    expires = alice.client.get(f"{URL}/{session['id']}").json()["expires_at"]
    assert expires > row(session).used_at.isoformat()
    aged(session, used_at=5000)
    tend()
    assert row(session).state == "asleep"
    aged(session, created_at=1801)
    tend()
    assert row(session).state == "closed"
    assert not Workspace.objects.exists()
    blobs.collect()
    assert list(kept(WORKSPACES).entries()) == []
    assert actions(session)[-2:] == ["closed", "cleaned"]
    assert cell(alice, session, "1").status_code == 409


def test_a_sleeping_session_is_closed_without_being_woken(alice: Caller) -> None:
    session = asleep(alice)
    assert alice.client.delete(f"{URL}/{session['id']}").status_code == 204
    assert (row(session).state, row(session).wakes) == ("closed", 0)
    assert saved(session) == {}
