"""The schedule deals with all sessions, also where there are more than it reads at a time."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from executions.kernel import coroutines
from executions.sessions import maintenance
from executions.sessions.ending import busy
from executions.sessions.models import Session
from executions.sessions.storage.file_saves import save
from providers.errors import ConnectionFailed, ProviderUnavailable
from providers.waiting import within
from tests.conftest import Caller
from tests.support import kept_here
from tests.support.sessions import aged, cell, in_thread, opened, row, wait_for

pytestmark = [pytest.mark.usefixtures("kept_here"), pytest.mark.database]


@pytest.fixture(autouse=True)
def _few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maintenance, "_AT_ONCE", 2)


def fail(*_: object) -> Any:
    raise ConnectionFailed("Not now.")


def test_all_that_live_are_renewed(alice: Caller) -> None:
    for _ in range(5):
        opened(alice)
    before = [len(each.renewals) for each in kept_here.sandboxes()]
    assert maintenance.renew_living() == 0
    assert all(
        len(each.renewals) > renewals
        for each, renewals in zip(kept_here.sandboxes(), before, strict=True)
    )


def test_what_no_provider_ends_now_keeps_no_other_from_being_ended(
    alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions = [opened(alice) for _ in range(4)]
    with monkeypatch.context() as patched:
        for each in kept_here.sandboxes():
            patched.setattr(each, "close", fail)
        for session in sessions:
            alice.client.delete(f"/api/v1/sessions/{session['id']}")
    with monkeypatch.context() as patched:
        for each in kept_here.sandboxes()[:2]:
            patched.setattr(each, "close", fail)
        maintenance.release_ended()
    released = [row(session).released_at is not None for session in sessions]
    assert released == [False, False, True, True]


def test_what_is_busy_keeps_no_other_from_being_closed(alice: Caller) -> None:
    busy = [opened(alice, saves="never") for _ in range(2)]
    threads = [
        in_thread(lambda each=each: cell(alice, each, "import time; time.sleep(600)", timeout=120))
        for each in busy
    ]
    wait_for(lambda: all(each.known["default"][1].busy for each in kept_here.sandboxes()))
    unused = opened(alice, saves="never")
    for session in (*busy, unused):
        aged(session, created_at=5000)
    assert maintenance.maintain() == 1
    assert [row(each).state for each in (*busy, unused)] == ["open", "open", "closed"]
    for session in busy:
        alice.client.post(f"/api/v1/sessions/{session['id']}/interrupt")
    for thread in threads:
        thread.join()


def test_what_cannot_be_saved_keeps_no_other_from_its_turn(
    alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions = [opened(alice) for _ in range(3)]
    for session, seconds in zip(sessions, (900, 800, 700), strict=True):
        aged(session, unsaved_since=seconds)
    cannot = {row(session).pk for session in sessions[:2]}

    def save_or_not(session: Session) -> Any:
        if session.pk in cannot:
            raise ProviderUnavailable("Not now.")
        return save(session)

    monkeypatch.setattr("executions.sessions.maintenance.save", save_or_not)
    # Which ones are taken is left to chance: of sixty times it is among them.
    assert any(maintenance.save_unsaved() for _ in range(60))
    unsaved = [row(session).unsaved_since is not None for session in sessions]
    assert unsaved == [True, True, False]


def test_what_is_saved_slowly_before_its_end_holds_up_one_round_for_a_bounded_time(
    alice: Caller, charlie: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    now = 0.0

    async def slow(session: Session) -> Any:
        nonlocal now
        asked.append(str(session.pk))
        now += maintenance.SAVING_SECONDS
        await coroutines.wait_for(within(0, Future[None]()))

    monkeypatch.setattr(maintenance, "save_before_end", slow)
    monkeypatch.setattr(maintenance, "time", SimpleNamespace(monotonic=lambda: now))
    sessions = [opened(alice) for _ in range(3)]
    sessions.append(opened(charlie))
    goes_on = in_thread(
        lambda: cell(alice, sessions[0], "import time; time.sleep(600)", timeout=120)
    )
    wait_for(lambda: busy([row(sessions[0]).pk]) != set())
    for session in sessions:
        aged(session, created_at=1801)
    # A busy one is not waited for, and the others have their turn.
    assert [maintenance.close_due() for _ in range(3)] == [1, 1, 1]
    assert asked == [each["id"] for each in sessions[1:]]
    alice.client.post(f"/api/v1/sessions/{sessions[0]['id']}/interrupt")
    goes_on.join(60)
