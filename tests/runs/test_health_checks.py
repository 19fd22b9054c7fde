"""Background checks: all at once, each with an end, and counted apart from requests."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from providers.errors import ConnectionFailed
from providers.models import CircuitBreaker, ProviderConfig, ProviderHealth
from providers.services import breaker, health
from tests.support.agentrun_server import AgentRunServer
from tests.support.e2b_server import E2BServer
from tests.support.lying_provider import Liar
from tests.support.routing import make_route
from tests.support.wire_server import eventually

Services = tuple[E2BServer, AgentRunServer]

# The looks are taken on threads of their own, which have nothing to do with the database.
pytestmark = pytest.mark.django_db


@pytest.fixture
def held(liar: Liar) -> Iterator[threading.Event]:
    """The liar's check does not return before this is set."""
    let_go = threading.Event()
    liar.does("health_check", lambda: let_go.wait(60))
    yield let_go
    let_go.set()
    while health._going_on:
        threading.Event().wait(0.01)


def told(provider_id: str) -> ProviderHealth:
    return ProviderHealth.objects.get(provider_id=provider_id)


def test_one_that_is_slow_holds_up_no_other(liar: Liar, services: Services) -> None:
    """The first one answers only once the last one was asked."""
    asked = threading.Event()
    in_vain: list[str] = []

    def wait(operation: str) -> None:
        if not asked.wait(60):
            in_vain.append(operation)

    def healthy() -> Any:
        asked.set()
        return liar.module.Health(True)

    services[1].fault = wait
    liar.does("health_check", healthy)
    assert health.check_all() == 3
    assert not in_vain


def test_one_whose_configuration_cannot_be_read_holds_up_no_other(
    services: Services, settings: Any
) -> None:
    rows = ProviderConfig.objects.defer("config")
    keys = settings.FERNET_KEYS
    settings.FERNET_KEYS = ["a key that was lost"]
    rows.filter(provider_id="e2b").update(config={"api_key": "k"})
    settings.FERNET_KEYS = keys
    assert health.check_all() == 1
    assert told("aliyun_codeinterpreter").healthy
    assert (told("e2b").healthy, told("e2b").code) == (False, "SB002")
    assert "FERNET_KEYS" in told("e2b").message


def test_one_that_has_not_answered_is_not_asked_again(
    liar: Liar, held: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "CHECK_SECONDS", 0.2)
    for _ in range(3):
        assert health.check_all() == 0
    assert (told("liar").healthy, told("liar").code) == (False, "SB003")
    # On a slow machine the time is over before the thread that asks has begun.
    assert eventually(lambda: "health_check" in liar.calls)
    assert liar.calls.count("health_check") == 1
    assert [thread.name for thread in threading.enumerate()].count("health") == 1


def test_separate_failed_checks_leave_an_idle_provider_in_service(services: Services) -> None:
    make_route("e2b", "aliyun_codeinterpreter")
    for _ in range(breaker.THRESHOLD + 1):
        services[1].fail("get", "503")
        assert health.check_all() == 1
        assert health.check_all() == 2
    row = CircuitBreaker.objects.get(provider_id="aliyun_codeinterpreter")
    assert (row.state, row.failed_checks) == ("closed", 0)


def test_failed_checks_in_a_row_take_it_out_of_service(services: Services) -> None:
    make_route("e2b", "aliyun_codeinterpreter")
    services[1].fail("get", *["503"] * breaker.THRESHOLD)
    for _ in range(breaker.THRESHOLD):
        health.check_all()
    assert not breaker.admits("aliyun_codeinterpreter")


def test_a_good_check_says_nothing_of_requests_that_fail(services: Services) -> None:
    make_route("e2b")
    for _ in range(breaker.THRESHOLD):
        breaker.report_failure("e2b", ConnectionFailed("x"))
        breaker.report_check("e2b", None)
    assert CircuitBreaker.objects.get(provider_id="e2b").state == "open"


def test_failures_that_are_far_apart_are_not_one_after_the_other(db: Any) -> None:
    for _ in range(breaker.THRESHOLD + 1):
        breaker.report_failure("e2b", ConnectionFailed("x"))
        row = CircuitBreaker.objects.get(provider_id="e2b")
        assert (row.state, row.failures) == ("closed", 1)
        assert row.failed_at is not None
        earlier = row.failed_at - breaker.TOGETHER - timedelta(seconds=1)
        CircuitBreaker.objects.update(failed_at=earlier)
