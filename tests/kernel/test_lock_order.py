"""Who holds one row and waits for another never meets somebody who does it the other way round.

PostgreSQL ends one of two such transactions, after a second. SQLite lets one write at a time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import pytest
from django.db import connection, transaction

from executions.ledger.append import enter_row, look_at
from executions.runs.statistics import ALL_TIME, Increment, Statistic, add
from executions.sessions.models import Blob, Session, StoredTotal, Workspace, WorkspaceFile
from executions.sessions.storage import blobs, drafts, file_saves, snapshots
from executions.sessions.storage.tree import Edit
from tests.conftest import Caller
from tests.support.saved_files import stored
from tests.support.sessions import cell, in_thread, opened, row, wait_for
from tests.support.snapshots import taken

pytestmark = [
    pytest.mark.usefixtures("own_storage", "kept_here"),
    pytest.mark.only_on("postgresql"),
    pytest.mark.database,
]


def somebody_waits() -> bool:
    """For what this transaction holds."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT EXISTS (SELECT 1 FROM pg_locks WHERE NOT granted"
            " AND pg_backend_pid() = ANY (pg_blocking_pids(pid)))"
        )
        return bool(cursor.fetchone()[0])


def test_a_save_waits_for_its_session_and_holds_no_workspace(alice: Caller) -> None:
    session = opened(alice, saves="answer")
    assert cell(alice, session, "open('f', 'w').close()").json()["files_saved"] is True
    found: list[file_saves.Saved] = []
    with transaction.atomic():
        Session.objects.select_for_update().get(pk=session["id"])
        thread = in_thread(lambda: found.append(file_saves.save(row(session))))
        wait_for(somebody_waits)
        assert Workspace.objects.filter(session=session["id"]).update(problem="held by both") == 1
    thread.join()
    assert found[0].is_complete


def test_a_removed_snapshot_waits_for_its_tenants_total_and_holds_no_ledger(alice: Caller) -> None:
    session = opened(alice, saves="answer")
    assert cell(alice, session, "open('f', 'w').close()").json()["files_saved"] is True
    snapshot = snapshots.snapshot_of(alice.tenant, taken(alice, session)["id"])
    removed: list[bool] = []
    with transaction.atomic():
        StoredTotal.objects.select_for_update().get(tenant=alice.tenant)
        thread = in_thread(lambda: removed.append(snapshots.remove(snapshot, "alice")))
        wait_for(somebody_waits)
        before = look_at(Session, session["id"])
        enter_row(row(session), "cleaned", before, {"files": 0})
    thread.join()
    assert removed == [True]


def test_who_adds_to_several_statistics_holds_them_in_one_order(alice: Caller) -> None:
    """However they are listed: one run ends with one of them first, the next with another."""
    first, second = (Increment("run", name, ALL_TIME) for name in "ab")
    add([first, second])
    with transaction.atomic():
        Statistic.objects.select_for_update().get(name="a")
        thread = in_thread(lambda: add([second, first, first]))
        wait_for(somebody_waits)
        Statistic.objects.select_for_update(nowait=True).get(name="b")
    thread.join()
    assert list(Statistic.objects.order_by("name").values_list("count", flat=True)) == [3, 2]


def of_two(caller: Caller) -> tuple[Workspace, list[Blob]]:
    """Two blobs, the second of which stands first in the table and by its hash, and a workspace."""
    contents = sorted((b"a", b"b"), key=lambda each: hashlib.sha256(each).digest(), reverse=True)
    [first], [second] = (stored(caller.tenant, each) for each in contents)
    Blob.objects.filter(pk=first.pk).update(size=first.size)
    return Workspace.objects.create(tenant=caller.tenant), [first, second]


def rows_of(workspace: Workspace, named: list[Blob]) -> list[WorkspaceFile]:
    """The one of the second blob before that of the first."""
    facts = {"workspace": workspace, "type": "file", "size": 1, "mode": 0o644, "modified": 0.0}
    return [
        WorkspaceFile(key=name, path=name, blob=blob, **facts)
        for name, blob in zip("ab", reversed(named), strict=True)
    ]


def write_at_once(workspace: Workspace, named: list[Blob]) -> None:
    file_saves._write(rows_of(workspace, named))


def change_asleep(workspace: Workspace, named: list[Blob]) -> None:
    with transaction.atomic():
        edit = Edit(workspace)
        for name, blob in zip("ab", reversed(named), strict=True):
            edit.put(name, "file", mode=0o644, modified=0.0, blob=blob)
        edit.write_down()


def copy_rows(workspace: Workspace, named: list[Blob]) -> None:
    target = Workspace.objects.create(tenant=workspace.tenant)
    drafts.copy(workspace, target)


@pytest.mark.parametrize(
    "hold",
    [
        lambda _, named: blobs.remove_unnamed(named[0].tenant_id, [b.pk for b in reversed(named)]),
        lambda _, named: blobs._known_blobs(named[0].tenant, [b.sha256 for b in reversed(named)]),
        lambda _, named: blobs.keep_until_read(named[0].tenant, [b.pk for b in named], 60),
        *(write_at_once, change_asleep, copy_rows),
    ],
    ids=["removes", "saves", "links", "writes", "changes", "copies"],
)
def test_who_holds_several_contents_holds_them_in_one_order(
    alice: Caller, hold: Callable[[Workspace, list[Blob]], object]
) -> None:
    """A session ends, and what it had is removed, while another saves the same files."""
    workspace, named = of_two(alice)
    if hold is copy_rows:
        file_saves._write(rows_of(workspace, named))
    with transaction.atomic():
        Blob.objects.select_for_update().get(pk=named[0].pk)
        thread = in_thread(lambda: hold(workspace, named))
        wait_for(somebody_waits)
        Blob.objects.select_for_update(nowait=True).get(pk=named[1].pk)
    thread.join()
