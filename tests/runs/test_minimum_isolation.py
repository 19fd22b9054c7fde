"""Nothing runs in a sandbox that is isolated less than deployment, tenant or route demand."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executions.capabilities.playground.service import replay_sync
from executions.client import execute_code
from executions.runs.models import Execution
from executions.sandbox import get_sandbox
from executions.tenants.models import ApiKey, Tenant
from executions.tenants.service import internal_tenant
from providers.errors import ProviderUnavailable
from providers.isolation import LEVELS, IsolationUnmet, meets, of_runtime, of_sandbox, strictest
from providers.leases import lease_of
from providers.models import CircuitBreaker, Route
from providers.runtime.pool.background import BackgroundLoop
from providers.runtime.service.launchers import LauncherChoice
from providers.runtime.service.settings import ServiceSettings
from providers.services import breaker, save_config
from providers.services.trial import try_provider
from tests.conftest import Caller, require
from tests.support.agentrun_server import AgentRunServer
from tests.support.e2b_server import E2BServer
from tests.support.lying_provider import Liar
from tests.support.routing import hops, last_execution, make_route
from tests.support.running import LOCAL, run, run_queued

Services = tuple[E2BServer, AgentRunServer]

pytestmark = pytest.mark.django_db


def assert_unmet(response: Any) -> None:
    assert response.status_code == 503
    error = response.json()["error"]
    assert (error["code"], error["field"]) == ("SB009", "minimum_isolation")
    execution = last_execution()
    assert (execution.status, execution.error_field) == ("error", "minimum_isolation")
    assert (execution.retryable, execution.isolation) == (True, "")


@given(st.lists(st.sampled_from([*LEVELS, "", "unheard of"])))
def test_the_strictest_demand_holds_and_an_unknown_one_is_the_strictest(demands: list[str]) -> None:
    floor = strictest(*demands)
    assert floor in LEVELS
    for demand in demands:
        assert meets(floor, demand)
    if "unheard of" in demands:
        assert floor == "microvm"


def test_what_is_offered_and_not_known_is_none(liar: Liar) -> None:
    provider = liar.module.Liar()
    for told in ("unheard of", "", None, 3, "microvm "):
        liar.does("isolation", lambda told=told: told)
        assert of_sandbox(provider, liar.module.LiarsSandbox())[0] == "none"
    sandbox = liar.module.LiarsSandbox({"isolation": "gvisor", "sharing": "x"})
    assert of_sandbox(provider, sandbox) == ("gvisor", "")
    assert [of_runtime(name) for name in ("gvisor", "runc", "bubblewrap", "kata", "none")] == [
        "gvisor", "namespaces", "namespaces", "none", "none",
    ]  # fmt: skip


@pytest.mark.parametrize("who", ["deployment", "tenant", "route", "key"])
def test_each_of_them_is_a_floor(
    local_active: None, alice: Caller, settings: Any, who: str
) -> None:
    assert run(alice, "print(1)").json()["isolation"] == "namespaces"
    if who == "deployment":
        settings.MINIMUM_ISOLATION = "gvisor"
    elif who == "tenant":
        alice.tenant.minimum_isolation = "gvisor"
        alice.tenant.save()
    elif who == "key":
        alice.api_key.minimum_isolation = "gvisor"
        alice.api_key.save()
    else:
        make_route("local", minimum_isolation="gvisor")
    assert_unmet(run(alice, "print(1)"))


def test_a_laxer_demand_lowers_no_other(local_active: None, alice: Caller, settings: Any) -> None:
    settings.MINIMUM_ISOLATION = "gvisor"
    alice.tenant.minimum_isolation = "none"
    alice.tenant.save()
    make_route("local", minimum_isolation="namespaces")
    assert_unmet(run(alice, "print(1)"))


@pytest.mark.parametrize("route", ["nodejs", "javascript"])
def test_another_name_of_a_language_passes_no_floor(
    local_active: None, alice: Caller, route: str
) -> None:
    make_route("local", language=route, minimum_isolation="microvm")
    for name in ("nodejs", "javascript"):
        answer = run(alice, "console.log(1)", language=name)
        assert (answer.status_code, answer.json()["error"]["field"]) == (503, "minimum_isolation")
    assert run(alice, "print(1)").json()["status"] == "succeeded"


def test_a_record_says_isolation_and_sharing(local_active: None, alice: Caller) -> None:
    answer = run(alice, "print(1)").json()
    assert (answer["runtime"], answer["isolation"], answer["sharing"]) == (
        "bubblewrap", "namespaces", "execution",
    )  # fmt: skip
    assert last_execution().isolation == "namespaces"
    listed = alice.client.get("/api/v1/executions").json()["results"][0]
    assert (listed["isolation"], listed["sharing"]) == ("namespaces", "execution")


def test_no_fallback_goes_below(services: Services, alice: Caller) -> None:
    """The strong one is out, the weak one would do it."""
    require("bwrap")
    save_config("local", LOCAL)
    make_route("e2b", "local", minimum_isolation="microvm")
    with lease_of("local"):
        # How weak it is, is known once it has started.
        pass
    assert run(alice, "print(1)").json()["isolation"] == "microvm"
    services[0].fail("create", "503")
    assert_unmet(run(alice, "print(1)"))
    assert hops(last_execution()) == ["e2b failed SB009", "local passed over"]
    breaker.report_failure("e2b", ProviderUnavailable("x"))
    breaker.report_failure("e2b", ProviderUnavailable("x"))
    assert_unmet(run(alice, "print(1)"))
    assert hops(last_execution()) == ["e2b passed over", "local passed over"]
    assert CircuitBreaker.objects.filter(provider_id="local", failures__gt=0).count() == 0


def test_what_may_have_started_is_told_though_another_is_too_weak(
    services: Services, alice: Caller
) -> None:
    require("bwrap")
    save_config("local", LOCAL)
    make_route("local", "e2b", minimum_isolation="microvm")
    services[0].fail("execute", "cut")
    response = run(alice, "print(1)")
    assert response.json()["error"]["field"] is None
    assert not last_execution().retryable


def test_one_that_is_full_is_told_as_such(services: Services, alice: Caller) -> None:
    require("bwrap")
    save_config("local", LOCAL)
    make_route("local", "e2b", minimum_isolation="microvm")
    services[0].fail("create", "429")
    assert run(alice, "print(1)").json()["error"]["code"] == "SB008"


def test_one_that_is_too_weak_takes_nobodys_trial(
    services: Services, alice: Caller, charlie: Caller
) -> None:
    """Or whoever demands more could keep a provider out of service for all."""
    require("bwrap")
    save_config("local", LOCAL)
    make_route("local", "e2b")
    alice.tenant.minimum_isolation = "microvm"
    alice.tenant.save()
    for _ in range(breaker.THRESHOLD):
        breaker.report_failure("local", ProviderUnavailable("x"))
    breaker.let_one_try("local")
    assert run(alice, "print(1)").json()["provider"] == "e2b"
    assert run(charlie, "print(1)").json()["provider"] == "local"


def test_a_sandbox_below_what_its_provider_promised_runs_nothing(liar: Liar, alice: Caller) -> None:
    liar.does("isolation", lambda: "microvm")
    weak = liar.module.LiarsSandbox({"isolation": "none"})
    liar.does("open", lambda: weak)
    assert_unmet(run(alice, "print(1)"))
    assert liar.calls.count("run") == 0
    assert "close" in liar.calls


def test_a_provider_that_declares_nothing_is_none(liar: Liar, alice: Caller, settings: Any) -> None:
    liar.does("isolation", lambda: "")
    response = run(alice, "print(1)")
    assert_unmet(response)
    assert "declares no isolation" in response.json()["error"]["message"]
    tried = try_provider("liar", {})
    assert (tried.success, tried.code, tried.field) == (False, "SB009", "minimum_isolation")
    settings.MINIMUM_ISOLATION = "none"
    assert run(alice, "print(1)").json()["isolation"] == "none"


def test_a_queued_run_is_held_to_the_floor_of_its_time(local_active: None, alice: Caller) -> None:
    queued = run(alice, "print(1)", mode="async").json()
    alice.tenant.minimum_isolation = "gvisor"
    alice.tenant.save()
    run_queued()
    execution = Execution.objects.get(pk=queued["id"])
    assert (execution.status, execution.error_field) == ("error", "minimum_isolation")


def test_a_replay_keeps_to_what_the_tenant_demands(local_active: None, alice: Caller) -> None:
    run(alice, "print(1)")
    original = last_execution()
    alice.tenant.minimum_isolation = "gvisor"
    alice.tenant.save()
    outcome = replay_sync(Execution.objects.get(pk=original.pk))
    assert outcome.error is not None
    assert outcome.error.field == "minimum_isolation"


@pytest.mark.parametrize("gone", [False, True], ids=["strict", "removed"])
def test_a_replay_keeps_to_what_the_key_demands(
    local_active: None, alice: Caller, gone: bool
) -> None:
    run(alice, "print(1)")
    original = last_execution()
    if gone:
        alice.api_key.delete()
    else:
        ApiKey.objects.update(minimum_isolation="gvisor")
    outcome = replay_sync(Execution.objects.get(pk=original.pk))
    assert outcome.error is not None
    assert outcome.error.field == "minimum_isolation"


def test_what_a_tenant_that_is_gone_demanded_is_taken_for_the_strictest(
    local_active: None, alice: Caller
) -> None:
    run(alice, "print(1)")
    original = Execution.objects.get()
    alice.tenant.delete()
    original.refresh_from_db()
    outcome = replay_sync(original)
    assert outcome.error is not None
    assert outcome.error.field == "minimum_isolation"


@pytest.mark.parametrize("gone", [True, False], ids=["removed", "inactive"])
def test_what_a_tenant_has_queued_ends_with_it(
    local_active: None, alice: Caller, gone: bool
) -> None:
    queued = run(alice, "print(1)", mode="async").json()
    if gone:
        alice.tenant.delete()
    else:
        Tenant.objects.update(is_active=False)
    run_queued()
    execution = Execution.objects.get(pk=queued["id"])
    assert (execution.status, execution.error_code, execution.runtime) == ("error", "SB009", "")


def test_a_replay_keeps_to_the_route_of_the_original(local_active: None, alice: Caller) -> None:
    run(alice, "print(1)")
    original = last_execution()
    make_route("local", owner=alice.tenant.slug, minimum_isolation="gvisor")
    outcome = replay_sync(Execution.objects.get(pk=original.pk))
    assert isinstance(outcome.error, IsolationUnmet)


def test_code_of_this_process_is_held_to_it_too(local_active: None, settings: Any) -> None:
    tenant = internal_tenant()
    tenant.minimum_isolation = "gvisor"
    tenant.save()
    for call in (lambda: execute_code("print(1)"), lambda: get_sandbox().execute("print(1)")):
        with pytest.raises(IsolationUnmet):
            call()


def test_the_opt_out_needs_a_floor_that_allows_it(
    settings: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    settings.SANDBOX_LOCAL_UNISOLATED = True
    settings.DATA_DIR = tmp_path
    monkeypatch.setenv("PATH", str(tmp_path))
    tried = try_provider("local", {**LOCAL, "pool_size": 1})
    assert (tried.success, tried.field) == (False, "minimum_isolation")
    assert "MINIMUM_ISOLATION=none" in tried.message
    settings.MINIMUM_ISOLATION = "none"
    tried = try_provider("local", {**LOCAL, "pool_size": 1})
    assert (tried.success, tried.isolation) == (True, "none")


def test_a_pool_uses_nothing_below_its_own_floor(settings: Any) -> None:
    """RAGFlow's requests reach the service past us, so it has the floor itself."""
    require("bwrap")
    choice = LauncherChoice("bubblewrap", settings.DATA_DIR, "floor", minimum_isolation="gvisor")
    loop = BackgroundLoop("floor")
    try:
        with pytest.raises(ProviderUnavailable, match="MINIMUM_ISOLATION is gvisor"):
            loop.call(choice.open(ServiceSettings()))
    finally:
        loop.stop()


def test_a_route_and_a_tenant_take_no_unknown_level(alice: Caller) -> None:
    from django.db import IntegrityError, transaction

    with pytest.raises(IntegrityError), transaction.atomic():
        Route.objects.create(minimum_isolation="strong")
    with pytest.raises(IntegrityError), transaction.atomic():
        type(alice.tenant).objects.filter(pk=alice.tenant.pk).update(minimum_isolation="strong")
