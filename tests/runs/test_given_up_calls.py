"""Calls that nobody waits for any more hold a thread each, and there are only so many of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from providers.errors import RateLimited
from providers.remote import deadline
from providers.remote.deadline import DeadlinePassed, call_within
from providers.services import trial
from tests.support.lying_provider import Liar
from tests.support.wire_server import eventually


@pytest.fixture
def let_go() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def give_up(let_go: threading.Event, line: str) -> None:
    with pytest.raises(DeadlinePassed):
        call_within(0.01, lambda: let_go.wait(60), line=line)


def test_a_line_with_too_many_of_them_is_not_asked(
    let_go: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadline, "MOST_GIVEN_UP", 3)
    for _ in range(3):
        give_up(let_go, "a service")
    asked: list[int] = []
    with pytest.raises(RateLimited):
        call_within(1, lambda: asked.append(1), line="a service")
    assert asked == []
    assert call_within(60, lambda: "another's", line="another service") == "another's"
    assert call_within(60, lambda: "ends something") == "ends something"
    let_go.set()
    assert eventually(lambda: not deadline._given_up)
    assert call_within(60, lambda: "again", line="a service") == "again"


def test_code_that_hangs_fills_no_line(
    let_go: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadline, "MOST_GIVEN_UP", 2)
    for _ in range(4):
        give_up(let_go, "")
    assert call_within(60, lambda: "served", line="a service") == "served"


def test_tries_that_never_end_are_bounded(
    liar: Liar, let_go: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "DEADLINE_SECONDS", 0.2)
    monkeypatch.setattr(trial, "MOST_LEFT", 2)
    liar.does("initialize", lambda: let_go.wait(60))
    outcomes = [trial.try_provider("liar") for _ in range(4)]
    assert [outcome.code for outcome in outcomes[2:]] == ["SB008", "SB008"]
    # On a slow machine the time is over before the thread that tries has begun.
    assert eventually(lambda: liar.calls.count("initialize") == 2)
    let_go.set()

    def works() -> Any:
        monkeypatch.setattr(trial, "DEADLINE_SECONDS", 20.0)
        return trial.try_provider("liar").code != "SB008"

    assert eventually(works)
