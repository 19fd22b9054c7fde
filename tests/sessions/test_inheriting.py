"""Sessions that begin with what is kept of an ended one: it has its files again if they never do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from executions.ledger.verification import verify
from executions.sessions import control
from executions.sessions.ending import abort_opening
from executions.sessions.maintenance import close_never_opened
from executions.sessions.models import Session, Workspace
from tests.conftest import Caller
from tests.support.saved_files import counts_are_right, saved, write
from tests.support.sessions import URL, aged, cell, opened


@pytest.fixture
def own_storage(own_storage: None, settings: Any) -> None:
    settings.DELETE_S3_ON_CLEANUP = False


pytestmark = [pytest.mark.usefixtures("own_storage", "kept_here"), pytest.mark.database]


def _not_in_time(session: Session) -> None:
    aged({"id": str(session.pk)}, created_at=1000)
    close_never_opened()


@pytest.mark.parametrize("end", [abort_opening, _not_in_time], ids=["found dead", "not in time"])
def test_what_a_killed_process_was_opening_gives_back_what_it_was_to_begin_with(
    alice: Caller, monkeypatch: pytest.MonkeyPatch, end: Callable[[Session], object]
) -> None:
    ended = opened(alice, saves="answer")
    cell(alice, ended, write("f", "kept"))
    alice.client.delete(f"{URL}/{ended['id']}")

    class Killed(BaseException):
        pass

    async def die(*_: object) -> Any:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(control, "_place", die)
        patch.setattr(control, "fail", lambda *_: None)
        with pytest.raises(Killed):
            alice.client.post(URL, {"from": ended["id"]})
    left = Session.objects.get(state="open")
    assert Workspace.objects.get().session_id == left.pk
    end(left)
    assert saved(ended) == {"f": b"kept"}
    heir = opened(alice, **{"from": ended["id"]})
    assert cell(alice, heir, "print(open('f').read())").json()["stdout"] == "kept\n"
    # It is its own from then on.
    alice.client.delete(f"{URL}/{heir['id']}")
    assert (saved(ended), saved(heir)) == ({}, {"f": b"kept"})
    counts_are_right(heir)
    assert [str(finding) for finding in verify().findings] == []
