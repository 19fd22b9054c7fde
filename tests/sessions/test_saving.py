"""The files of a session in storage: what is saved, when, and what is told of it."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.db.models import F, Model
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from executions.kernel import background as kernel_background
from executions.kernel.storage import WORKSPACES, Folder, file_store
from executions.runs.models import Execution
from executions.runs.requests import Conflict
from executions.sessions import capacity, maintenance
from executions.sessions.maintenance import maintain
from executions.sessions.models import (
    Blob,
    LooseFile,
    Session,
    StoredTotal,
    Workspace,
    WorkspaceFile,
)
from executions.sessions.storage import blobs, file_saves
from tests.conftest import Caller
from tests.support import kept_here
from tests.support.saved_files import counts_are_right, looked_at, saved, write
from tests.support.sessions import URL, aged, cell, in_thread, opened, row, wait_for

pytestmark = [pytest.mark.usefixtures("own_storage", "kept_here"), pytest.mark.database]


def tables_of(*models: type[Model]) -> set[str]:
    return {model._meta.db_table for model in models}


ROWS = tables_of(Session, Execution)
FILES = tables_of(Workspace, WorkspaceFile, Blob, LooseFile, StoredTotal)


def for_saving(statements: Iterable[str]) -> list[tuple[str, list[str]]]:
    """Those that saving could add to: of saved files, or of nothing but sessions and executions.

    What else is asked depends on how slow the machine is: much of it is remembered for a second.
    """
    found = [(each.split()[0], set(re.findall(r"\b[a-z]+_\w+", each))) for each in statements]
    known = set(connection.introspection.table_names())
    named = [(verb, names & known) for verb, names in found]
    return sorted(
        (verb, sorted(names)) for verb, names in named if names & FILES or (names and names <= ROWS)
    )


def test_an_answer_that_says_so_has_its_files_in_storage(alice: Caller) -> None:
    session = opened(alice, saves="answer")
    code = "import os; os.makedirs('d/e'); " + write("d/f", "one") + "; os.symlink('d', 'link')"
    ran = cell(alice, session, code).json()
    assert (ran["files_saved"], ran["restored"]) == (True, False)
    assert saved(session) == {"d": None, "d/e": None, "d/f": b"one", "link": None}
    files = looked_at(alice, session)["files"]
    assert (files["count"], files["bytes"]) == (4, 3)
    assert (files["unsaved_since"], files["problem"]) == (None, None)
    assert files["saved_at"] is not None
    changed = cell(alice, session, write("d/f", "two!") + "; os.rmdir('d/e')").json()
    assert changed["files_saved"] is True
    assert saved(session) == {"d": None, "d/f": b"two!", "link": None}
    assert alice.client.get(f"/api/v1/executions/{ran['id']}").json()["files_saved"] is True
    counts_are_right(session)


def test_behind_the_answer_the_record_says_it_when_it_is_so(alice: Caller) -> None:
    session = opened(alice)
    assert session["saves"] == "background"
    ran = cell(alice, session, write("f", "x")).json()
    assert ran["files_saved"] is False
    assert kernel_background.wait_for_keyed_work()
    assert saved(session) == {"f": b"x"}
    assert alice.client.get(f"/api/v1/executions/{ran['id']}").json()["files_saved"] is True
    assert looked_at(alice, session)["files"]["unsaved_since"] is None


def test_nothing_is_saved_where_that_was_asked_for(alice: Caller) -> None:
    session = opened(alice, saves="never")
    assert cell(alice, session, write("f", "x")).json()["files_saved"] is False
    assert kernel_background.wait_for_keyed_work()
    assert not Workspace.objects.exists()
    assert looked_at(alice, session)["files"]["unsaved_since"] is None


@pytest.mark.usefixtures("no_lookup_grows_old")
def test_saving_behind_the_answer_costs_the_cell_no_statement(alice: Caller) -> None:
    taken = {}
    for saves in ("never", "background"):
        session = opened(alice, saves=saves)
        cell(alice, session, "1")
        assert kernel_background.wait_for_keyed_work()
        # Of this thread's connection: those who save have their own.
        with CaptureQueriesContext(connection) as queries:
            cell(alice, session, write("f", "x"))
        assert kernel_background.wait_for_keyed_work()
        taken[saves] = for_saving(query["sql"] for query in queries)
    assert taken["background"] == taken["never"] != []


UNCHANGED = file_saves.Claimed("mark", {}, [], False)


def test_a_save_that_finds_nothing_new_writes_two_rows(
    alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = opened(alice)
    cell(alice, session, write("f", "x"))
    assert kernel_background.wait_for_keyed_work()
    before = Workspace.objects.get()
    monkeypatch.setattr(file_saves, "changes_of", lambda *_, **__: UNCHANGED)
    cell(alice, session, "1")
    assert kernel_background.wait_for_keyed_work()
    Session.objects.update(unsaved_since=timezone.now())
    with CaptureQueriesContext(connection) as queries:
        found = file_saves.save(Session.objects.get())
    asked = for_saving(each["sql"] for each in queries)
    written = [names for verb, names in asked if verb != "SELECT"]
    # The second asks besides whether the sandbox is still the session's.
    assert written == [
        sorted(tables_of(Session)),
        sorted(tables_of(Session) | tables_of(Workspace)),
    ]
    assert (found.changed, found.removed, found.is_complete) == ([], [], True)
    now = Workspace.objects.get()
    assert (now.mark, now.files, now.seen_turns) == ("mark", 1, before.seen_turns + 1)
    assert looked_at(alice, session)["files"]["unsaved_since"] is None
    counts_are_right(session)


def test_a_save_that_finds_nothing_new_gives_way_to_another(
    alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither its mark counts then, nor that all is saved."""
    session = opened(alice)
    cell(alice, session, write("f", "x"))
    assert kernel_background.wait_for_keyed_work()
    Session.objects.update(unsaved_since=timezone.now())
    look = file_saves.changes_of
    unsaved: list[bool] = []

    def look_beside_another(*told: Any, **known: Any) -> Any:
        monkeypatch.setattr(file_saves, "changes_of", look_again)
        Workspace.objects.update(version=F("version") + 1)
        return UNCHANGED

    def look_again(*told: Any, **known: Any) -> Any:
        unsaved.append(Session.objects.get().unsaved_since is not None)
        return look(*told, **known)

    monkeypatch.setattr(file_saves, "changes_of", look_beside_another)
    assert list(file_saves.save(Session.objects.get()).changed) == ["f"]
    assert unsaved == [True]
    assert Workspace.objects.get().mark != "mark"
    assert looked_at(alice, session)["files"]["unsaved_since"] is None


