"""Who makes room for another session: nobody whose own is being opened, and nobody for ever."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from executions.kernel import background
from executions.sessions import capacity
from executions.sessions.capacity import suspend
from executions.sessions.ending import close_if_idle
from providers.waiting import within
from tests.conftest import Caller
from tests.support import kept_here
from tests.support.saved_files import asleep
from tests.support.sessions import URL, in_thread, opened, row

pytestmark = [pytest.mark.usefixtures("own_storage", "kept_here"), pytest.mark.database]


def test_a_session_that_is_being_opened_makes_no_room_for_another(
    alice: Caller, bob: Caller, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.SESSIONS_PER_TENANT = 1
    really = kept_here.KeptHere.open
    is_opening, may_open = threading.Event(), threading.Event()

    def open_slowly(self: Any, spec: Any, owner: str) -> Any:
        if not is_opening.is_set():
            is_opening.set()
            assert may_open.wait(60)
        return really(self, spec, owner)

    monkeypatch.setattr(kept_here.KeptHere, "open", open_slowly)
    answers: list[Any] = []
    first = in_thread(lambda: answers.append(alice.client.post(URL, {})))
    assert is_opening.wait(60)
    second = bob.client.post(URL, {})
    may_open.set()
    first.join()
    assert (answers[0].status_code, second.status_code) == (201, 429)
    assert row(answers[0].json()).state == "open"


def test_what_fell_asleep_meanwhile_is_not_closed_to_make_room(alice: Caller) -> None:
    session = asleep(alice)
    assert not close_if_idle(row(session).pk, "another session was opened")
    assert row(session).state == "asleep"


def test_who_opens_a_session_does_not_wait_for_ever_for_the_save_of_another(
    alice: Caller, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.SESSIONS_PER_TENANT = 1
    other = opened(alice)
    may_save = threading.Event()

    def sleep_slowly(*session: Any) -> bool:
        # Longer than the request is to wait, and without an end where it does.
        assert may_save.wait(60)
        return suspend(*session)

    monkeypatch.setattr(capacity, "suspend", sleep_slowly)
    monkeypatch.setattr(capacity, "within", lambda _, future: within(0, future))
    refused = alice.client.post(URL, {})
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "SB008")
    assert row(other).state == "open"
    may_save.set()
    assert background.wait_for_keyed_work()
    assert row(other).state == "asleep"
    opened(alice)
