"""Snapshots of the files of sessions: what is in one, who has it, what it costs, and for how long."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import pytest

from executions.kernel import background
from executions.kernel.storage import WORKSPACES, Folder, file_store
from executions.ledger.models import LedgerEntry
from executions.ledger.verification import verify
from executions.sessions import capacity
from executions.sessions.maintenance import maintain
from executions.sessions.models import Blob, Snapshot, StoredTotal, Workspace, WorkspaceFile
from executions.sessions.session_sandbox import forget
from executions.sessions.storage import blobs, file_saves
from providers.errors import ProviderUnavailable
from tests.conftest import Caller
from tests.support import kept_here
from tests.support.saved_files import saved, write
from tests.support.sessions import URL, aged, cell, opened, row
from tests.support.snapshots import taken

SNAPSHOTS = "/api/v1/snapshots"


pytestmark = [pytest.mark.usefixtures("own_storage", "kept_here"), pytest.mark.database]


def with_files(caller: Caller, code: str = write("f", "kept")) -> dict[str, Any]:
    session = opened(caller)
    assert cell(caller, session, code).json()["status"] == "succeeded"
    return session


def total_is_right(caller: Caller) -> StoredTotal:
    # What was refused is collected behind the answer.
    assert background.wait_for_keyed_work(60)
    assert background.wait_until_idle(60)
    total = StoredTotal.objects.get(tenant=caller.tenant)
    assert total.files == WorkspaceFile.objects.filter(workspace__tenant=caller.tenant).count()
    sizes = Blob.objects.filter(tenant=caller.tenant).values_list("size", flat=True)
    assert total.bytes == sum(sizes)
    return total


def test_a_session_begins_with_the_files_of_a_snapshot_and_no_variables(
    alice: Caller, bob: Caller
) -> None:
    source = with_files(alice, "import os; os.mkdir('d'); open('d/f', 'w').write('then'); x = 1")
    snapshot = taken(alice, source, name="then")
    assert {key: snapshot[key] for key in ("name", "session", "files", "bytes")} == {
        "name": "then",
        "session": source["id"],
        "files": 2,
        "bytes": 4,
    }
    cell(alice, source, write("d/f", "later"))
    begun = opened(bob, **{"from": snapshot["id"]})
    assert begun["files"]["count"] == 2
    assert begun["files"]["unsaved_since"] is None
    ran = cell(bob, begun, "print(open('d/f').read(), 'x' in globals())").json()
    assert (ran["stdout"], ran["restored"]) == ("then False\n", False)
    cell(bob, begun, "open('g', 'w').write('more'); import os; os.remove('d/f')")
    assert background.wait_for_keyed_work()
    assert saved(begun) == {"d": None, "g": b"more"}
    assert capacity.suspend(row(begun).pk, "a test")
    assert cell(bob, begun, "print(open('g').read())").json()["stdout"] == "more\n"
    third = opened(alice, **{"from": snapshot["id"]})
    assert cell(alice, third, "print(open('d/f').read())").json()["stdout"] == "then\n"


def test_bytes_are_there_once_and_rows_count(alice: Caller) -> None:
    source = with_files(alice, write("f", "x" * 1000))
    assert background.wait_for_keyed_work()
    before = total_is_right(alice)
    snapshot = taken(alice, source)
    copies = [opened(alice, **{"from": snapshot["id"]}) for _ in range(3)]
    assert all(saved(each) == {"f": b"x" * 1000} for each in copies)
    after = total_is_right(alice)
    assert after.bytes == before.bytes == 1000
    assert after.files == before.files + 4
    assert sum(1 for _ in file_store(WORKSPACES).entries()) == 1


def test_a_live_session_is_saved_first_and_one_that_sleeps_is_not_woken(alice: Caller) -> None:
    source = opened(alice)
    (sandbox,) = kept_here.sandboxes()
    (sandbox.folder / "unnoticed").write_text("by a daemon")
    assert taken(alice, source)["files"] == 1
    assert saved(source) == {"unnoticed": b"by a daemon"}
    assert capacity.suspend(row(source).pk, "a test")
    assert taken(alice, source)["files"] == 1
    assert (row(source).state, kept_here.sandboxes()) == ("asleep", [])


def test_what_cannot_be_saved_is_no_snapshot(
    alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = with_files(alice)
    assert background.wait_for_keyed_work()
    (sandbox,) = kept_here.sandboxes()
    (sandbox.folder / "g").write_text("new")
    url = f"{URL}/{source['id']}/snapshot"
    with monkeypatch.context() as patch:
        patch.setattr(file_saves, "_PAUSE_SECONDS", 0)
        patch.setattr(sandbox.files, "read_archive", lambda *_, **__: iter([bytes(1024)]))
        refused = alice.client.post(url)
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "conflict")

    def away(*_: Any, **__: Any) -> Any:
        raise OSError("away")

    with monkeypatch.context() as patch:
        patch.setattr(Folder, "save_stream", away)
        assert alice.client.post(url).status_code == 503
    never = opened(alice, saves="never")
    assert alice.client.post(f"{URL}/{never['id']}/snapshot").status_code == 409
    assert Snapshot.objects.count() == 0
    assert taken(alice, source)["files"] == 2


def test_of_a_session_whose_sandbox_is_gone_nothing_is_taken_unasked(alice: Caller) -> None:
    source = with_files(alice)
    assert background.wait_for_keyed_work()
    (sandbox,) = kept_here.sandboxes()
    sandbox.close()
    forget(row(source))
    refused = alice.client.post(f"{URL}/{source['id']}/snapshot")
    assert refused.status_code == 409
    assert Snapshot.objects.count() == 0
    assert taken(alice, source)["files"] == 1


def test_it_outlives_its_source_and_goes_when_it_is_deleted(alice: Caller, bob: Caller) -> None:
    source = with_files(alice)
    snapshot = taken(alice, source)
    assert alice.client.delete(f"{URL}/{source['id']}").status_code == 204
    assert background.wait_for_keyed_work()
    aged(source, created_at=10_000, used_at=10_000)
    maintain()
    blobs.collect()
    assert bob.client.get(f"{SNAPSHOTS}/{snapshot['id']}").json() == snapshot
    begun = opened(bob, **{"from": snapshot["id"]})
    assert bob.client.delete(f"{SNAPSHOTS}/{snapshot['id']}").status_code == 204
    assert bob.client.delete(f"{SNAPSHOTS}/{snapshot['id']}").status_code == 404
    assert cell(bob, begun, "print(open('f').read())").json()["stdout"] == "kept\n"
    assert background.wait_for_keyed_work()
    assert bob.client.delete(f"{URL}/{begun['id']}").status_code == 204
    assert background.wait_for_keyed_work()
    total = total_is_right(alice)
    assert (total.files, total.bytes, list(file_store(WORKSPACES).entries())) == (0, 0, [])


def test_sessions_that_nothing_is_saved_of_begin_with_one_too(alice: Caller) -> None:
    snapshot = taken(alice, with_files(alice))
    begun = opened(alice, saves="never", **{"from": snapshot["id"]})
    assert cell(alice, begun, "print(open('f').read())").json()["stdout"] == "kept\n"
    assert not Workspace.objects.filter(session=begun["id"]).exists()


def test_the_list_is_in_pages_and_the_tenants_own(
    alice: Caller, bob: Caller, charlie: Caller
) -> None:
    source = with_files(alice)
    ids = [taken(alice, source)["id"] for _ in range(3)][::-1]
    page = bob.client.get(SNAPSHOTS, {"limit": 2}).json()
    rest = bob.client.get(page["next"]).json()
    assert [each["id"] for each in page["results"] + rest["results"]] == ids
    assert rest["next"] is None
    assert charlie.client.get(SNAPSHOTS).json() == {"results": [], "next": None}


def test_to_strangers_it_is_not_there(alice: Caller, charlie: Caller) -> None:
    source = with_files(alice)
    snapshot = taken(alice, source)
    for pk in (snapshot["id"], str(uuid4())):
        for answer in (
            charlie.client.get(f"{SNAPSHOTS}/{pk}"),
            charlie.client.delete(f"{SNAPSHOTS}/{pk}"),
            charlie.client.post(URL, {"from": pk}),
        ):
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
    assert charlie.client.post(f"{URL}/{source['id']}/snapshot").status_code == 404
    assert charlie.client.get(URL).json()["results"] == []
    assert alice.client.get(f"{SNAPSHOTS}/{snapshot['id']}").status_code == 200
    refused = alice.client.post(URL, {"from": "no id"})
    assert (refused.status_code, refused.json()["error"]["field"]) == (400, "from")


def unavailable(self: Any, spec: Any, owner: str) -> Any:
    raise ProviderUnavailable("It is away.")


def test_where_files_are_kept_a_session_begins_with_those_of_one_that_has_ended(
    alice: Caller,
    bob: Caller,
    charlie: Caller,
    settings: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = with_files(alice)
    assert background.wait_for_keyed_work()
    for stay in (False, True):
        # Not of one that goes on, nor of a stranger's; nor where they go with their session.
        settings.DELETE_S3_ON_CLEANUP = not stay
        assert bob.client.post(URL, {"from": source["id"]}).status_code == 404
    assert alice.client.delete(f"{URL}/{source['id']}").status_code == 204
    assert charlie.client.post(URL, {"from": source["id"]}).status_code == 404
    # One that cannot be opened has taken nothing.
    really = kept_here.KeptHere.open
    monkeypatch.setattr(kept_here.KeptHere, "open", unavailable)
    assert bob.client.post(URL, {"from": source["id"]}).status_code == 503
    monkeypatch.setattr(kept_here.KeptHere, "open", really)
    begun = opened(bob, **{"from": source["id"]})
    assert begun["files"]["count"] == 1
    assert cell(bob, begun, "print(open('f').read())").json()["stdout"] == "kept\n"
    # It has them now, and they are there once.
    assert alice.client.post(URL, {"from": source["id"]}).status_code == 404
    total_is_right(alice)
    settings.DELETE_S3_ON_CLEANUP = True
    assert bob.client.delete(f"{URL}/{begun['id']}").status_code == 204
    assert background.wait_for_keyed_work()
    assert total_is_right(alice).files == 0
    assert [str(finding) for finding in verify().findings] == []


@pytest.mark.parametrize("setting", ["TENANT_STORAGE_FILES", "SESSION_STORAGE_FILES"])
def test_rows_are_bounded(alice: Caller, settings: Any, setting: str) -> None:
    source = with_files(alice)
    snapshot = taken(alice, source)
    setattr(settings, setting, 0 if setting.startswith("SESSION") else 2)
    refused = alice.client.post(URL, {"from": snapshot["id"]})
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "SB008")
    assert setting in refused.json()["error"]["message"]
    if setting.startswith("TENANT"):
        assert alice.client.post(f"{URL}/{source['id']}/snapshot").status_code == 429
    total_is_right(alice)


def test_making_and_deleting_it_is_in_the_ledger(alice: Caller) -> None:
    snapshot = taken(alice, with_files(alice), name="private")
    begun = opened(alice, **{"from": snapshot["id"]})
    alice.client.delete(f"{SNAPSHOTS}/{snapshot['id']}")
    entries = [e.stated for e in LedgerEntry.objects.filter(kind="snapshot").order_by("pk")]
    assert [each["action"] for each in entries] == ["created", "deleted"]
    assert entries[1]["by"] == f"key:{alice.api_key.prefix}"
    assert all(each["row"] == snapshot["id"] for each in entries)
    assert "private" not in str(entries)
    (started,) = [
        e.stated
        for e in LedgerEntry.objects.filter(kind="session")
        if e.stated["row"] == begun["id"] and e.stated["action"] == "opened"
    ]
    assert started["from"] == snapshot["id"]
    assert background.wait_for_keyed_work()
    assert [str(finding) for finding in verify().findings] == []
    other = taken(alice, begun)
    Snapshot.objects.filter(pk=other["id"]).update(name="another")
    assert len(verify().findings) == 1