def test_a_save_that_finds_nothing_new_in_a_sandbox_that_was_lost_meanwhile_says_nothing(
    alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = opened(alice)
    cell(alice, session, write("f", "x"))
    assert kernel_background.wait_for_keyed_work()
    before = Workspace.objects.get()

    def look_at_a_lost_one(*told: Any, **known: Any) -> Any:
        Session.objects.update(state=Session.State.ASLEEP, ref=None)
        return UNCHANGED

    monkeypatch.setattr(file_saves, "changes_of", look_at_a_lost_one)
    with pytest.raises(Conflict):
        file_saves.save(Session.objects.get())
    now = Workspace.objects.get()
    assert (now.mark, now.saved_at, now.version) == (before.mark, before.saved_at, before.version)


def test_a_single_run_has_no_files_to_be_saved(alice: Caller) -> None:
    ran = alice.client.post("/api/v1/executions", {"code": "1"})
    assert "files_saved" in ran.json() or ran.status_code >= 400
    assert ran.json().get("files_saved") is None
    assert not Workspace.objects.exists()


def test_what_a_file_operation_changes_is_saved_too(alice: Caller) -> None:
    session = opened(alice, saves="answer")
    files = f"{URL}/{session['id']}/files"
    put = alice.client.put(f"{files}/content?path=a/b", b"x", content_type="application/x")
    assert put.status_code == 200
    assert saved(session) == {"a": None, "a/b": b"x"}
    assert alice.client.post(f"{files}/move", {"from": "a/b", "to": "c"}).status_code == 200
    assert alice.client.post(f"{files}/mkdir", {"path": "d"}).status_code == 201
    assert saved(session) == {"a": None, "c": b"x", "d": None}
    assert alice.client.delete(f"{files}?path=a").status_code == 204
    assert saved(session) == {"c": b"x", "d": None}
    assert looked_at(alice, session)["files"]["unsaved_since"] is None


def test_commands_are_saved_as_cells_are(alice: Caller) -> None:
    session = opened(alice, saves="answer")
    ran = alice.client.post(f"{URL}/{session['id']}/processes", {"shell": "echo hi > out"}).json()
    assert ran["files_saved"] is True
    assert saved(session) == {"out": b"hi\n"}


def test_the_same_content_is_in_storage_once(alice: Caller, charlie: Caller) -> None:
    first, second = opened(alice, saves="answer"), opened(alice, saves="answer")
    for session in (first, second):
        cell(alice, session, write("a", "same") + ";" + write("b", "same"))
    stranger = opened(charlie, saves="answer")
    cell(charlie, stranger, write("a", "same"))
    assert Blob.objects.count() == 2
    assert len(list(file_store(WORKSPACES).entries())) == 2


def test_while_something_runs_a_session_is_not_called_clean(alice: Caller) -> None:
    session = opened(alice)
    alice.client.post(f"{URL}/{session['id']}/contexts", {"language": "python", "id": "other"})
    (sandbox,) = kept_here.sandboxes()
    long = in_thread(lambda: cell(alice, session, "import time; time.sleep(30)", context="other"))
    wait_for(lambda: sandbox.known["other"][1].busy)
    ran = cell(alice, session, write("f", "x")).json()
    assert kernel_background.wait_for_keyed_work()
    assert saved(session) == {"f": b"x"}
    assert looked_at(alice, session)["files"]["unsaved_since"] is not None
    # What had ended is saved, whatever else runs.
    assert alice.client.get(f"/api/v1/executions/{ran['id']}").json()["files_saved"] is True
    alice.client.post(f"{URL}/{session['id']}/interrupt", {"context": "other"})
    long.join()
    assert kernel_background.wait_for_keyed_work()
    assert looked_at(alice, session)["files"]["unsaved_since"] is None


def test_what_a_dead_process_left_is_saved_by_the_schedule(
    alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = opened(alice)
    with monkeypatch.context() as patch:
        patch.setattr(maintenance, "save_now", lambda _: None)
        cell(alice, session, write("f", "x"))
        assert kernel_background.wait_for_keyed_work()
    assert saved(session) == {}
    assert looked_at(alice, session)["files"]["unsaved_since"] is not None
    aged(session, unsaved_since=61)
    maintain()
    assert saved(session) == {"f": b"x"}
    assert looked_at(alice, session)["files"]["unsaved_since"] is None


def test_a_storage_that_fails_costs_no_cell_and_no_file(
    alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = opened(alice, saves="answer")
    cell(alice, session, write("f", "before"))

    def refuse(*_: object) -> int:
        raise OSError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(Folder, "save_stream", refuse)
        ran = cell(alice, session, write("f", "after") + "; print('ran')").json()
        assert (ran["status"], ran["stdout"], ran["files_saved"]) == ("succeeded", "ran\n", False)
        files = looked_at(alice, session)["files"]
        assert files["problem"] == "The file storage cannot be written now."
        assert files["unsaved_since"] is not None
        # Not even idle: nothing may be lost that is nowhere else.
        aged(session, used_at=700)
        maintain()
        assert row(session).state == "open"
    assert saved(session) == {"f": b"before"}
    assert cell(alice, session, "1").json()["files_saved"] is True
    assert saved(session) == {"f": b"after"}
    assert looked_at(alice, session)["files"]["problem"] is None


def test_a_tenant_that_is_deleted_leaves_no_bytes(alice: Caller) -> None:
    session = opened(alice, saves="answer")
    cell(alice, session, write("a", "x"))
    alice.tenant.delete()
    assert not Workspace.objects.exists()
    Blob.objects.update(kept_until=timezone.now() - timedelta(seconds=1))
    blobs.collect()
    assert list(file_store(WORKSPACES).entries()) == []
    assert not Blob.objects.exists()


def test_of_two_who_save_at_once_none_undoes_the_other(
    alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = opened(alice)
    cell(alice, session, write("a", "old"))
    assert kernel_background.wait_for_keyed_work()
    real, inside, go_on = file_saves._take_in, threading.Event(), threading.Event()

    def slow(*given: Any) -> None:
        real(*given)
        if not inside.is_set():
            inside.set()
            assert go_on.wait(60)

    monkeypatch.setattr(file_saves, "_take_in", slow)
    slower = in_thread(lambda: file_saves.save(row(session)))
    assert inside.wait(60)
    (sandbox,) = kept_here.sandboxes()
    (sandbox.folder / "a").write_text("new")
    (sandbox.folder / "b").write_text("b")
    file_saves.save(row(session))
    go_on.set()
    slower.join()
    assert saved(session) == {"a": b"new", "b": b"b"}
    counts_are_right(session)


def test_names_that_are_no_text_are_saved_as_they_are(alice: Caller) -> None:
    session = opened(alice, saves="answer")
    names = [b"\xff", b"%FF", "é".encode(), "e\u0301".encode(), b"A", b"a", b"n\nl", b"x" * 255]
    code = f"for n in {names!r}: open(n, 'wb').write(n)"
    assert cell(alice, session, code).json()["files_saved"] is True
    assert saved(session) == {os.fsdecode(name): name for name in names}


def test_a_long_path_is_saved(alice: Caller) -> None:
    session = opened(alice, saves="answer")
    code = (
        "import os\n"
        "for n in range(14): os.mkdir(chr(97 + n) * 200); os.chdir(chr(97 + n) * 200)\n"
        "open('f', 'w').write('deep')"
    )
    assert cell(alice, session, code).json()["files_saved"] is True
    assert b"deep" in saved(session).values()


def test_a_closed_session_leaves_nothing_in_storage(alice: Caller, bob: Caller) -> None:
    session, other = opened(alice, saves="answer"), opened(alice, saves="answer")
    cell(alice, session, write("a", "mine") + ";" + write("b", "shared"))
    cell(alice, other, write("b", "shared"))
    assert bob.client.delete(f"{URL}/{session['id']}").status_code == 204
    assert saved(session) == {}
    assert saved(other) == {"b": b"shared"}
    assert len(list(file_store(WORKSPACES).entries())) == 1
    counts_are_right(other)
    assert Session.objects.get(pk=session["id"]).state == "closed"


def test_what_is_to_be_kept_after_the_end_is_saved_before_it(alice: Caller, settings: Any) -> None:
    settings.DELETE_S3_ON_CLEANUP = False
    session = opened(alice)
    cell(alice, session, write("a", "kept"))
    (sandbox,) = kept_here.sandboxes()
    (sandbox.folder / "late").write_text("too")
    alice.client.delete(f"{URL}/{session['id']}")
    maintain()
    assert saved(session) == {"a": b"kept", "late": b"too"}


def _close(alice: Caller, session: Any) -> None:
    assert alice.client.delete(f"{URL}/{session['id']}").status_code == 204


def _suspend(_: Caller, session: Any) -> None:
    assert capacity.suspend(row(session).pk, "a test")


def _suspend_and_wake(alice: Caller, session: Any) -> None:
    _suspend(alice, session)
    assert cell(alice, session, "1").status_code == 200


@pytest.mark.parametrize("end", [_close, _suspend, _suspend_and_wake])
def test_what_a_sandbox_shows_while_it_is_removed_is_not_saved(
    alice: Caller,
    monkeypatch: pytest.MonkeyPatch,
    settings: Any,
    end: Callable[[Caller, Any], None],
) -> None:
    settings.DELETE_S3_ON_CLEANUP = False
    session = opened(alice, saves="answer")
    cell(alice, session, write("f", "kept"))
    assert kernel_background.wait_for_keyed_work()
    real = file_saves._take_in

    def last_until_the_end(look: Any, sandbox: Any, claim: Any, before: Any) -> None:
        monkeypatch.setattr(file_saves, "_take_in", real)
        # The session is saved as it was and ends. Then this look finds an empty folder.
        end(alice, session)
        version = Workspace.objects.values_list("version", flat=True)
        look.workspace.version = version.get(session=session["id"])
        real(look, sandbox, claim, before)

    monkeypatch.setattr(file_saves, "_take_in", last_until_the_end)
    empty = file_saves.Claimed("", {}, [], complete=True)
    looks = iter([empty])
    whole = file_saves.changes_of
    monkeypatch.setattr(
        file_saves,
        "changes_of",
        lambda *given, **named: next(looks, None) or whole(*given, **named),
    )
    if end is _suspend_and_wake:
        file_saves.save(row(session))
    else:
        with pytest.raises(Conflict):
            file_saves.save(row(session))
    assert saved(session) == {"f": b"kept"}
