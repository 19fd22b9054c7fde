"""A provider's timeout is the time of a run that names none, and the most that one may name."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from executions.capabilities.playground.service import recorded_request
from executions.runs.models import Execution
from executions.runs.requests import Caller as Asker
from executions.runs.requests import ExecutionRequest
from executions.runs.service import execute_sync
from providers.manager import manager
from providers.models import ProviderConfig
from providers.services import save_config
from tests.conftest import Caller, require
from tests.support.agentrun_server import AgentRunServer
from tests.support.e2b_server import E2BServer
from tests.support.lying_provider import Liar
from tests.support.routing import last_execution, make_route
from tests.support.running import LOCAL, activate, run, run_queued

Services = tuple[E2BServer, AgentRunServer]

pytestmark = [pytest.mark.django_db, pytest.mark.one_database]


def refusal(response: Any) -> tuple[int, str, str]:
    error = response.json()["error"]
    return response.status_code, error["code"], error["field"]


def given_to_the_provider(liar: Liar) -> float:
    seconds: float = liar.module.jobs[-1].timeout
    return seconds


def test_a_run_that_names_none_has_the_providers(liar: Liar, alice: Caller) -> None:
    liar.does("max_timeout", lambda: 7)
    assert run(alice, "print(1)").json()["status"] == "succeeded"
    assert (given_to_the_provider(liar), last_execution().timeout) == (7.0, 7.0)
    liar.does("max_timeout", lambda: 100.0)
    run(alice, "print(1)")
    assert (given_to_the_provider(liar), last_execution().timeout) == (100.0, 100.0)


def test_one_without_its_own_takes_the_services(liar: Liar, alice: Caller, settings: Any) -> None:
    settings.SANDBOX_TIMEOUT_SEC = 21
    run(alice, "print(1)")
    assert (given_to_the_provider(liar), last_execution().timeout) == (21.0, 21.0)


@pytest.mark.parametrize(("longest", "seconds"), [(7, 7.0), (100, 10.0), (None, 10.0)])
def test_what_is_usual_is_cut_to_the_providers_and_never_refused(
    liar: Liar, alice: Caller, longest: float | None, seconds: float
) -> None:
    liar.does("max_timeout", lambda: longest)
    request = ExecutionRequest("print(1)", usual_timeout=10)
    assert execute_sync(request, Asker(alice.tenant)).execution.status == "succeeded"
    assert given_to_the_provider(liar) == seconds


def test_no_provider_allows_more_than_the_service_does(
    liar: Liar, alice: Caller, settings: Any
) -> None:
    settings.SANDBOX_MAX_TIMEOUT_SEC = 50
    liar.does("max_timeout", lambda: 600)
    run(alice, "print(1)")
    assert given_to_the_provider(liar) == 50.0
    assert refusal(run(alice, "print(1)", timeout=51)) == (400, "SB002", "timeout")


def test_a_named_one_holds_up_to_the_providers_and_is_refused_beyond_it(
    liar: Liar, alice: Caller
) -> None:
    liar.does("max_timeout", lambda: 7)
    run(alice, "print(1)", timeout=7)
    assert (given_to_the_provider(liar), last_execution().timeout) == (7.0, 7.0)
    liar.module.calls.clear()
    assert refusal(run(alice, "print(1)", timeout=7.5)) == (400, "SB002", "timeout")
    assert "open" not in liar.calls


@pytest.mark.parametrize("told", [float("nan"), float("inf"), 0, -1, "7", True, [7], 10**400])
def test_a_bound_that_is_none_is_no_bound(liar: Liar, alice: Caller, told: Any) -> None:
    liar.does("max_timeout", lambda: told)
    assert run(alice, "print(1)").json()["status"] == "succeeded"
    assert run(alice, "print(1)", timeout=60).json()["status"] == "succeeded"
    assert given_to_the_provider(liar) == 60.0


def test_one_that_waits_for_a_worker_has_the_time_of_whoever_runs_it(
    liar: Liar, alice: Caller, settings: Any
) -> None:
    """Nobody knows which provider that will be, and nothing is to be given up before its time."""
    settings.SANDBOX_MAX_TIMEOUT_SEC = 1000
    seen: list[timedelta] = []

    def look() -> Any:
        execution = Execution.objects.get()
        assert execution.started_at is not None
        assert execution.deadline is not None
        seen.append(execution.deadline - execution.started_at)
        return 900

    liar.does("max_timeout", look)
    run(alice, "print(1)", mode="async")
    assert run_queued() is not None
    assert seen[0] >= timedelta(seconds=1000)
    assert (given_to_the_provider(liar), last_execution().timeout) == (900.0, 900.0)


def test_a_key_stands_for_the_request_and_not_for_what_the_provider_made_of_it(
    liar: Liar, alice: Caller
) -> None:
    liar.does("max_timeout", lambda: 7)
    first = run(alice, "print(1)", idempotency_key="k").json()
    liar.does("max_timeout", lambda: 9)
    assert run(alice, "print(1)", idempotency_key="k").json()["id"] == first["id"]
    assert run(alice, "print(1)", idempotency_key="k", timeout=7).status_code == 409


def test_a_replay_takes_the_time_that_was_in_force(liar: Liar, alice: Caller) -> None:
    liar.does("max_timeout", lambda: 7)
    run(alice, "print(1)")
    assert recorded_request(last_execution()).timeout == 7.0
    # One that no provider was found for has had none in force.
    Execution.objects.update(provider="", timeout=300)
    assert recorded_request(last_execution()).timeout is None


def test_a_route_goes_on_to_the_one_that_has_the_time(services: Services, alice: Caller) -> None:
    save_config("aliyun_codeinterpreter", {**config_of("aliyun_codeinterpreter"), "timeout": 5})
    save_config("e2b", {**config_of("e2b"), "timeout": 20})
    make_route("aliyun_codeinterpreter", "e2b")
    assert run(alice, "print(1)").json()["provider"] == "aliyun_codeinterpreter"
    assert last_execution().timeout == 5.0
    assert run(alice, "print(1)", timeout=6).json()["provider"] == "e2b"
    assert refusal(run(alice, "print(1)", timeout=21)) == (400, "SB002", "timeout")


def test_e2b_refuses_no_run_that_names_none(services: Services, alice: Caller) -> None:
    """Its bound is below the service's default."""
    activate("e2b", {**config_of("e2b", remove=True), "timeout": 10})
    assert run(alice, "print(1)").json()["status"] == "succeeded"
    assert last_execution().timeout == 10.0
    assert refusal(run(alice, "print(1)", timeout=11)) == (400, "SB002", "timeout")


def test_local_ends_a_run_at_its_own_timeout(db: None, alice: Caller) -> None:
    require("bwrap")
    activate("local", {**LOCAL, "timeout": 1})
    try:
        answer = run(alice, "while True: pass").json()
        assert (answer["status"], answer["error"]["code"]) == ("timed_out", "SB005")
        assert "longer than 1 s" in answer["error"]["message"]
        assert refusal(run(alice, "print(1)", timeout=2)) == (400, "SB002", "timeout")
    finally:
        manager.close()


def config_of(provider_id: str, *, remove: bool = False) -> dict[str, Any]:
    rows = ProviderConfig.objects.filter(provider_id=provider_id)
    config: dict[str, Any] = rows.get().config
    if remove:
        rows.delete()
    return config
