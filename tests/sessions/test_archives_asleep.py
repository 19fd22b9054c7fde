"""Archives put into a session that sleeps, and taken out of it."""

from __future__ import annotations

import io
import tarfile
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from executions.sessions.storage.tree import Edit
from tests.conftest import Caller
from tests.support.saved_files import asleep, counts_are_right, listed, packed, still_asleep
from tests.support.session_files import put
from tests.support.sessions import URL

pytestmark = [pytest.mark.usefixtures("own_storage", "kept_here"), pytest.mark.one_database]


def said(records: bytes, times: int = 1) -> bytes:
    """Extended headers, which say something about a member that never comes."""
    head = tarfile.TarInfo("x")
    head.type, head.size = tarfile.XHDTYPE, len(records)
    return (head.tobuf(tarfile.USTAR_FORMAT) + records + bytes(-len(records) % 512)) * times


def test_an_archive_goes_in_and_comes_out(alice: Caller) -> None:
    session = asleep(alice)
    archive = packed(
        ("d", None, ""),
        ("d/file", b"hello", ""),
        ("d/link", b"", "/etc/passwd"),
        ("d/second", b"", "=d/file"),
    )
    assert put(alice, session, "in", archive, "archive").json() == {"entries": 4}
    answer = alice.client.get(f"{URL}/{session['id']}/files/archive?path=in")
    with tarfile.open(fileobj=io.BytesIO(b"".join(answer.streaming_content))) as found:
        assert found.getnames() == ["d", "d/file", "d/link", "d/second"]
        assert found.getmember("d/link").linkname == "/etc/passwd"
        second = found.extractfile("d/second")
        assert second is not None
        assert second.read() == b"hello"
    counts_are_right(session)
    assert still_asleep(session)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (packed(("ok", b"x", ""), ("../out", b"x", "")), ".."),
        (packed(("ok", b"x", ""), ("l", b"", "/etc"), ("l/x", b"x", "")), "symbolic link"),
        (packed(("ok", b"x", ""), ("f/x", b"x", "")), "Not a directory"),
        (packed(("ok", b"x", ""), ("h", b"", "=../../etc/passwd")), ".."),
        (packed(("ok", b"x", ""))[:700], "too soon"),
        (b"no archive" * 100, "not a tar"),
        (said(b"13 comment=x\n" * 900, times=40), "headers of one member"),
        (said(b"5 a=\n" * 4000), "invalid header"),
        (said(b"", times=200), "headers of one member"),
        (packed(("/".join(["d" * 200] * 40), b"x", "")), "4096 bytes"),
        (b"", "too soon"),
    ],
)
def test_an_archive_that_is_refused_leaves_everything_as_it_was(
    alice: Caller, content: bytes, says: str
) -> None:
    session = asleep(alice)
    refused = put(alice, session, "", content, "archive")
    assert (refused.status_code, refused.json()["error"]["field"]) == (400, "data")
    assert says in refused.json()["error"]["message"]
    assert listed(alice, session, depth=9) == ["f"]


def test_many_files_cost_others_no_more_than_a_few_looks(
    alice: Caller, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = asleep(alice, "import os; os.makedirs('far/away'); open('far/away/f', 'w').close()")
    files = packed(*((f"in/{n}/f", b"x", "") for n in range(200)), ("far/away/g", b"x", ""))
    assert put(alice, session, "", files, "archive").status_code == 200
    counts_are_right(session)
    with CaptureQueriesContext(connection) as asked:
        assert put(alice, session, "again", files, "archive").status_code == 200
    # While they are written down nobody else can write, where the database is SQLite.
    assert len(asked) < 60
    with CaptureQueriesContext(connection) as asked:
        moved = {"from": "in", "to": "out"}
        answer = alice.client.post(f"{URL}/{session['id']}/files/move", moved, format="json")
        assert answer.status_code == 200, answer.content
    assert len(asked) < 60
    refused = put(alice, session, "", packed(("far", b"x", "")), "archive")
    assert "directory" in refused.json()["error"]["message"]
    settings.SESSION_STORAGE_FILES = 1000
    deep = packed(*((f"{n}/" + "d/" * 60 + "f", b"", "") for n in range(200)))
    made: list[str] = []
    real = Edit.put
    monkeypatch.setattr(Edit, "put", lambda *a, **k: (made.append(a[1]), real(*a, **k))[1])
    assert put(alice, session, "deep", deep, "archive").status_code == 429
    assert len(made) < 1100
    counts_are_right(session)
