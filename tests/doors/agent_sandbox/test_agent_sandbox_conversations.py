"""A user and a session id of a tenant own one sandbox: when it begins, resets, sleeps and ends."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from django.db import connections
from django.db.models.functions import Now
from django.utils import timezone
from django_q.models import Schedule

from executions.capabilities.conversations import Conversation
from executions.kernel.storage import WORKSPACES, file_store
from executions.ledger.models import LedgerEntry
from executions.ledger.verification import verify
from executions.sessions import maintenance
from executions.sessions.maintenance import maintain
from executions.sessions.models import Blob, Session, StoredTotal, Workspace, WorkspaceFile
from executions.sessions.storage import blobs
from tests.conftest import Caller
from tests.support.agent_sandbox import (
    content,
    control,
    download_url,
    execute,
    listed,
    output,
    upload,
)
from tests.support.sessions import aged

pytestmark = pytest.mark.one_database

pytest_plugins = ["tests.support.agent_sandbox"]


def side_by_side(*calls: Callable[[], Any]) -> list[Any]:
    def done(call: Callable[[], Any]) -> Any:
        try:
            return call()
        finally:
            connections.close_all()

    with ThreadPoolExecutor(len(calls)) as threads:
        return list(threads.map(done, calls))


def test_colleagues_share_it_and_strangers_have_their_own(
    conversations: None, alice: Caller, bob: Caller, charlie: Caller
) -> None:
    output(alice, "x = 'ours'; open('f', 'w').write('ours')", session_id="s")
    assert output(bob, "x", session_id="s") == "'ours'\n"
    assert listed(bob, session_id="s") == ["f"]
    assert "NameError" in output(charlie, "x", session_id="s")
    assert listed(charlie, session_id="s") == []
    assert download_url(charlie, "f", session_id="s").status_code == 404
    assert "error" in execute(charlie, "1", session_id="s", inputs=["f"]).json()
    assert control(charlie, "reset", session_id="s").json()["status"] == "success"
    assert control(charlie, "stop", session_id="s").json() == {"status": "success"}
    assert output(alice, "x", session_id="s") == "'ours'\n"
    keys = Session.objects.values_list("conversation", flat=True)
    assert len(set(keys)) == 1, "the same ids of two tenants"
    assert Session.objects.filter(tenant=alice.tenant).count() == 1


def test_ids_are_any_text_and_none_runs_into_another(
    conversations: None, alice: Caller, settings: Any
) -> None:
    pairs = [("ab", "c"), ("a", "bc"), ("1:a", "b"), ("a\0b", ""), ("<b>'\"/../", "\u202e\n"),
             ("x" * 4096, "y" * 4096), ("A", "c"), ("\uff41", "c")]  # fmt: skip
    keys = {Conversation(user, session).key for user, session in pairs}
    assert len(keys) == len(pairs)
    # Files, because some of so many go to sleep for the others.
    for number, (user, session) in enumerate(pairs):
        assert (
            output(alice, f"_ = open('n', 'w').write('{number}')", user, session_id=session) == ""
        )
    for number, (user, session) in enumerate(pairs):
        assert output(alice, "open('n').read()", user, session_id=session) == f"'{number}'\n"
    assert Conversation("u").key == Conversation("u", "default").key
    assert output(alice, "n = 'left out'", "u") == ""
    assert output(alice, "n", "u", session_id="default") == "'left out'\n"
    assert output(alice, "n", "u", session_id=None) == "'left out'\n"


def test_of_requests_at_once_one_opens_it_and_the_others_wait(
    conversations: None, alice: Caller
) -> None:
    calls = [
        lambda n=n: output(alice, f"seen = [*globals().get('seen', []), {n}]") for n in range(5)
    ]
    assert side_by_side(*calls) == [""] * 5
    assert sorted(eval(output(alice, "seen"))) == [0, 1, 2, 3, 4]
    assert Session.objects.count() == 1


def test_a_reset_forgets_variables_and_keeps_files(conversations: None, alice: Caller) -> None:
    output(alice, "x = 1; open('f', 'w').write('kept')")
    answer = control(alice, "reset")
    assert answer.status_code == 200
    session = Session.objects.get()
    assert answer.json() == {
        "status": "success",
        "output": "Kernel reset.\n",
        "container_id": str(session.pk),
    }
    assert "NameError" in output(alice, "x")
    assert output(alice, "open('f').read()") == "'kept'\n"


def test_a_stop_ends_it_with_its_files(conversations: None, alice: Caller) -> None:
    assert control(alice, "stop").json() == {"status": "success"}
    assert Session.objects.count() == 0
    artifacts = execute(alice, "x = 1; open('f', 'w').write('gone')").json()["artifacts"]
    assert content(artifacts[0]["download_url"]) == b"gone"
    assert control(alice, "stop").json() == {"status": "success"}
    assert control(alice, "stop").json() == {"status": "success"}
    assert listed(alice) == []
    assert (WorkspaceFile.objects.count(), Blob.objects.count()) == (0, 0)
    assert alice.client.get(artifacts[0]["download_url"]).status_code == 404
    assert "NameError" in output(alice, "x")
    assert output(alice, "import os; os.path.exists('f')") == "False\n"
    assert Session.objects.count() == 2


def test_files_that_are_kept_are_there_when_the_conversation_goes_on(
    conversations: None, alice: Caller, bob: Caller, charlie: Caller, settings: Any
) -> None:
    settings.DELETE_S3_ON_CLEANUP = False
    made = "import os; os.mkdir('d'); open('d/f', 'w').write('kept'); x = 1"
    [artifact] = execute(alice, made).json()["artifacts"]
    first = Session.objects.get()
    control(alice, "stop")
    assert content(artifact["download_url"]) == b"kept"
    # Nothing runs, and they are found.
    assert (listed(alice), listed(bob)) == (["d/f"], ["d/f"])
    assert content(download_url(bob, "d/f").json()["download_url"]) == b"kept"
    for mine in ({}, {"session_id": "other"}):
        assert listed(charlie, **mine) == []
        assert listed(alice, user_id="somebody else", **mine) == []
    assert output(charlie, "import os; os.path.exists('d')") == "False\n"
    found = execute(bob, "'x' in globals(), open('d/f').read()", inputs=["d/f"]).json()
    assert found == {"output": "(False, 'kept')\n", "artifacts": []}
    second = Session.objects.exclude(pk=first.pk).get(tenant=alice.tenant)
    assert [each.stated["from"] for each in LedgerEntry.objects.filter(kind="session")
            if each.stated["action"] == "inherited"] == [str(first.pk)]  # fmt: skip
    output(alice, "os = __import__('os'); os.remove('d/f'); open('g', 'w').write('new')")
    assert listed(alice) == ["g"]
    # Over its age it ends as well, and once more it goes on.
    aged({"id": str(second.pk)}, created_at=1801)
    maintain()
    assert listed(alice) == ["g"]
    assert output(alice, "open('g').read()") == "'new'\n"
    assert Workspace.objects.filter(tenant=alice.tenant).count() == 1
    rows = WorkspaceFile.objects.filter(workspace__tenant=alice.tenant).count()
    assert StoredTotal.objects.get(tenant=alice.tenant).files == rows
    assert [str(finding) for finding in verify().findings] == []
    # What is not to be kept any longer is nobody's any more.
    settings.DELETE_S3_ON_CLEANUP = True
    control(alice, "stop")
    assert listed(alice) == []
    assert output(alice, "import os; os.path.exists('g')") == "False\n"


def test_kept_files_are_not_lost_by_a_sandbox_that_does_not_open(
    conversations: None, alice: Caller, settings: Any
) -> None:
    settings.DELETE_S3_ON_CLEANUP = False
    output(alice, "_ = open('f', 'w').write('kept')")
    control(alice, "stop")
    [entry] = file_store(WORKSPACES).entries()
    file_store(WORKSPACES).replace(entry.name, b"evil")
    assert "error" in execute(alice, "1").json()
    assert listed(alice) == ["f"]
    file_store(WORKSPACES).replace(entry.name, b"kept")
    assert output(alice, "open('f').read()") == "'kept'\n"


@pytest.mark.parametrize("at_once", [True, False])
def test_the_bytes_of_a_removed_file_go_as_is_set(
    conversations: None, alice: Caller, settings: Any, at_once: bool
) -> None:
    settings.DELETE_S3_ON_DELETE = at_once
    made = "for n in 'ab': open(n, 'w').write('same')\nopen('c', 'w').write('other')"
    url = execute(alice, made).json()["artifacts"][0]["download_url"]
    output(alice, "import os; os.remove('a')")
    assert content(url) == b"same", "another file has these bytes"
    output(alice, "os.remove('b')")
    assert listed(alice) == ["c"]
    assert alice.client.get(url).status_code == (404 if at_once else 200)
    Blob.objects.update(kept_until=Now() - timedelta(seconds=1))
    blobs.collect()
    assert alice.client.get(url).status_code == 404
    assert content(download_url(alice, "c").json()["download_url"]) == b"other"


def test_unused_it_sleeps_and_wakes_with_its_files_and_without_variables(
    conversations: None, alice: Caller
) -> None:
    output(alice, "x = 1; open('f', 'w').write('kept')")
    Session.objects.update(used_at=Now() - timedelta(seconds=601))
    maintain()
    assert Session.objects.get().state == "asleep"
    assert listed(alice) == ["f"]
    assert content(download_url(alice, "f").json()["download_url"]) == b"kept"
    assert Session.objects.get().state == "asleep"
    assert output(alice, "'x' in globals(), open('f').read()", inputs=["f"]) == "(False, 'kept')\n"
    Session.objects.update(created_at=Now() - timedelta(seconds=1801))
    maintain()
    assert listed(alice) == []
    assert output(alice, "import os; os.path.exists('f')") == "False\n"


def test_a_sandbox_that_dies_says_so_and_its_saved_files_are_there_after(
    conversations: None, alice: Caller
) -> None:
    output(alice, "x = 1; open('f', 'w').write('kept')")
    found = execute(alice, "import os\nos._exit(3)").json()
    assert "output" in found or "error" in found
    assert "NameError" in output(alice, "x")
    assert output(alice, "open('f').read()") == "'kept'\n"


def test_a_tenant_that_may_run_no_more_is_told_when_to_come_again(
    conversations: None, alice: Caller
) -> None:
    output(alice, "1")
    alice.tenant.max_running = 0
    alice.tenant.save()
    asked = execute(alice, "1")
    assert asked.status_code == 200
    assert asked.json()["error"].startswith("SB008: ")
    assert asked["Retry-After"] == "1"


def test_its_times_are_those_of_agent_sandbox(
    conversations: None, alice: Caller, settings: Any
) -> None:
    output(alice, "1")
    session = Session.objects.get()
    assert (session.idle_seconds, session.max_seconds) == (600, 1800)
    assert (session.saves, session.subject, session.name) == ("answer", "alice", "")


def test_a_caller_of_our_own_api_sees_it_and_cannot_take_its_place(
    conversations: None, alice: Caller, charlie: Caller
) -> None:
    output(alice, "1")
    session = Session.objects.get()
    assert alice.client.get(f"/api/v1/sessions/{session.pk}").status_code == 200
    assert charlie.client.get(f"/api/v1/sessions/{session.pk}").status_code == 404
    taken = alice.client.post("/api/v1/sessions", {"conversation": session.conversation})
    assert taken.status_code == 400


def test_sessions_are_tended_as_often_as_is_set_and_by_one(
    db: None, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tended: list[int] = []
    monkeypatch.setattr(maintenance, "maintain", lambda: tended.append(1))
    assert not maintenance.maintain_if_due(), "the schedule has not been made yet"
    Schedule.objects.create(name=maintenance.TASK, func=maintenance.TASK, next_run=timezone.now())
    assert [maintenance.maintain_if_due() for _ in range(3)] == [True, False, False]
    left = Schedule.objects.get().next_run - timezone.now()
    assert timedelta(seconds=10) < left <= timedelta(seconds=15)
    settings.SANDBOX_REAPER_INTERVAL = 5
    assert maintenance.maintain_if_due(), "what was meant for a longer interval is due"
    Schedule.objects.update(next_run=timezone.now() - timedelta(seconds=1))
    assert maintenance.maintain_if_due()
    assert len(tended) == 3


def test_files_sent_wait_for_the_sandbox_to_be_there(conversations: None, alice: Caller) -> None:
    answers = side_by_side(*(lambda n=n: upload(alice, b"x", path=f"f{n}") for n in range(3)))
    assert [answer.status_code for answer in answers] == [200] * 3
    assert listed(alice) == ["f0", "f1", "f2"]
    assert Session.objects.count() == 1
