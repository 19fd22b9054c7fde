"""Which provider runs what, what happens when one fails, and that nothing ever runs twice."""

from __future__ import annotations

import random
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest
from django.db import DatabaseError

from executions.kernel.coroutines import run_sync
from executions.runs import routing
from executions.runs.models import Execution
from executions.runs.provider_calls import Step, lender
from executions.runs.requests import ExecutionRequest
from executions.runs.routing import ProviderIncompatible, RouteWalk
from providers.errors import ConnectionFailed, InvalidConfiguration, ProviderUnavailable
from providers.leases import lease_of
from providers.manager import manager
from providers.models import CircuitBreaker, ProviderConfig, ProviderPrice
from providers.services import breaker, save_config
from providers.services.route_order import planned
from providers.services.settings_cache import forget_all
from providers.tasks import check_health, sweep_leftovers
from tests.conftest import Caller, require
from tests.support.agentrun_server import AgentRunServer
from tests.support.e2b_server import E2BServer
from tests.support.policies import in_force
from tests.support.provider_fixtures import activate
from tests.support.remote_providers import e2b_config
from tests.support.routing import hops, last_execution, make_route
from tests.support.running import run, run_queued
from tests.support.wire_server import eventually

Services = tuple[E2BServer, AgentRunServer]
BOTH = ("e2b", "aliyun_codeinterpreter")

pytestmark = pytest.mark.django_db


def test_the_first_provider_of_the_route_serves(services: Services, alice: Caller) -> None:
    make_route(*BOTH)
    answer = run(alice, "print('hello')").json()
    assert (answer["status"], answer["provider"], answer["stdout"]) == (
        "succeeded",
        "e2b",
        "hello\n",
    )
    assert hops(last_execution()) == ["e2b served"]
    assert services[0].sandboxes == {}


@pytest.mark.parametrize(
    ("operation", "fault", "code"),
    [
        ("create", "429", "SB008"),
        ("create", "500", "SB004"),
        ("create", "503", "SB009"),
        ("create", "401", "SB003"),
        ("create", "cut", "SB003"),
        ("MakeDir", "404", "SB009"),
        ("MakeDir", "429", "SB008"),
    ],
)
def test_another_provider_serves_while_no_code_can_have_started(
    services: Services, alice: Caller, operation: str, fault: str, code: str
) -> None:
    make_route(*BOTH)
    services[0].fail(operation, fault)
    answer = run(alice, "print('run-token-1')").json()
    assert (answer["status"], answer["provider"]) == ("succeeded", "aliyun_codeinterpreter")
    execution = last_execution()
    assert hops(execution) == [f"e2b failed {code}", "aliyun_codeinterpreter served"]
    assert execution.hops[0]["reason"].startswith(("E2B", "The E2B"))
    assert services[0].executed["1"] + services[1].executed["1"] == 1


@pytest.mark.parametrize("fault", ["lost", "cut", "401", "404", "429", "500", "truncated", "dead"])
def test_no_other_provider_runs_what_may_have_started(
    services: Services, alice: Caller, fault: str
) -> None:
    make_route(*BOTH)
    services[0].fail("execute", fault)
    response = run(alice, "print('run-token-1')")
    assert response.status_code >= 429
    execution = last_execution()
    assert (execution.status, execution.retryable) == ("error", False)
    assert [hop.split()[0] for hop in hops(execution)] == ["e2b"]
    assert not services[1].executed
    assert services[0].executed["1"] <= 1


def test_code_that_fails_is_no_reason_to_go_on(services: Services, alice: Caller) -> None:
    make_route(*BOTH)
    assert run(alice, "1/0").json()["status"] == "failed"
    assert run(alice, "while True: pass", timeout=1).json()["status"] == "timed_out"
    assert not services[1].executed
    assert not CircuitBreaker.objects.exclude(failures=0).exists()


def test_when_all_fail_the_caller_hears_why(services: Services, alice: Caller) -> None:
    make_route(*BOTH)
    services[0].fail("create", "500")
    services[1].fail("create", "503")
    response = run(alice, "print(1)")
    assert (response.status_code, response.json()["error"]["code"]) == (503, "SB009")
    execution = last_execution()
    assert hops(execution) == ["e2b failed SB004", "aliyun_codeinterpreter failed SB009"]
    assert (execution.status, execution.retryable) == ("error", True)


