"""A session whose sandbox was lost sleeps where something of it was saved, and what was not is told."""

from __future__ import annotations

from typing import Any

import pytest

from executions.kernel.storage import Folder
from executions.runs.models import Execution
from executions.sessions.maintenance import maintain
from tests.conftest import Caller
from tests.support import kept_here
from tests.support.saved_files import actions, write
from tests.support.sessions import URL, cell, in_thread, opened, row, wait_for

pytestmark = [pytest.mark.usefixtures("own_storage", "kept_here"), pytest.mark.database]


def test_a_lost_sandbox_with_something_saved_is_a_session_asleep(alice: Caller) -> None:
    session = opened(alice, saves="answer")
    cell(alice, session, write("f", "kept"))
    kept_here.sandboxes()[0].close()
    ran = cell(alice, session, "print(open('f').read())").json()
    # Nothing had begun in the one that is gone: it ran in the next.
    assert (ran["status"], ran["stdout"], ran["restored"]) == ("succeeded", "kept\n", True)
    assert actions(session) == ["created", "opened", "asleep", "awake"]
    assert Execution.objects.count() == 2


def test_a_command_in_the_background_that_finds_it_lost_begins_in_the_next(alice: Caller) -> None:
    session = opened(alice, saves="answer")
    cell(alice, session, write("f", "kept"))
    url = f"{URL}/{session['id']}/processes"
    body = {"shell": "cat", "stdin": True, "background": True}
    former = alice.client.post(url, body).json()
    kept_here.sandboxes()[0].close()
    started = alice.client.post(url, body)
    assert started.status_code == 201, started.content
    (sandbox,) = kept_here.sandboxes()
    assert sandbox.processes.of(started.json()["pid"]).poll() is None
    assert Execution.objects.get(pk=started.json()["execution"]).is_open
    # What ran in the one that is gone ended with it.
    assert Execution.objects.get(pk=former["execution"]).status == "cancelled"


def test_the_cell_that_may_have_run_in_a_lost_sandbox_is_not_run_again(alice: Caller) -> None:
    session = opened(alice, saves="answer")
    cell(alice, session, write("f", "kept"))
    (sandbox,) = kept_here.sandboxes()
    answers: list[Any] = []
    code = "open('ran', 'a').write('x'); import time; time.sleep(60)"
    running = in_thread(lambda: answers.append(cell(alice, session, code)))
    wait_for(lambda: (sandbox.folder / "ran").exists())
    sandbox.known["default"][1].end()
    running.join()
    (told,) = answers
    assert (told.status_code, told.json()["error"]["code"]) == (409, "conflict")
    assert "may be lost" in told.json()["error"]["message"]
    assert row(session).state == "asleep"
    after = cell(alice, session, "import os; print(sorted(os.listdir()))").json()
    assert (after["stdout"], after["restored"]) == ("['f']\n", True)
    found = alice.client.get(f"/api/v1/executions/{told.json()['id']}").json()
    assert (found["status"], found["files_saved"]) == ("error", False)


def test_what_was_lost_unsaved_is_told(alice: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    session = opened(alice, saves="answer")
    cell(alice, session, write("f", "kept"))

    def refuse(*_: object) -> int:
        raise OSError("away")

    with monkeypatch.context() as patch:
        patch.setattr(Folder, "save_stream", refuse)
        cell(alice, session, write("f", "never saved"))
    kept_here.sandboxes()[0].close()
    maintain()
    found = alice.client.get(f"{URL}/{session['id']}").json()
    assert found["state"] == "asleep"
    assert found["files"]["problem"] == "What had changed since then was lost with its sandbox."
    assert cell(alice, session, "print(open('f').read())").json()["stdout"] == "kept\n"


def test_a_stale_look_at_a_former_sandbox_loses_no_woken_session(alice: Caller) -> None:
    session = opened(alice, saves="answer")
    cell(alice, session, write("f", "kept"))
    stale = row(session)
    kept_here.sandboxes()[0].close()
    cell(alice, session, "1")
    assert row(session).wakes == 1
    from executions.sessions.ending import mark_lost

    mark_lost(stale, "it was gone")
    assert row(session).state == "open"
    assert stale.ref == row(session).ref
