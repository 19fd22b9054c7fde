"""A storage that is killed during a conversation: what was acknowledged is there afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from executions.sessions.models import LooseFile
from executions.sessions.session_sandbox import forget
from tests.conftest import Caller
from tests.support import kept_here
from tests.support.bucket import Swift
from tests.support.saved_files import counts_are_right, looked_at, saved, write
from tests.support.sessions import cell, in_thread, opened, row, wait_for

pytestmark = pytest.mark.database

LARGE = "_ = open('large', 'wb').write(b'x' * (24 << 20)); print('written')"


@pytest.mark.usefixtures("kept_here")
def test_what_was_acknowledged_outlives_a_storage_that_is_killed(
    own_swift: Swift, alice: Caller, tmp_path: Path, settings: Any
) -> None:
    settings.DATA_DIR = tmp_path
    session = opened(alice, saves="answer")
    first = cell(alice, session, write("first", "1") + "; x = 41").json()
    assert first["files_saved"] is True

    # In the middle of an upload: the answer comes, and does not say more than is so.
    answers: list[Any] = []
    sending = in_thread(lambda: answers.append(cell(alice, session, LARGE).json()))
    wait_for(LooseFile.objects.exists)
    own_swift.stop()
    sending.join()
    [cut_off] = answers
    assert (cut_off["status"], cut_off["stdout"]) == ("succeeded", "written\n")
    is_there = saved_names(session) == {"first", "large"}
    assert cut_off["files_saved"] is is_there

    # While it is away the conversation goes on, and is called unsaved.
    away = cell(alice, session, write("first", "lost") + "; print(x + 1)").json()
    assert (away["stdout"], away["files_saved"]) == ("42\n", False)
    assert looked_at(alice, session)["files"]["problem"]

    # Its sandbox goes as well: what was not acknowledged is lost, and nothing else.
    (sandbox,) = kept_here.sandboxes()
    sandbox.close()
    forget(row(session))
    for _ in range(2):
        assert cell(alice, session, "print('ran')").status_code >= 400
    assert row(session).state == "asleep"
    own_swift.start()
    after = cell(alice, session, "print(open('first').read(), 'x' in globals())").json()
    assert (after["stdout"], after["restored"], after["files_saved"]) == ("1 False\n", True, True)
    assert saved(session)["first"] == b"1"
    assert ("large" in saved(session)) is is_there
    counts_are_right(session)


def saved_names(session: dict[str, Any]) -> set[str]:
    return set(row(session).workspace.rows.values_list("path", flat=True))
