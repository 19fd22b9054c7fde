"""Calls of an agent at the moments between two steps."""

from __future__ import annotations

from typing import Any

import pytest

from executions.doors.claude import calls
from executions.doors.claude.calls import Calls, Place
from executions.doors.claude.client import AgentSession
from executions.doors.claude.transcript import ToolCall
from executions.runs.models import Execution
from tests.conftest import Caller


@pytest.fixture
def place(alice: Caller) -> Place:
    return Place(alice.api_key.pk)


def calls_of(place: Place, address: str = "https://queue.example") -> Calls:
    return Calls(place, address, "env_1", AgentSession("sesn_1", "helper", "m", False))


def call(*, asks: bool = False, **given: Any) -> ToolCall:
    return ToolCall("sevt_1", "bash", given, asks=asks, is_refused=False, thread="", size=0)


@pytest.mark.parametrize("given", [{"command": "echo"}, {"restart": True}])
@pytest.mark.parametrize("ends", ["left", "dropped"])
def test_a_lease_that_ends_while_a_session_opens_begins_nothing(
    place: Place, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], ends: str
) -> None:
    ended: list[str] = []

    async def open_slowly(*_: Any) -> None:
        ended.append(ends)

    monkeypatch.setattr(calls, "find_or_open", open_slowly)
    # The test's transaction is in it.
    monkeypatch.setattr(calls, "close_old_connections", lambda: None)
    result = calls_of(place).carry_out(
        call(**given), lambda: "left" in ended, lambda: "dropped" in ended
    )
    assert result is None
    assert not Execution.objects.exists()


def test_a_call_is_the_same_whether_it_asks_or_not(place: Place) -> None:
    made = calls_of(place)
    asking, plain = call(asks=True), call()
    assert {made._key_of(asking), made._key_of(plain)} == set(made._keys_of(plain.id))


def test_the_calls_of_another_server_are_others(place: Place) -> None:
    former, later = calls_of(place), calls_of(place, "https://other.example")
    assert not set(former._keys_of("sevt_1")) & set(later._keys_of("sevt_1"))
