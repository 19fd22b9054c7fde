"""What a session and a tenant may have in storage: over it they are told, and keep what was saved."""

from __future__ import annotations

from typing import Any

import pytest

from executions.sessions.storage import quota
from tests.conftest import Caller
from tests.support.saved_files import counts_are_right, looked_at, saved, write
from tests.support.sessions import URL, cell, opened

pytestmark = [pytest.mark.usefixtures("own_storage", "kept_here"), pytest.mark.database]


@pytest.mark.parametrize(
    ("name", "value"), [("SESSION_STORAGE_BYTES", 9), ("SESSION_STORAGE_FILES", 1)]
)
def test_over_its_quota_a_session_is_told_and_keeps_what_was_saved(
    alice: Caller, settings: Any, name: str, value: int
) -> None:
    session = opened(alice, saves="answer")
    cell(alice, session, write("f", "12345"))
    setattr(settings, name, value)
    ran = cell(alice, session, write("g", "12345")).json()
    assert (ran["status"], ran["files_saved"]) == ("succeeded", False)
    problem = looked_at(alice, session)["files"]["problem"]
    assert problem.startswith("SB008")
    assert name in problem
    assert saved(session) == {"f": b"12345"}
    cell(alice, session, "import os; os.remove('f')")
    assert saved(session) == {"g": b"12345"}
    counts_are_right(session)


def test_names_are_bounded_as_bytes_are(
    alice: Caller, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = opened(alice, saves="answer")
    long = "[open(c * 200, 'w').close() for c in 'st']"
    with monkeypatch.context() as patch:
        patch.setattr(quota, "SESSION_NAMES", 399)
        assert cell(alice, session, long).json()["files_saved"] is False
        assert "have 400 characters" in looked_at(alice, session)["files"]["problem"]
    settings.TENANT_STORAGE_FILES = 3
    assert cell(alice, session, "1").json()["files_saved"] is False
    assert "the limit is 384" in looked_at(alice, session)["files"]["problem"]
    assert cell(alice, session, "import os; os.remove('s' * 200)").json()["files_saved"] is True
    settings.TENANT_STORAGE_FILES = 4
    assert cell(alice, session, long).json()["files_saved"] is True
    counts_are_right(session)
    refused = alice.client.post(f"{URL}/{session['id']}/snapshot")
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "SB008")
    assert "TENANT_STORAGE_FILES" in refused.json()["error"]["message"]
    counts_are_right(session)


def test_a_file_that_could_not_be_saved_is_refused_before_it_is_written(
    alice: Caller, settings: Any
) -> None:
    session = opened(alice, saves="answer")
    settings.SESSION_STORAGE_BYTES = 10
    url = f"{URL}/{session['id']}/files/content?path="
    assert alice.client.put(url + "a", b"1234567", content_type="a/b").status_code == 200
    refused = alice.client.put(url + "b", b"89abcdef", content_type="a/b")
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "SB008")
    # In place of the former one it is not too much.
    assert alice.client.put(url + "a", b"89abcdefgh", content_type="a/b").status_code == 200
    assert saved(session) == {"a": b"89abcdefgh"}
    assert cell(alice, session, "import os; print(os.listdir())").json()["stdout"] == "['a']\n"


def test_the_tenants_quota_counts_all_its_sessions_and_no_other_tenants(
    alice: Caller, charlie: Caller, settings: Any
) -> None:
    settings.TENANT_STORAGE_BYTES = 10
    settings.TENANT_STORAGE_FILES = 3
    first, second = opened(alice, saves="answer"), opened(alice, saves="answer")
    assert cell(alice, first, write("f", "1234567")).json()["files_saved"] is True
    assert cell(alice, second, write("f", "89abcdef")).json()["files_saved"] is False
    assert "TENANT_STORAGE_BYTES" in looked_at(alice, second)["files"]["problem"]
    # What nothing names any more makes room for what does.
    assert cell(alice, first, write("f", "x")).json()["files_saved"] is True
    assert cell(alice, second, write("f", "89abcdef")).json()["files_saved"] is True
    many = "import os; [os.mkdir(n) for n in 'abc']"
    assert cell(alice, second, many).json()["files_saved"] is False
    assert "TENANT_STORAGE_FILES" in looked_at(alice, second)["files"]["problem"]
    stranger = opened(charlie, saves="answer")
    assert cell(charlie, stranger, write("f", "1234567")).json()["files_saved"] is True
