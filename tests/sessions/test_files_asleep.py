"""Files of a session that sleeps: the same answers as of one that is awake, and nobody is woken."""

from __future__ import annotations

import json
import signal
from typing import Any

import pytest
from django.core.handlers.base import BaseHandler
from django.test import RequestFactory
from django.utils import timezone

from executions.doors.native.deferred import LATER, DeferredResponse
from executions.kernel import background
from executions.kernel.storage import Folder
from executions.kernel.text import key_of
from executions.sessions import files as session_files
from executions.sessions.models import Session, Workspace, WorkspaceFile
from executions.sessions.storage import blobs, changes
from tests.conftest import Caller
from tests.support import kept_here
from tests.support.bucket import S3
from tests.support.saved_files import asleep, counts_are_right, listed, packed, still_asleep, write
from tests.support.session_files import got, put
from tests.support.sessions import URL, cell, opened, row

pytestmark = pytest.mark.usefixtures("own_storage", "kept_here")


def test_files_are_read_written_and_moved_while_it_sleeps_and_are_there_when_it_wakes(
    alice: Caller, bob: Caller
) -> None:
    session = asleep(alice)
    url = f"{URL}/{session['id']}/files"
    assert put(bob, session, "in/data", b"0123456789").json()["size_bytes"] == 10
    part = got(alice, session, "in/data", HTTP_RANGE="bytes=2-4")
    assert (part.status_code, part["Content-Range"]) == (206, "bytes 2-4/10")
    assert b"".join(part.streaming_content) == b"234"
    assert got(alice, session, "in/data", HTTP_RANGE="bytes=10-").status_code == 416
    assert alice.client.post(f"{url}/mkdir", {"path": "a/b"}).status_code == 201
    assert alice.client.post(f"{url}/mkdir", {"path": "a/b"}).status_code == 200
    moved = alice.client.post(f"{url}/move", {"from": "in", "to": "a/in"})
    assert (moved.status_code, moved.json()["type"]) == (200, "directory")
    assert listed(alice, session, depth=9) == ["a", "a/b", "a/in", "a/in/data", "f"]
    assert listed(alice, session, path="a/in") == ["a/in/data"]
    assert alice.client.delete(f"{url}?path=f").status_code == 204
    assert alice.client.delete(f"{url}?path=f").status_code == 404
    assert got(alice, session, "f").status_code == 404
    counts_are_right(session)
    assert still_asleep(session)
    ran = cell(alice, session, "import os; print(open('a/in/data').read(), os.path.exists('f'))")
    assert (ran.json()["stdout"], ran.json()["restored"]) == ("0123456789 False\n", True)


def test_removing_a_folder_spares_what_only_looks_like_it(alice: Caller) -> None:
    session = asleep(alice)
    for path in ("a/x", "A/x", "a_/x", "a%/x", "ab"):
        put(alice, session, path.replace("%", "%25"), b"x")
    assert alice.client.delete(f"{URL}/{session['id']}/files?path=a").status_code == 204
    assert listed(alice, session, depth=2) == ["A", "A/x", "a%", "a%/x", "a_", "a_/x", "ab", "f"]
    counts_are_right(session)


def test_a_long_list_comes_in_pages(alice: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_files, "MOST_LISTED", 2)
    session = asleep(alice)
    for name in ("a", "b"):
        put(alice, session, name, b"")
    page = alice.client.get(f"{URL}/{session['id']}/files").json()
    rest = alice.client.get(page["next"]).json()
    assert [entry["path"] for entry in page["entries"] + rest["entries"]] == ["a", "b", "f"]
    assert rest["next"] is None


