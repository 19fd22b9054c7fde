"""Sessions that wake in real sandboxes: nothing is saved of them that the next one cannot hold."""

from __future__ import annotations

from typing import Any

import pytest

from executions.kernel import background
from executions.sessions import capacity
from executions.sessions.models import Workspace
from executions.sessions.storage.quota import QuotaExceeded
from tests.conftest import Caller
from tests.support.saved_files import looked_at, packed
from tests.support.sessions import URL, cell, opened, row

pytest_plugins = ["tests.support.agent_sandbox"]
pytestmark = [pytest.mark.one_database, pytest.mark.usefixtures("conversations")]

BECOMES_A_FILE = "import os; os.rmdir('d'); open('d', 'w').write('x')"


def test_a_context_whose_folder_became_a_file_begins_at_the_top(alice: Caller) -> None:
    session = opened(alice)
    url = f"{URL}/{session['id']}/contexts"
    alice.client.post(url, {"language": "python", "id": "other", "cwd": "d"})
    cell(alice, session, BECOMES_A_FILE)
    assert background.wait_for_keyed_work()
    assert capacity.suspend(row(session).pk, "a test")
    for context in ("default", "other"):
        ran = cell(alice, session, "print(open('d').read())", context=context)
        assert (ran.status_code, ran.json()["stdout"]) == (200, "x\n"), ran.content


def test_what_is_more_than_a_sandbox_holds_is_not_called_saved(alice: Caller) -> None:
    session = opened(alice, saves="answer")
    # Once in the sandbox, and twice in storage and in the next sandbox.
    ran = cell(
        alice, session, "import os; open('a', 'wb').write(b'x' * (60 << 20)); os.link('a', 'b')"
    )
    assert ran.json()["files_saved"] is False
    with pytest.raises(QuotaExceeded, match="everything in its sandbox"):
        capacity.suspend(row(session).pk, "a test")
    assert row(session).state == "open"
    assert "SB008" in looked_at(alice, session)["files"]["problem"]
    cell(alice, session, "os.remove('b')")
    assert capacity.suspend(row(session).pk, "a test")
    assert cell(alice, session, "1").json()["status"] == "succeeded"


def test_a_file_of_holes_takes_no_more_in_the_next_sandbox(alice: Caller) -> None:
    session = opened(alice, saves="answer")
    code = "with open('s', 'wb') as f: f.seek(60 << 20); f.write(b'end'); f.truncate(62 << 20)"
    assert cell(alice, session, code).json()["files_saved"] is True
    assert capacity.suspend(row(session).pk, "a test")
    looks = "import os; s = os.stat('s'); b = open('s', 'rb').read()\n"
    looks += (
        "print(s.st_size >> 20, s.st_blocks * 512 < 1 << 20, b.strip(b'\\0'), b.index(b'e') >> 20)"
    )
    assert cell(alice, session, looks).json()["stdout"] == "62 True b'end' 60\n"


def test_nothing_is_put_into_one_asleep_that_its_sandbox_cannot_hold(alice: Caller) -> None:
    session = opened(alice)
    cell(alice, session, "open('f', 'w').write('x')")
    assert background.wait_for_keyed_work()
    assert capacity.suspend(row(session).pk, "a test")
    url = f"{URL}/{session['id']}/files"
    large = b"x" * (60 << 20)

    def put(where: str, content: bytes) -> Any:
        kind = "application/octet-stream"
        return alice.client.put(f"{url}/{where}", content, content_type=kind)

    assert put("content?path=a", large).status_code == 200
    for refused in (put("content?path=b", large), put("archive", packed(("b", large, "")))):
        assert refused.status_code == 429, refused.content
    assert Workspace.objects.get(session=session["id"]).bytes == len(large) + 1
    assert cell(alice, session, "1").json()["status"] == "succeeded"
