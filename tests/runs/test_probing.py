"""Whether a provider is ill is found out by a program of ours, and by nobody's code."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from providers.errors import ConnectionFailed, ProviderUnavailable, RateLimited
from providers.models import CircuitBreaker
from providers.services import breaker, probing
from providers.values import ExecutionResult
from tests.conftest import Caller
from tests.support.agentrun_server import AgentRunServer
from tests.support.e2b_server import E2BServer
from tests.support.lying_provider import Liar
from tests.support.routing import make_route
from tests.support.running import run

Services = tuple[E2BServer, AgentRunServer]

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.database]


def raising(error: BaseException) -> Callable[[], Any]:
    def action() -> Any:
        raise error

    return action


def state() -> tuple[str, int]:
    row = CircuitBreaker.objects.get(provider_id="liar")
    return row.state, row.failures


def test_what_failed_after_the_code_started_counts_nothing(
    services: Services, alice: Caller, doubted: list[str]
) -> None:
    make_route("e2b", "aliyun_codeinterpreter")
    for _ in range(breaker.THRESHOLD + 1):
        services[0].fail("execute", "cut")
        assert run(alice, "print(1)").status_code >= 500
    row = CircuitBreaker.objects.get(provider_id="e2b")
    assert (row.state, row.failures) == ("closed", 0)
    assert doubted == ["e2b"]
    assert run(alice, "print(1)").json()["provider"] == "e2b"


def test_what_failed_before_it_still_counts(
    services: Services, alice: Caller, doubted: list[str]
) -> None:
    make_route("e2b", "aliyun_codeinterpreter")
    for _ in range(breaker.THRESHOLD):
        services[0].fail("create", "503")
        assert run(alice, "print(1)").json()["provider"] == "aliyun_codeinterpreter"
    assert CircuitBreaker.objects.get(provider_id="e2b").state == "open"
    assert doubted == []


def test_a_started_error_never_counts_however_it_is_reported(liar: Liar) -> None:
    for _ in range(breaker.THRESHOLD):
        breaker.report_failure("liar", ProviderUnavailable("x", started=True))
    assert not CircuitBreaker.objects.filter(failures__gt=0).exists()


def test_a_sandbox_that_dies_clears_no_failure_and_adds_none(
    liar: Liar, alice: Caller, doubted: list[str]
) -> None:
    make_route("liar")
    breaker.report_failure("liar", ConnectionFailed("x"))
    liar.answers(exit_code=137, metadata={"sandbox_ended": "It ended by itself"})
    assert run(alice, "print(1)").json()["status"] == "failed"
    assert state() == ("closed", 1)
    assert doubted == ["liar"]


def test_a_probe_that_comes_to_its_end_clears_the_failures(liar: Liar) -> None:
    breaker.report_failure("liar", ConnectionFailed("x"))
    breaker.report_failure("liar", ConnectionFailed("x"))
    probing._decide("liar")
    assert state() == ("closed", 0)
    assert liar.calls.count("run") == liar.calls.count("close") == 1


@pytest.mark.parametrize("method", ["open", "run"])
def test_a_provider_that_is_ill_is_found_out(
    liar: Liar, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setattr(probing, "AGAIN_SECONDS", 0)
    liar.does(method, raising(SystemExit(3)))
    probing._decide("liar")
    assert state() == ("open", breaker.THRESHOLD)


@pytest.mark.parametrize("answer", [None, ExecutionResult("43\n", "", 0, 0.1)])
def test_one_that_does_not_run_the_program_is_ill(liar: Liar, answer: Any) -> None:
    liar.does("run", lambda: answer)
    assert probing.probe("liar") is not None


def test_one_that_never_answers_is_ill(liar: Liar, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "DEADLINE_SECONDS", 0.2)
    go = threading.Event()
    liar.does("open", lambda: go.wait(60))
    error = probing.probe("liar")
    go.set()
    assert error is not None
    assert "no answer" in error.message


def test_one_that_is_full_is_not_ill(liar: Liar) -> None:
    liar.does("open", raising(RateLimited("full")))
    probing._decide("liar")
    assert not CircuitBreaker.objects.filter(failures__gt=0).exists()


def test_there_is_one_probe_at_a_time_and_then_a_pause(
    liar: Liar, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []
    monkeypatch.setattr(probing, "_start", started.append)
    assert [probing.doubt("liar") for _ in range(3)] == [True, False, False]
    probing._end("liar")
    assert not probing.doubt("liar")
    earlier = timezone.now() - probing.PAUSE - timedelta(seconds=1)
    CircuitBreaker.objects.filter(provider_id="liar").update(probed_at=earlier)
    assert probing.doubt("liar")
    probing._end("liar")
    assert started == ["liar", "liar"]


def test_it_runs_in_the_background_under_a_name_of_the_services_own(
    liar: Liar, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = threading.Event()
    decide = probing._decide

    def noting(provider_id: str) -> None:
        decide(provider_id)
        done.set()

    monkeypatch.setattr(
        probing,
        "_start",
        lambda provider_id: threading.Thread(target=noting, args=(provider_id,)).start(),
    )
    assert probing.doubt("liar")
    assert done.wait(60)
    assert state() == ("closed", 0)
    assert ":" in probing.OWNER