def test_the_most_specific_route_is_taken(
    services: Services, alice: Caller, charlie: Caller
) -> None:
    make_route("e2b")
    make_route("aliyun_codeinterpreter", owner=alice.tenant.slug)
    make_route("e2b", "aliyun_codeinterpreter", owner=alice.tenant.slug, language="javascript")
    make_route("aliyun_codeinterpreter", language="bash", is_active=False)
    assert run(charlie, "print(1)").json()["provider"] == "e2b"
    assert run(charlie, "echo 1", language="bash").json()["provider"] == "e2b"
    assert run(alice, "print(1)").json()["provider"] == "aliyun_codeinterpreter"
    assert run(alice, "console.log(1)", language="javascript").json()["provider"] == "e2b"


def test_each_tenant_is_told_the_languages_it_can_use(
    services: Services, alice: Caller, bob: Caller, charlie: Caller
) -> None:
    make_route("aliyun_codeinterpreter")
    make_route("e2b", owner=alice.tenant.slug, language="bash")

    def languages(caller: Caller) -> list[str]:
        found: list[str] = caller.client.get("/api/v1/languages").json()["languages"]
        return found

    assert languages(charlie) == ["javascript", "nodejs", "python"]
    assert languages(alice) == languages(bob) == ["bash", "javascript", "nodejs", "python"]


def test_what_became_of_the_code_counts_more_than_the_breaker(
    services: Services, alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(*args: object) -> None:
        raise DatabaseError("locked")

    monkeypatch.setattr(breaker, "report_success", unreachable)
    make_route(*BOTH)
    assert run(alice, "print(1)").json()["status"] == "succeeded"


def test_a_provider_that_cannot_do_it_is_passed_over(services: Services, alice: Caller) -> None:
    make_route("aliyun_codeinterpreter", "e2b")
    save_config("e2b", {**e2b_config(services[0]), "timeout": 100})
    assert run(alice, "echo 1", language="bash").json()["provider"] == "e2b"
    assert hops(last_execution()) == ["aliyun_codeinterpreter passed over", "e2b served"]
    assert run(alice, "print(1)", timeout=60).json()["provider"] == "e2b"
    assert "30 s at most" in last_execution().hops[0]["reason"]
    response = run(alice, "print(1)", timeout=200)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "SB002")
    assert "100 s at most" in response.json()["error"]["message"]
    assert run(alice, "x", language="cobol").json()["error"]["code"] == "SB002"


@pytest.mark.parametrize(
    "route", [("aliyun_codeinterpreter", "e2b"), ("e2b", "aliyun_codeinterpreter")]
)
@pytest.mark.usefixtures("policies_forgotten")
def test_what_the_policy_keeps_from_the_only_provider_that_could_do_it_is_blocked(
    services: Services, alice: Caller, route: tuple[str, ...]
) -> None:
    make_route(*route)
    in_force(alice.tenant.slug, network="none")
    told = run(alice, "echo 1", language="bash").json()
    assert (told["status"], told["error"]["code"]) == ("blocked", "SB007")
    assert last_execution().error_field == "network"


def test_without_a_route_the_active_provider_serves(services: Services, alice: Caller) -> None:
    ProviderConfig.objects.filter(provider_id="e2b").delete()
    ProviderConfig.objects.filter(provider_id="aliyun_codeinterpreter").delete()
    activate("e2b", {**e2b_config(services[0]), "timeout": 30})
    assert run(alice, "print(1)").json()["provider"] == "e2b"
    assert last_execution().hops == []


def test_a_queued_execution_takes_the_same_route(services: Services, alice: Caller) -> None:
    make_route(*BOTH)
    services[0].fail("create", "503")
    queued = run(alice, "print('later')", mode="async").json()
    run_queued()
    execution = Execution.objects.get(pk=queued["id"])
    assert (execution.status, execution.provider) == ("succeeded", "aliyun_codeinterpreter")
    assert hops(execution) == ["e2b failed SB009", "aliyun_codeinterpreter served"]