def test_no_link_is_followed(alice: Caller) -> None:
    session = asleep(alice)
    put(alice, session, "", packed(("d/x", b"x", ""), ("l", b"", "d")), "archive")
    url = f"{URL}/{session['id']}/files"
    for answer in (
        got(alice, session, "l/x"),
        put(alice, session, "l/y", b""),
        alice.client.get(url, {"path": "l"}),
        alice.client.delete(f"{url}?path=l/x"),
        alice.client.post(f"{url}/mkdir", {"path": "l/z"}),
        alice.client.post(f"{url}/move", {"from": "l/x", "to": "z"}),
        alice.client.post(f"{url}/move", {"from": "d/x", "to": "l/x"}),
    ):
        assert answer.status_code == 400
        assert "symbolic link" in answer.json()["error"]["message"]
    assert got(alice, session, "l").status_code == 400
    assert put(alice, session, "l", b"").status_code == 400
    assert alice.client.post(f"{url}/move", {"from": "d", "to": "d/e"}).status_code == 400
    assert alice.client.post(f"{url}/move", {"from": "d", "to": "f"}).status_code == 400
    assert alice.client.delete(f"{url}?path=l").status_code == 204
    assert listed(alice, session, depth=2) == ["d", "d/x", "f"]


@pytest.mark.parametrize(
    "path", ["../f", "/f", "a%00b", "x" * 300, "a/" * 65 + "a", ".cofferdam-1"]
)
def test_a_path_that_is_none_is_refused_by_name(alice: Caller, path: str) -> None:
    session = asleep(alice)
    refused = put(alice, session, path, b"x")
    assert (refused.status_code, refused.json()["error"]["field"]) == (400, "path")
    assert listed(alice, session) == ["f"]


def test_a_name_that_is_no_utf_8_goes_round(alice: Caller) -> None:
    session = asleep(alice)
    name = "b\udcff"
    found = row(session)
    changes.write(found, name, [b"x"])
    assert Workspace.objects.get(session=found.pk).rows.filter(key=key_of(name)).exists()
    assert cell(alice, session, "import os; print(os.listdir(b'.'))").json()["stdout"] in (
        "[b'f', b'b\\xff']\n",
        "[b'b\\xff', b'f']\n",
    )


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("SESSION_STORAGE_BYTES", 100),
        ("SESSION_STORAGE_FILES", 1),
        ("TENANT_STORAGE_BYTES", 100),
        ("TENANT_STORAGE_FILES", 1),
    ],
)
def test_over_a_quota_nothing_is_changed(
    alice: Caller, settings: Any, setting: str, value: int
) -> None:
    session = asleep(alice)
    setattr(settings, setting, value)
    for refused in (
        put(alice, session, "big", b"x" * 200),
        put(alice, session, "", packed(("big", b"x" * 200, "")), "archive"),
    ):
        assert refused.status_code == 429, refused.content
        assert refused.json()["error"]["code"] == "SB008"
        assert setting in refused.json()["error"]["message"]
    assert listed(alice, session) == ["f"]
    assert b"".join(got(alice, session, "f").streaming_content) == b"kept"


