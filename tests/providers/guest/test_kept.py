"""Rules that every request needs: seldom looked up, and mostly not while a request waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.db import OperationalError

from providers.services import settings_cache as module
from providers.services.settings_cache import CachedQuery, renew_all


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


class Rules:
    """What is in the database, and how often it was looked up."""

    def __init__(self) -> None:
        self.value, self.looks = "first", 0
        self.meanwhile: Callable[[], Any] = lambda: None

    def load(self) -> str:
        found = self.value
        self.looks += 1
        self.meanwhile()
        return found


@pytest.fixture
def rules() -> Rules:
    return Rules()


def test_a_change_made_elsewhere_is_seen_within_a_second(clock: Clock, rules: Rules) -> None:
    kept = CachedQuery(rules.load)
    assert kept() == "first"
    rules.value = "second"
    clock.now += 0.9
    assert kept() == "first"
    clock.now += 0.2
    assert kept() == "second"


def test_no_request_looks_up_what_is_renewed_ahead_of_it(clock: Clock, rules: Rules) -> None:
    kept = CachedQuery(rules.load)
    kept()
    for number in range(20):
        clock.now += module.RENEWED_SECONDS
        rules.value = str(number)
        renew_all()
        looks = rules.looks
        assert kept() == str(number)
        assert rules.looks == looks


def test_what_nobody_asks_for_is_not_looked_up(clock: Clock, rules: Rules) -> None:
    kept = CachedQuery(rules.load)
    renew_all()
    assert rules.looks == 0
    kept()
    clock.now += module.ASKED_SECONDS + 1
    renew_all()
    assert rules.looks == 1
    rules.value = "second"
    assert kept() == "second"


def test_a_change_during_a_renewal_is_not_covered_by_what_was_read_before(
    clock: Clock, rules: Rules
) -> None:
    kept = CachedQuery(rules.load)
    kept()

    def change() -> None:
        rules.value = "second"
        kept.forget()

    rules.meanwhile = change
    renew_all()
    rules.meanwhile = lambda: None
    assert kept() == "second"


def test_a_failing_look_leaves_the_others_and_is_made_up_for(clock: Clock, rules: Rules) -> None:
    def fail() -> None:
        raise OperationalError("the server is gone")

    failing, other = CachedQuery(rules.load), Rules()
    beside = CachedQuery(other.load)
    failing(), beside()
    rules.meanwhile = fail
    renew_all()
    assert other.looks == 2
    clock.now += 2
    with pytest.raises(OperationalError):
        failing()
    rules.meanwhile, rules.value = lambda: None, "second"
    assert failing() == "second"
