"""Files of a session over the API: in, out, in part, and nothing but files."""

from __future__ import annotations

import io
import json
import os
import tarfile
import threading
from typing import Any
from urllib.parse import quote

import pytest

from executions.kernel import background
from executions.sessions import capacity
from executions.sessions.files import range_of
from providers.runtime.guest import names as guest_names
from providers.sandbox import FileEntry
from tests.conftest import Caller
from tests.support import kept_here
from tests.support.session_files import got, put
from tests.support.sessions import URL, cell, in_thread, opened, row, wait_for

pytestmark = pytest.mark.usefixtures("kept_here")


def test_a_file_goes_in_is_seen_by_a_cell_and_comes_out(alice: Caller) -> None:
    session = opened(alice)
    content = bytes(range(256)) * 4096
    answer = put(alice, session, "in/data.bin", content)
    assert answer.status_code == 200, answer.content
    assert {name: answer.json()[name] for name in ("path", "type", "size_bytes")} == {
        "path": "in/data.bin",
        "type": "file",
        "size_bytes": len(content),
    }
    code = "data = open('in/data.bin', 'rb').read()\nopen('out', 'wb').write(data[::-1])"
    assert cell(alice, session, code).json()["status"] == "succeeded"
    back = got(alice, session, "out")
    assert back.status_code == 200
    assert b"".join(back.streaming_content) == content[::-1]
    assert back["Content-Length"] == str(len(content))
    assert back["X-Content-Type-Options"] == "nosniff"
    assert back["Content-Disposition"].startswith("attachment")


def test_a_range_is_that_part_and_one_behind_the_end_is_refused(alice: Caller) -> None:
    session = opened(alice)
    put(alice, session, "f", b"0123456789")
    part = got(alice, session, "f", HTTP_RANGE="bytes=2-4")
    assert (part.status_code, part["Content-Range"]) == (206, "bytes 2-4/10")
    assert b"".join(part.streaming_content) == b"234"
    behind = got(alice, session, "f", HTTP_RANGE="bytes=10-")
    assert (behind.status_code, behind["Content-Range"]) == (416, "bytes */10")


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("bytes=0-0", (0, 1)),
        ("bytes=5-", (5, 5)),
        ("bytes=-3", (7, 3)),
        ("bytes=-30", (0, 10)),
        ("bytes=2-99", (2, 8)),
        ("bytes=4-2", None),
        ("bytes=-", None),
        ("bytes=0-1,3-4", None),
        ("lines=0-1", None),
        ("", None),
    ],
)
def test_what_a_range_asks_for(header: str, expected: tuple[int, int] | None) -> None:
    assert range_of(header, 10) == expected


