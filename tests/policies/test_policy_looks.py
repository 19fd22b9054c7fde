"""Whose code is looked at when: one tenant's slow code holds up no other tenant's look."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from executions.capabilities.policies import capability
from executions.capabilities.policies.analysis import LOOKED
from providers.errors import RateLimited
from tests.support.waiting import wait_until

pytestmark = pytest.mark.one_database

Submit = Callable[[str, str], Future[Any]]


class Gates:
    """Looks of the code of a gate wait there until it is opened."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self._gates: dict[str, threading.Event] = {}

    def close(self, code: str) -> None:
        self._gates[code] = threading.Event()

    def open(self, *codes: str) -> None:
        for code in codes or list(self._gates):
            self._gates[code].set()

    def look(self, code: str, rules: Any) -> tuple[str, list[Any]]:
        self.begun.append(code)
        if code in self._gates:
            assert self._gates[code].wait(60)
        return LOOKED, []


@pytest.fixture
def gates(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gates]:
    gates = Gates()
    monkeypatch.setattr(capability, "look", gates.look)
    yield gates
    gates.open()


def test_one_tenants_looks_hold_up_nobody_elses(gates: Gates) -> None:
    gates.close("slow")
    held = [capability.submit_look("slow", {}, "alice") for _ in range(capability.OF_ONE_TENANT)]
    assert capability.submit_look("quick", {}, "bob").result(60) == (LOOKED, [])
    with pytest.raises(RateLimited):
        capability.submit_look("slow", {}, "alice")
    gates.open()
    assert {each.result(60)[0] for each in held} == {LOOKED}
    assert capability.submit_look("more", {}, "alice").result(60) == (LOOKED, [])


def test_tenants_that_wait_have_turns(gates: Gates) -> None:
    gates.close("slow")
    gates.close("first")
    looked = [capability.submit_look("slow", {}, "alice")]
    looked.append(capability.submit_look("first", {}, "bob"))
    wait_until(lambda: len(gates.begun) == 2, seconds=60)
    looked += [capability.submit_look(f"bob {number}", {}, "bob") for number in range(3)]
    looked += [capability.submit_look(f"eve {number}", {}, "eve") for number in range(2)]
    gates.open("first")
    for each in looked[1:]:
        each.result(60)
    assert gates.begun[2:] == ["bob 0", "eve 0", "bob 1", "eve 1", "bob 2"]
    gates.open()
    looked[0].result(60)


def test_what_is_cancelled_while_it_waits_is_not_looked_at_and_leaves_its_place(
    gates: Gates,
) -> None:
    gates.close("slow")
    held = capability.submit_look("slow", {}, "alice")
    wait_until(lambda: gates.begun == ["slow"], seconds=60)
    for _ in range(2 * capability.OF_ONE_TENANT):
        assert capability.submit_look("waits", {}, "alice").cancel()
    last = capability.submit_look("last", {}, "alice")
    gates.open()
    assert (held.result(60), last.result(60)) == ((LOOKED, []), (LOOKED, []))
    assert gates.begun == ["slow", "last"]


def test_a_look_that_fails_is_told_and_the_next_one_is_carried_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(code: str, rules: Any) -> Any:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(capability, "look", fail)
        for _ in range(capability.OF_ONE_TENANT + 1):
            with pytest.raises(MemoryError):
                capability.submit_look("1", {}, "alice").result(60)
    monkeypatch.setattr(capability, "look", lambda code, rules: (LOOKED, []))
    assert capability.submit_look("1", {}, "alice").result(60) == (LOOKED, [])