def open_breaker(services: Services, caller: Caller) -> CircuitBreaker:
    """Have e2b fail until it is out of service."""
    services[0].fail("create", *["503"] * breaker.THRESHOLD)
    for _ in range(breaker.THRESHOLD):
        assert run(caller, "print(1)").json()["provider"] == "aliyun_codeinterpreter"
    return CircuitBreaker.objects.get(provider_id="e2b")


def test_failures_one_after_the_other_take_a_provider_out_of_service(
    services: Services, alice: Caller
) -> None:
    make_route(*BOTH)
    row = open_breaker(services, alice)
    assert (row.state, row.failures, row.error_code) == ("open", breaker.THRESHOLD, "SB009")
    requests = len(services[0].requests)
    assert run(alice, "print(1)").json()["provider"] == "aliyun_codeinterpreter"
    assert hops(last_execution())[0] == "e2b passed over"
    assert len(services[0].requests) == requests


def test_a_success_in_between_keeps_a_provider_in_service(
    services: Services, alice: Caller
) -> None:
    make_route(*BOTH)
    for _ in range(breaker.THRESHOLD):
        services[0].fail("create", "503")
        assert run(alice, "print(1)").json()["provider"] == "aliyun_codeinterpreter"
        assert run(alice, "print(1)").json()["provider"] == "e2b"
    assert CircuitBreaker.objects.get(provider_id="e2b").state == "closed"


def due(row: CircuitBreaker) -> None:
    """Let the time until the retry have passed."""
    CircuitBreaker.objects.filter(pk=row.pk).update(retry_at=row.changed_at - timedelta(minutes=10))


def test_of_a_provider_out_of_service_one_caller_tries(services: Services, alice: Caller) -> None:
    make_route(*BOTH)
    row = open_breaker(services, alice)
    due(row)
    assert [breaker.admits("e2b") for _ in range(3)] == [True, False, False]
    due(row)
    assert run(alice, "print(1)").json()["provider"] == "e2b"
    row.refresh_from_db()
    assert (row.state, row.failures, row.error_code) == ("closed", 0, "")


def test_each_failed_try_doubles_the_wait(services: Services, alice: Caller) -> None:
    make_route(*BOTH)
    row = open_breaker(services, alice)
    waits = []
    for _ in range(2):
        row.refresh_from_db()
        assert row.retry_at is not None
        waits.append(round((row.retry_at - row.changed_at).total_seconds()))
        due(row)
        services[0].fail("create", "503")
        assert run(alice, "print(1)").json()["provider"] == "aliyun_codeinterpreter"
    assert waits == [10, 20]


def test_late_failures_do_not_lengthen_the_wait(services: Services, alice: Caller) -> None:
    make_route(*BOTH)
    row = open_breaker(services, alice)
    breaker.report_failure("e2b", ProviderUnavailable("late"))
    row.refresh_from_db()
    assert row.openings == 1


def test_a_route_whose_providers_are_all_out_says_so_at_once(
    services: Services, alice: Caller
) -> None:
    make_route(*BOTH)
    for provider_id in BOTH:
        for _ in range(breaker.THRESHOLD):
            breaker.report_failure(provider_id, ConnectionFailed("no"))
    response = run(alice, "print(1)")
    assert (response.status_code, response.json()["error"]["code"]) == (503, "SB009")
    assert "out of service" in response.json()["error"]["message"]
    assert last_execution().retryable


def test_a_probe_takes_note_and_gives_hope(services: Services, alice: Caller) -> None:
    make_route(*BOTH)
    services[0].fault = lambda operation: "503"
    for _ in range(breaker.THRESHOLD):
        assert check_health() == 1
    assert CircuitBreaker.objects.get(provider_id="e2b").state == "open"
    services[0].fault = lambda operation: None
    assert check_health() == 2
    assert CircuitBreaker.objects.get(provider_id="e2b").state == "open"
    assert run(alice, "print(1)").json()["provider"] == "e2b"
    assert CircuitBreaker.objects.get(provider_id="e2b").state == "closed"