def test_who_comes_while_it_is_woken_goes_the_live_way(
    alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = asleep(alice)
    real = blobs.store_all

    def store_all(*args: Any) -> Any:
        found = real(*args)
        assert cell(alice, session, "x = 1").json()["status"] == "succeeded"
        return found

    with monkeypatch.context() as patch:
        patch.setattr(blobs, "store_all", store_all)
        assert put(alice, session, "late", b"late").status_code == 200
    assert background.wait_for_keyed_work()
    (sandbox,) = kept_here.sandboxes()
    assert (sandbox.folder / "late").read_text() == "late"
    assert cell(alice, session, "print(x)").json()["stdout"] == "1\n"


def test_whoever_has_begun_to_wake_it_is_not_overtaken(alice: Caller) -> None:
    session = asleep(alice)
    Session.objects.filter(pk=session["id"]).update(waking_since=timezone.now())
    with pytest.raises(changes.IsAwake):
        changes.write(row(session), "g", [b"x"])
    assert not WorkspaceFile.objects.filter(key=key_of("g")).exists()


def test_what_others_removed_from_storage_meanwhile_is_stored_anew(
    alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = asleep(alice)
    real, calls = blobs.store_all, []

    def store_all(*args: Any) -> Any:
        found = real(*args)
        calls.append(1)
        if len(calls) == 1:
            assert blobs.remove_unnamed(alice.tenant.pk) == 1
        return found

    monkeypatch.setattr(blobs, "store_all", store_all)
    assert put(alice, session, "g", b"anew").status_code == 200
    assert len(calls) == 2
    assert b"".join(got(alice, session, "g").streaming_content) == b"anew"


def test_a_storage_that_is_away_is_told_and_nothing_is_changed(
    alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = asleep(alice)

    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError("away")

    with monkeypatch.context() as patch:
        patch.setattr(Folder, "save_stream", refuse)
        refused = put(alice, session, "g", b"x")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "SB009")
    assert listed(alice, session) == ["f"]


def test_what_a_hostile_guest_has_saved_is_shown_as_it_would_be_restored(alice: Caller) -> None:
    session = asleep(alice, write("d", "a file"))
    workspace = Workspace.objects.get(session=session["id"])
    (saved,) = workspace.rows.all()
    for path in ("d/below", "implied/x"):
        saved.pk, saved.key, saved.path = None, key_of(path), path
        saved.save(force_insert=True)
    assert got(alice, session, "d/below").status_code == 400
    assert alice.client.get(f"{URL}/{session['id']}/files?path=d").status_code == 400
    assert listed(alice, session, path="implied") == ["implied/x"]
    assert b"".join(got(alice, session, "implied/x").streaming_content) == b"a file"


def test_to_strangers_the_files_are_not_there(alice: Caller, charlie: Caller) -> None:
    session = asleep(alice)
    url = f"{URL}/{session['id']}/files"
    json_type = {"content_type": "application/json"}
    for answer in (
        charlie.client.get(url),
        got(charlie, session, "f"),
        put(charlie, session, "f", b"mine"),
        put(charlie, session, "", packed(("f", b"mine", "")), "archive"),
        charlie.client.get(f"{url}/archive"),
        charlie.client.delete(f"{url}?path=f"),
        charlie.client.post(f"{url}/mkdir", json.dumps({"path": "d"}), **json_type),
        charlie.client.post(f"{url}/move", json.dumps({"from": "f", "to": "g"}), **json_type),
    ):
        assert answer.status_code == 404
    assert b"".join(got(alice, session, "f").streaming_content) == b"kept"
    assert still_asleep(session)


def test_a_storage_that_hangs_holds_no_thread_that_serves(
    on_s3: S3, alice: Caller, charlie: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that comes here comes by one thread, as if the server had no other."""
    session = asleep(alice)
    assert on_s3.process is not None
    laters = [DeferredResponse() for _ in range(14)]
    url = f"{URL}/{session['id']}/files"
    handler = BaseHandler()
    handler.load_middleware()

    def sent_later(path: str, content: bytes, later: DeferredResponse) -> None:
        headers = {"X-API-Key": alice.key_text}
        octets = "application/octet-stream"
        made = RequestFactory().put(f"{url}/{path}", content, octets, headers=headers)
        made.META[LATER] = later
        handler.get_response(made)

    on_s3.process.send_signal(signal.SIGSTOP)
    try:
        for number, later in enumerate(laters):
            sent_later(f"content?path=new/{number}", b"%d" % number, later)
            assert later.has_work
        laters.append(DeferredResponse())
        sent_later("archive?path=in", packed(("second", b"second", "")), laters[-1])
        assert laters[-1].has_work
        assert listed(alice, session) == ["f"]
        assert alice.client.post(f"{url}/mkdir", {"path": "d"}).status_code == 201
        assert cell(charlie, opened(charlie), "1").json()["status"] == "succeeded"
        # Who has waited for long enough is told, and what had not begun does not begin.
        with monkeypatch.context() as patch:
            patch.setattr(changes, "STORING_SECONDS", 0.1)
            late = put(alice, session, "late", b"late")
        assert late.status_code == 503
        assert "in time" in late.json()["error"]["message"]
    finally:
        on_s3.process.send_signal(signal.SIGCONT)
    for later in laters:
        later.go_on(lambda job: job())
        assert later.answer.result(60).status_code == 200
    assert background.wait_for_keyed_work()
    names = [f"new/{number}" for number in range(14)]
    assert listed(alice, session, depth=2) == sorted(["d", "f", "in", "in/second", "new", *names])
    counts_are_right(session)
