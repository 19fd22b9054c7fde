"""Sessions that wake in real sandboxes, whatever their code has left of their folders."""

from __future__ import annotations

import pytest

from executions.services.workspaces import sleeping, threads
from tests.conftest import Caller
from tests.sessions import URL, cell, opened, row

pytest_plugins = ["tests.agent_sandbox"]
pytestmark = [pytest.mark.one_database, pytest.mark.usefixtures("conversations")]

BECOMES_A_FILE = "import os; os.rmdir('d'); open('d', 'w').write('x')"


def test_a_context_whose_folder_became_a_file_begins_at_the_top(alice: Caller) -> None:
    session = opened(alice)
    url = f"{URL}/{session['id']}/contexts"
    alice.client.post(url, {"language": "python", "id": "other", "cwd": "d"})
    cell(alice, session, BECOMES_A_FILE)
    assert threads.wait_until_idle()
    assert sleeping.put_to_sleep(row(session).pk, "a test")
    for context in ("default", "other"):
        ran = cell(alice, session, "print(open('d').read())", context=context)
        assert (ran.status_code, ran.json()["stdout"]) == (200, "x\n"), ran.content