def test_a_file_that_grows_while_it_is_read_sends_no_more_than_was_announced(
    alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = opened(alice)
    put(alice, session, "f", b"12345")
    (sandbox,) = kept_here.sandboxes()
    monkeypatch.setattr(sandbox.files, "read", lambda *_: iter([b"1234", b"567890"]))
    answer = got(alice, session, "f")
    assert b"".join(answer.streaming_content) == b"12345"


def test_folders_are_listed_to_a_depth_made_moved_and_removed(alice: Caller) -> None:
    session = opened(alice)
    url = f"{URL}/{session['id']}/files"
    assert alice.client.post(f"{url}/mkdir", {"path": "a/b"}).status_code == 201
    assert alice.client.post(f"{url}/mkdir", {"path": "a/b"}).status_code == 200
    put(alice, session, "a/b/c", b"x")

    def listed(**query: Any) -> list[str]:
        return [entry["path"] for entry in alice.client.get(url, query).json()["entries"]]

    assert listed() == ["a"]
    assert listed(depth=3) == ["a", "a/b", "a/b/c"]
    assert listed(path="a/b") == ["a/b/c"]
    moved = alice.client.post(f"{url}/move", {"from": "a/b", "to": "d"})
    assert (moved.status_code, moved.json()["type"]) == (200, "directory")
    assert listed(depth=3) == ["a", "d", "d/c"]
    assert alice.client.delete(f"{url}?path=d").status_code == 204
    assert alice.client.delete(f"{url}?path=d").status_code == 404
    assert got(alice, session, "d/c").status_code == 404
    assert got(alice, session, "a").status_code == 400


def test_a_folder_that_is_not_there_is_not_found_and_a_file_is_no_folder(
    alice: Caller, bob: Caller, charlie: Caller
) -> None:
    session = opened(alice)
    put(alice, session, "file", b"x")
    for state in ("open", "asleep"):
        if state == "asleep":
            assert background.wait_for_keyed_work()
            assert capacity.suspend(row(session).pk, "a test")
        assert row(session).state == state
        for what in ("files", "files/archive"):
            url = f"{URL}/{session['id']}/{what}"
            for caller, path in ((alice, "none"), (bob, "none/below"), (charlie, "")):
                answer = caller.client.get(url, {"path": path})
                assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
            refused = alice.client.get(url, {"path": "file"})
            assert (refused.status_code, refused.json()["error"]["field"]) == (400, "path")


def test_a_long_list_comes_in_pages(alice: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("executions.sessions.files.MOST_LISTED", 2)
    session = opened(alice)
    for name in "abc":
        put(alice, session, name, b"")
    page = alice.client.get(f"{URL}/{session['id']}/files").json()
    rest = alice.client.get(page["next"]).json()
    assert [entry["path"] for entry in page["entries"] + rest["entries"]] == ["a", "b", "c"]
    assert rest["next"] is None


@pytest.mark.parametrize("is_asleep", [False, True])
def test_a_page_may_end_at_a_name_that_is_no_utf8_or_looks_like_one_that_is_escaped(
    alice: Caller, monkeypatch: pytest.MonkeyPatch, is_asleep: bool
) -> None:
    monkeypatch.setattr("executions.sessions.files.MOST_LISTED", 1)
    session = opened(alice)
    names = [b"a%", b"a%FE", b"a\xfe", b"a\xff", b"b" * 100 + b"\xff" * 155, b"c"]
    made = cell(alice, session, f"for name in {names}: open(name, 'w').close()")
    assert made.json()["status"] == "succeeded"
    sandbox = session["id"].replace("-", "")
    if is_asleep:
        assert alice.client.post(f"/sandboxes/{sandbox}/pause", {}).status_code == 204
    seen: list[str] = []
    page = f"{URL}/{session['id']}/files"
    while page and len(seen) < 10:
        told = alice.client.get(page)
        assert told.status_code == 200, told.content
        seen += [entry["path"] for entry in told.json()["entries"]]
        page = told.json()["next"]
    assert seen == [guest_names.escape(os.fsdecode(name)) for name in names]
    listed = alice.client.post(
        "/filesystem.Filesystem/ListDir", {"path": ""}, headers={"E2b-Sandbox-Id": sandbox}
    )
    assert listed.status_code == 200, listed.content
    assert len(listed.json()["entries"]) == len(names)


ODD = [b"\xfe", b"\xff", b"a\nb", b"\\xff", "\u3000 \u202e\u200d".encode(), b"50%", b"\\n"]


@pytest.mark.parametrize("is_asleep", [False, True])
def test_each_file_is_read_moved_and_removed_by_the_name_that_is_told(
    alice: Caller, bob: Caller, charlie: Caller, is_asleep: bool
) -> None:
    session = opened(alice)
    made = cell(alice, session, f"for name in {ODD}: open(name, 'wb').write(name)")
    assert made.json()["status"] == "succeeded"
    if is_asleep:
        sandbox = session["id"].replace("-", "")
        assert alice.client.post(f"/sandboxes/{sandbox}/pause", {}).status_code == 204
    files = f"{URL}/{session['id']}/files"
    names = [entry["path"] for entry in alice.client.get(files).json()["entries"]]
    assert sorted(names) == sorted(guest_names.escape(os.fsdecode(name)) for name in ODD)
    read = [b"".join(got(bob, session, quote(name)).streaming_content) for name in names]
    assert sorted(read) == sorted(ODD)
    assert got(charlie, session, quote(names[0])).status_code == 404
    for number, name in enumerate(names):
        moved = alice.client.post(f"{files}/move", {"from": name, "to": f"\\xf{number}"})
        assert (moved.status_code, moved.json()["path"]) == (200, f"\\xf{number}")
    for number in range(len(names)):
        assert alice.client.delete(f"{files}?path=%5Cxf{number}").status_code == 204
    assert alice.client.get(files).json()["entries"] == []


def test_an_archive_goes_in_and_comes_out(alice: Caller) -> None:
    session = opened(alice)
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        member = tarfile.TarInfo("inner/file")
        member.size = 5
        archive.addfile(member, io.BytesIO(b"hello"))
    assert put(alice, session, "", packed.getvalue(), "archive").json() == {"entries": 1}
    answer = alice.client.get(f"{URL}/{session['id']}/files/archive?path=inner")
    assert answer["Content-Type"] == "application/x-tar"
    with tarfile.open(fileobj=io.BytesIO(b"".join(answer.streaming_content))) as archive:
        assert "./file" in archive.getnames()


@pytest.mark.parametrize("path", ["../etc/passwd", "a/../../b", "a%00b", "x" * 5000, ""])
def test_a_bad_path_is_refused_before_anybody_is_asked(alice: Caller, path: str) -> None:
    session = opened(alice)
    for answer in (got(alice, session, path), put(alice, session, path, b"x")):
        assert (answer.status_code, answer.json()["error"]["field"]) == (400, "path")


@pytest.mark.parametrize(
    "lie",
    [None, "text", [3], [FileEntry("x", "file", size=-1)], [FileEntry("\ud800", "file", size=1)]],
)
def test_what_a_provider_says_that_is_no_list_of_files_is_its_failure(
    alice: Caller, monkeypatch: pytest.MonkeyPatch, lie: Any
) -> None:
    session = opened(alice)
    (sandbox,) = kept_here.sandboxes()
    monkeypatch.setattr(sandbox.files, "list", lambda *_: lie)
    answer = alice.client.get(f"{URL}/{session['id']}/files")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "SB009")


def test_a_sandbox_that_does_not_answer_takes_a_share_of_the_threads_and_no_more(
    alice: Caller, charlie: Caller, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, other = opened(alice), opened(charlie)
    settings.PROVIDER_WAITS = 8
    monkeypatch.setattr("providers.waiting._threads", None)
    sandbox, _ = kept_here.sandboxes()
    asked, over = threading.Semaphore(0), threading.Event()
    statuses: list[int] = []

    def hang(*_: Any) -> None:
        asked.release()
        over.wait(60)

    def ask() -> None:
        url = f"{URL}/{session['id']}/files/content?path=f"
        statuses.append(alice.client.get(url).status_code)

    monkeypatch.setattr(sandbox.files, "stat", hang)
    threads = [in_thread(ask) for _ in range(8)]
    try:
        assert asked.acquire(timeout=60)
        assert asked.acquire(timeout=60)
        wait_for(lambda: len(statuses) == 6)
        assert statuses == [429] * 6
        assert cell(charlie, other, "1").status_code == 200
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert sorted(statuses) == [404, 404, *[429] * 6]
    again = alice.client.get(f"{URL}/{session['id']}/files")
    assert again.status_code == 200


@pytest.mark.parametrize("name", ["\ud800", "a/\udfff"])
def test_a_path_that_no_file_can_have_is_refused_by_name(alice: Caller, name: str) -> None:
    url = f"{URL}/{opened(alice)['id']}/files"
    for path, body, field in (
        ("mkdir", {"path": name}, "path"),
        ("move", {"from": name, "to": "b"}, "from"),
        ("move", {"from": "a", "to": name}, "to"),
    ):
        text = json.dumps(body)
        refused = alice.client.post(f"{url}/{path}", text, content_type="application/json")
        assert (refused.status_code, refused.json()["error"]["field"]) == (400, field)
