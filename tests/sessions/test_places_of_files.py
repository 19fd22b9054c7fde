"""Whose files an absolute path names: those of the session, for its tenant, and nobody else's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from executions.kernel import background
from tests.conftest import Caller
from tests.support.kept_service import kept_by
from tests.support.saved_files import packed
from tests.support.session_files import got, put
from tests.support.sessions import URL, cell, opened

pytestmark = pytest.mark.one_database


@pytest.fixture(autouse=True)
def _real_sandboxes(
    transactional_db: None, shared_service: Path, tmp_path: Path, settings: Any
) -> Iterator[None]:
    settings.DATA_DIR = tmp_path
    with kept_by(shared_service, tmp_path):
        yield


def calls(caller: Caller, session: dict[str, Any]) -> list[int]:
    """The answers to all that can be done with files by their place."""
    files, client = f"{URL}/{session['id']}/files", caller.client
    answers = [
        put(caller, session, "/tmp/a/f", b"content"),
        got(caller, session, "/tmp/a/f"),
        client.get(f"{files}?path=/tmp"),
        client.post(f"{files}/mkdir", {"path": "/tmp/b"}),
        client.post(f"{files}/move", {"from": "/tmp/a/f", "to": "/workspace/f"}),
        client.get(f"{files}/archive?path=/home/user"),
        put(caller, session, "/tmp/c", packed(("x", b"x", "")), "archive"),
        client.delete(f"{files}?path=/tmp/c"),
        client.delete(f"{files}?path=/home/user/f"),
    ]
    for answer in answers:
        answer.close()
    return [answer.status_code for answer in answers]


def test_the_owner_and_a_colleague_name_all_places(alice: Caller, bob: Caller) -> None:
    for caller in (alice, bob):
        session = opened(alice)
        assert all(200 <= status < 300 for status in calls(caller, session))


def test_for_a_stranger_and_without_a_key_there_is_no_place(alice: Caller, charlie: Caller) -> None:
    session = opened(alice)
    put(alice, session, "/tmp/a/f", b"of alice")
    assert set(calls(charlie, session)) == {404}
    watched = charlie.client.get(f"{URL}/{session['id']}/files/events?path=/tmp")
    assert watched.status_code == 404
    # Of all places those of the own session alone are named.
    mine = opened(charlie)
    assert got(charlie, mine, "/tmp/a/f").status_code == 404
    put(charlie, mine, "/tmp/a/f", b"of charlie")
    assert b"".join(got(alice, session, "/tmp/a/f").streaming_content) == b"of alice"
    assert background.wait_for_keyed_work()
    alice.client.credentials()
    assert set(calls(alice, session)) == {401}


def test_what_a_program_may_not_its_owner_may_not_by_a_path(alice: Caller) -> None:
    session = opened(alice)
    cell(alice, session, "import os; os.symlink('/etc', 'l'); os.mkfifo('/tmp/pipe')")
    for path in ("/proc/1/environ", "/proc/self/mem", "/tmp/pipe", "/dev/zero", "/etc/shadow"):
        assert got(alice, session, path).status_code in (400, 404), path
    for path in ("/etc/passwd", "/workspace/l/new", "/proc/self/x", "/usr/x", "/dev/null"):
        assert put(alice, session, path, b"x").status_code in (400, 404), path
    for path in ("/", "//", "/tmp/../etc/passwd", "/" + "d/" * 65, "/" + "a" * 5000, "/workspace"):
        assert put(alice, session, path, b"x").status_code == 400, path[:30]
    long = "/tmp/" + "/".join(["d" * 250] * 16)
    assert put(alice, session, long, b"x").status_code in (200, 201)
    assert b"".join(got(alice, session, long).streaming_content) == b"x"