def test_the_sweeper_goes_to_every_service_that_can_be_swept(services: Services) -> None:
    assert sweep_leftovers() == 0
    assert "list" in services[0].requests


def test_the_cheapest_goes_first(services: Services) -> None:
    make_route(*BOTH, strategy="cheapest")
    ProviderPrice.objects.create(provider_id="e2b", per_second=Decimal("0.02"))
    ProviderPrice.objects.create(provider_id="aliyun_codeinterpreter", per_second=Decimal("0.01"))
    assert planned("", "python") == ["aliyun_codeinterpreter", "e2b"]
    ProviderPrice.objects.get(provider_id="e2b").delete()
    assert planned("", "python") == ["e2b", "aliyun_codeinterpreter"]


def test_the_fastest_goes_first_and_the_unknown_before_it(services: Services) -> None:
    make_route(*BOTH, strategy="latency")
    breaker.report_success("e2b", 100.0)
    assert planned("", "python") == ["aliyun_codeinterpreter", "e2b"]
    breaker.report_success("aliyun_codeinterpreter", 900.0)
    assert planned("", "python") == ["e2b", "aliyun_codeinterpreter"]
    assert CircuitBreaker.objects.get(provider_id="e2b").latency_ms == 100.0


def test_a_split_goes_by_weight_and_a_weight_of_0_is_a_fallback(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = random.Random(7)
    monkeypatch.setattr("providers.services.route_order.random", generator)
    route = make_route("e2b:3", "aliyun_codeinterpreter:1", strategy="weighted")
    first = [planned("", "python")[0] for _ in range(2000)]
    assert 1400 < first.count("e2b") < 1600
    route.steps.filter(weight=1).update(weight=0)
    forget_all()
    assert {tuple(planned("", "python")) for _ in range(200)} == {BOTH}


def test_a_full_pool_overflows_to_a_service(services: Services, alice: Caller) -> None:
    """The local pool has one place, which a run of another caller takes."""
    require("bwrap")
    save_config(
        "local",
        {"launcher": "bubblewrap", "pool_size": 1, "max_sandboxes": 1, "queue_timeout": 1},
    )
    make_route("local", "e2b")
    with lease_of("local") as lease:
        # A slow machine may need longer for a sandbox than anybody waits here.
        assert eventually(lambda: lease.provider.health_check().details["idle"] == 1)
        taken = lease.provider.create_instance("python", owner="another")
        assert run(alice, "print(1)").json()["provider"] == "e2b"
        assert hops(last_execution()) == ["local failed SB008", "e2b served"]
        assert not CircuitBreaker.objects.filter(provider_id="local").exists()
        lease.provider.destroy_instance(taken.instance_id)
    assert eventually(lambda: run(alice, "print(1)").json()["provider"] == "local")


def test_a_provider_that_says_it_is_full_is_not_waited_for(
    services: Services, alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_route(*BOTH)
    monkeypatch.setattr("providers.e2b.provider.E2BProvider.is_full", lambda provider: True)
    assert run(alice, "print(1)").json()["provider"] == "aliyun_codeinterpreter"
    assert last_execution().hops[0]["reason"] == "e2b is full."
    assert not services[0].created


def test_a_provider_that_was_active_a_moment_ago_is_lent_by_its_name(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager, "in_force", lambda: "e2b")
    with lease_of("e2b") as lease:
        assert (lease.provider_id, lease.provider.id) == ("e2b", "e2b")


def test_a_trial_of_a_provider_that_is_not_asked_is_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    back: list[str] = []

    async def admit(step: Step, *_: Any, **__: Any) -> Any:
        return step.provider_id

    async def use(lease: Any, held: Any, is_last: bool) -> Any:
        raise ProviderIncompatible("It does not support sessions.")

    monkeypatch.setattr(routing, "_admit", admit)
    monkeypatch.setattr(routing.breaker, "give_back", back.append)
    steps = [Step(lender(name), name) for name in ("one", "two")]
    with pytest.raises(InvalidConfiguration):
        run_sync(RouteWalk().take(steps, ExecutionRequest("1", "python"), "none", use))
    assert back == ["one", "two"]
