"""A sleeping session that is used: it wakes once, with what was saved, or stays asleep and says so."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from django.db import OperationalError
from django.db.models import QuerySet

from executions.kernel import background as kernel_background
from executions.kernel.coroutines import run_sync as carry_out
from executions.kernel.storage import WORKSPACES, file_store
from executions.runs.heartbeat import Heartbeat, registered_steps
from executions.runs.models import Execution
from executions.sessions import capacity, maintenance
from executions.sessions.ending import mark_lost
from executions.sessions.models import Session
from executions.sessions.storage import file_saves, wake
from executions.tenants.models import Tenant
from providers.errors import CreationFailed
from tests.conftest import Caller
from tests.support import kept_here
from tests.support.folder_files import FolderFiles
from tests.support.held import bounded
from tests.support.running import run_queued
from tests.support.saved_files import asleep, saved, still_asleep, write
from tests.support.sessions import URL, aged, cell, in_thread, opened, row, wait_for

pytestmark = [pytest.mark.usefixtures("own_storage", "kept_here"), pytest.mark.database]


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("post", "processes", {"shell": "true"}),
        ("post", "processes", {"shell": "true", "background": True}),
        ("post", "contexts", {"language": "python", "id": "another"}),
        ("post", "interrupt", {}),
        ("post", "reset", {}),
    ],
)
def test_every_use_but_that_of_its_files_wakes_it(
    alice: Caller, method: str, path: str, body: dict[str, Any]
) -> None:
    session = asleep(alice)
    answer = getattr(alice.client, method)(f"{URL}/{session['id']}/{path}", body)
    assert answer.status_code < 300, answer.content
    assert row(session).state == "open"
    assert row(session).wakes == 1
    (sandbox,) = kept_here.sandboxes()
    assert (sandbox.folder / "f").read_text() == "kept"


def test_one_that_could_not_be_woken_is_still_called_clean(alice: Caller, settings: Any) -> None:
    session = asleep(alice)
    settings.SESSIONS_PER_TENANT = 0
    assert cell(alice, session, "1").status_code == 429
    assert alice.client.get(f"{URL}/{session['id']}").json()["files"]["unsaved_since"] is None


def test_a_queued_cell_wakes_it_in_the_worker(alice: Caller) -> None:

    session = asleep(alice)
    queued = cell(alice, session, "print(open('f').read())", mode="async")
    assert queued.status_code == 202
    run_queued()
    ran = alice.client.get(f"/api/v1/executions/{queued.json()['id']}").json()
    assert (ran["status"], ran["stdout"], ran["restored"]) == ("succeeded", "kept\n", True)


def test_the_first_cell_after_a_wake_says_so_whoever_woke_it(alice: Caller) -> None:
    session = asleep(alice)
    made = alice.client.post(f"{URL}/{session['id']}/contexts", {"language": "python", "id": "b"})
    assert made.status_code == 201
    assert cell(alice, session, "1").json()["restored"] is True
    assert cell(alice, session, "1").json()["restored"] is False


def test_a_wake_that_its_first_run_could_not_tell_is_told_by_the_next(alice: Caller) -> None:
    session = asleep(alice)
    first = in_thread(lambda: cell(alice, session, "import time; time.sleep(60)"))
    running = Execution.objects.filter(session=session["id"], status="running")
    wait_for(lambda: row(session).state == "open" and running.exists())
    alice.client.post(f"/api/v1/executions/{running.get().pk}/cancel")
    first.join()
    # On a busy machine it may not have stopped in time, which costs the sandbox: that is told too.
    answers = (cell(alice, session, "1").json() for _ in range(3))
    assert next(each for each in answers if "restored" in each)["restored"] is True
    assert cell(alice, session, "1").json()["restored"] is False


def test_contexts_are_there_by_name_and_empty(alice: Caller) -> None:
    session = opened(alice)
    url = f"{URL}/{session['id']}"
    alice.client.post(f"{url}/contexts", {"language": "python", "id": "other", "cwd": "d"})
    cell(alice, session, "y = 1; open('f', 'w').write('x')", context="other")
    assert kernel_background.wait_for_keyed_work()
    assert capacity.suspend(row(session).pk, "a test")
    ran = cell(alice, session, "import os; print('y' in globals(), os.listdir())", context="other")
    assert ran.json()["stdout"] == "False ['f']\n"
    assert [each["id"] for each in row(session).contexts] == ["default", "other"]


def test_two_who_come_at_once_wake_it_once(
    alice: Caller, bob: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = asleep(alice)
    answers: list[Any] = []
    callers = [
        in_thread(
            lambda caller=caller: answers.append(
                cell(caller, session, "print(open('f').read())").json()
            )
        )
        for caller in (alice, bob, alice, bob)
    ]
    for each in callers:
        each.join()
    assert [each["stdout"] for each in answers] == ["kept\n"] * 4
    assert sum(each["restored"] for each in answers) == 1
    assert row(session).wakes == 1
    assert len(kept_here.sandboxes()) == 1


def test_without_room_it_stays_asleep_and_says_so(
    alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = asleep(alice)
    bounded(alice, max_sessions=0)
    refused = cell(alice, session, "1")
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "SB008")
    assert refused.json()["error"]["field"] == "sessions"
    assert row(session).state == "asleep"
    assert row(session).waking_since is None
    bounded(alice, max_sessions=1)
    other = opened(alice)
    assert cell(alice, session, "print(open('f').read())").json()["stdout"] == "kept\n"
    # It made room as for a new one: the other sleeps in its turn.
    assert row(other).state == "asleep"


def test_a_raised_floor_is_asked_again(alice: Caller, settings: Any) -> None:
    session = asleep(alice)
    settings.MINIMUM_ISOLATION = "microvm"
    refused = cell(alice, session, "1")
    assert refused.status_code >= 400
    assert "minimum_isolation" in refused.json()["error"]["message"]
    assert row(session).state == "asleep"
    assert kept_here.sandboxes() == []


def test_a_wake_that_fails_leaves_it_asleep_and_no_sandbox(
    alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = asleep(alice)

    def fail(*_: object) -> None:
        raise CreationFailed("The disk is full.")

    with monkeypatch.context() as patch:
        patch.setattr(FolderFiles, "write_archive", fail)
        assert cell(alice, session, "1").status_code == 503
    assert row(session).state == "asleep"
    wait_for(lambda: kept_here.sandboxes() == [])
    assert cell(alice, session, "print(open('f').read())").json()["stdout"] == "kept\n"


def test_bytes_that_are_not_what_was_saved_are_not_restored(alice: Caller) -> None:
    session = asleep(alice)
    (entry,) = file_store(WORKSPACES).entries()
    file_store(WORKSPACES).replace(entry.name, b"evil")
    refused = cell(alice, session, "1")
    assert refused.status_code >= 400
    assert row(session).state == "asleep"
    file_store(WORKSPACES).replace(entry.name, b"kept")
    assert cell(alice, session, "print(open('f').read())").json()["stdout"] == "kept\n"


def test_what_a_dead_process_was_waking_is_woken_by_another(
    alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = asleep(alice)

    class Died(BaseException):
        pass

    async def die(*_: object) -> Any:
        raise Died

    with monkeypatch.context() as patch:
        patch.setattr(wake, "_wake", die)
        patch.setattr(wake, "_give_back", lambda *_: None)
        with pytest.raises(Died):
            carry_out(wake.ensure_awake(row(session)))
    assert row(session).waking_since is not None
    aged(session, waking_since=2000)
    assert cell(alice, session, "print(open('f').read())").json()["stdout"] == "kept\n"


@pytest.mark.parametrize("step", ["_put", "reserve_slot"])
def test_a_wake_that_ends_with_the_database_away_is_given_back_when_it_is_there_again(
    alice: Caller, lease: Heartbeat, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    session = asleep(alice)
    room, update, away = wake.reserve_slot, QuerySet.update, [True]

    def fail(*_: object) -> None:
        raise OperationalError("away")

    async def claim_unanswered(tenant: Tenant, reserve: Callable[[], int]) -> int:
        assert (await room(tenant, reserve)) == 1
        raise OperationalError("the answer to the commit was lost")

    def update_if_there(rows: QuerySet[Any], **values: Any) -> int:
        if away and values == {"waking_since": None, "process": None}:
            raise OperationalError("away")
        return update(rows, **values)

    monkeypatch.setattr(QuerySet, "update", update_if_there)
    with monkeypatch.context() as patch:
        patch.setattr(wake, step, fail if step == "_put" else claim_unanswered)
        assert cell(alice, session, "1").status_code == 503
    assert row(session).waking_since is not None
    steps = registered_steps()
    with pytest.raises(OperationalError):
        lease.turn(steps)
    away.clear()
    lease.turn(steps)
    assert (row(session).waking_since, row(session).process) == (None, None)
    assert cell(alice, session, "print(open('f').read())").json()["stdout"] == "kept\n"
    assert not wake._left


def test_after_a_wake_only_what_changes_is_fetched(
    alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = asleep(alice)
    cell(alice, session, write("g", "new"))
    assert kernel_background.wait_for_keyed_work()
    assert saved(session) == {"f": b"kept", "g": b"new"}
    assert capacity.suspend(row(session).pk, "a test")
    assert cell(alice, session, "import os; print(sorted(os.listdir()))").json()["stdout"] == (
        "['f', 'g']\n"
    )


def with_something_to_save(caller: Caller) -> tuple[dict[str, Any], kept_here.Kept]:
    """A session and its sandbox, in which a saved file has changed since."""
    session = opened(caller, saves="answer")
    cell(caller, session, write("f", "old"))
    (sandbox,) = kept_here.sandboxes()
    (sandbox.folder / "f").write_text("of the former")
    return session, sandbox


def test_a_save_of_the_former_sandbox_changes_nothing_once_its_files_are_restored(
    alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, former = with_something_to_save(alice)
    commit, furnished = file_saves._commit, wake.restore_files
    uploaded, may_commit = threading.Event(), threading.Event()

    def commit_late(*arguments: Any) -> Any:
        uploaded.set()
        assert may_commit.wait(60)
        return commit(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(file_saves, "_commit", commit_late)
        save = in_thread(lambda: maintenance.save_now(row(session).pk))
        assert uploaded.wait(60)
    mark_lost(row(session), "out of memory")
    former.close()
    in_storage: list[dict[str, bytes | None]] = []

    async def furnished_before_the_save(*arguments: Any) -> str:
        mark = await furnished(*arguments)
        may_commit.set()
        save.join()
        in_storage.append(saved(session))
        return mark

    monkeypatch.setattr(wake, "restore_files", furnished_before_the_save)
    assert cell(alice, session, "print(open('f').read())").json()["stdout"] == "old\n"
    assert in_storage == [{"f": b"old"}]


def test_a_save_of_the_former_sandbox_that_began_before_the_wake_is_not_written_down_after_it(
    alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, _ = with_something_to_save(alice)
    ensure_not_ended, has_session, is_awake = (
        file_saves.ensure_not_ended,
        threading.Event(),
        threading.Event(),
    )

    def stall(found: Session) -> None:
        if not has_session.is_set():
            has_session.set()
            assert is_awake.wait(60)
        ensure_not_ended(found)

    monkeypatch.setattr(file_saves, "ensure_not_ended", stall)
    save = in_thread(lambda: maintenance.save_now(row(session).pk))
    assert has_session.wait(60)
    mark_lost(row(session), "it did not answer")
    # It goes on all the same, and is asked by who knows it still.
    assert cell(alice, session, "print(open('f').read())").json()["stdout"] == "old\n"
    is_awake.set()
    save.join()
    assert saved(session) == {"f": b"old"}


def test_a_context_of_one_asleep_is_ended_without_waking_it(alice: Caller) -> None:
    session = opened(alice)
    url = f"{URL}/{session['id']}/contexts"
    alice.client.post(url, {"language": "python", "id": "other"})
    cell(alice, session, write("f", "x"))
    assert kernel_background.wait_for_keyed_work()
    assert capacity.suspend(row(session).pk, "a test")
    assert alice.client.delete(f"{url}/other").status_code == 204
    assert still_asleep(session)
    assert cell(alice, session, "1", context="other").status_code == 400
    assert cell(alice, session, "1").status_code == 200
    (sandbox,) = kept_here.sandboxes()
    assert [each.id for each in sandbox.contexts.list()] == ["default"]
