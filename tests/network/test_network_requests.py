"""The field `network` of a run: within the lists around it, on a provider that holds it."""

from __future__ import annotations

from typing import Any

import pytest

from executions.capabilities.playground.service import replay_sync
from executions.runs import payloads
from executions.runs.models import Execution
from executions.runs.requests import ExecutionRequest
from providers.network import Budget, Network, Target
from tests.conftest import Caller
from tests.support.lying_provider import Liar
from tests.support.networks import listed
from tests.support.policies import in_force
from tests.support.routing import hops, last_execution, make_route
from tests.support.running import run, run_queued

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("lists_forgotten")]

PYPI: dict[str, Any] = {"allow": ["pypi.org"]}


@pytest.fixture(autouse=True)
def _holds(liar: Liar) -> None:
    liar.does("holds_network", lambda: True)


def given(liar: Liar) -> Network | None:
    """The network of the last sandbox that was asked for."""
    found: Network | None = liar.module.specs[-1].network
    return found


def reaches(network: Network | None, host: str, port: int = 443) -> bool:
    return network is not None and network.judge(Target(host, port, "https")).is_allowed


def refusal(answer: Any) -> str:
    """Why a request was refused before anything was recorded."""
    assert answer.status_code == 400, answer.content
    error = answer.json()["error"]
    assert (error["code"], error["field"]) == ("SB002", "network"), error
    assert not Execution.objects.exists()
    return str(error["message"])


def test_without_a_list_a_run_has_no_network_and_may_ask_for_none(
    liar: Liar, alice: Caller
) -> None:
    assert run(alice, "1").status_code == 200
    assert run(alice, "1", network={"mode": "none"}).status_code == 200
    assert run(alice, "1", network={}).status_code == 200
    assert [spec.network for spec in liar.module.specs] == [None] * 3
    Execution.objects.all().delete()
    for asked in (PYPI, {"mode": "open"}, {"preset": "packages"}):
        assert "Network lists in the admin" in refusal(run(alice, "1", network=asked))


def test_a_run_has_the_lists_of_installation_tenant_and_its_own(liar: Liar, alice: Caller) -> None:
    listed("*.pypi.org", "pypi.org", "npmjs.org", connections=9)
    listed("pypi.org", "npmjs.org", tenant=alice.tenant.slug, connections=5, mib=1)
    assert run(alice, "1", network=PYPI).status_code == 200
    network = given(liar)
    assert network is not None
    assert [layer.name for layer in network.layers] == ["installation", "tenant", "run"]
    assert network.budget == Budget(5, 1200, 1024 * 1024)
    assert reaches(network, "pypi.org")
    assert not reaches(network, "npmjs.org")
    assert run(alice, "1").status_code == 200
    assert given(liar) is None


@pytest.mark.parametrize(
    ("rule", "whose"),
    [
        ("npmjs.org", "tenant alice"),
        ("evil.test", "installation"),
        ("*.pypi.org", "tenant alice"),
        ("*.org.test", "installation"),
        ("pypi.org.evil.test", "installation"),
        ("notpypi.org", "installation"),
    ],
)
def test_a_host_that_a_list_around_it_does_not_have_is_refused_at_once(
    liar: Liar, alice: Caller, rule: str, whose: str
) -> None:
    listed("*.pypi.org", "pypi.org", "npmjs.org")
    listed("pypi.org", "files.pypi.org", tenant=alice.tenant.slug)
    whose = whose.replace("alice", alice.tenant.slug)
    message = refusal(run(alice, "1", network={"allow": ["pypi.org", rule]}))
    assert rule in message
    assert whose in message
    assert not liar.module.specs


@pytest.mark.parametrize(
    "asked",
    [
        {"allow": ["*.com"]},
        {"allow": ["*.github.io"]},
        {"allow": ["user@pypi.org"]},
        {"allow": ["0x7f.1"]},
        {"allow": [""]},
        {"allow": ["pypi.org\nevil.test"]},
        {"allow": ["pypi.org"] * 501},
        {"allow": "pypi.org"},
        {"mode": "open", "allow": ["pypi.org"]},
        {"mode": "none", "preset": "packages"},
        {"mode": "allowlist"},
        {"mode": "all"},
        {"preset": "everything"},
        {"log_only": True},
        "open",
        ["pypi.org"],
    ],
)
def test_what_is_no_network_is_refused(liar: Liar, alice: Caller, asked: Any) -> None:
    listed(mode="open")
    refusal(run(alice, "1", network=asked))
    assert not liar.module.specs


def test_open_is_no_more_than_the_lists_around_it(liar: Liar, alice: Caller) -> None:
    listed("pypi.org")
    assert run(alice, "1", network={"mode": "open"}).status_code == 200
    assert reaches(given(liar), "pypi.org")
    assert not reaches(given(liar), "evil.test")


def test_a_preset_adds_its_rules(liar: Liar, alice: Caller) -> None:
    listed(mode="open")
    asked = {"preset": "packages", "allow": ["example.com"]}
    assert run(alice, "1", network=asked).status_code == 200
    for host, expected in (("pypi.org", True), ("example.com", True), ("evil.test", False)):
        assert reaches(given(liar), host) is expected


def test_by_default_a_run_has_what_its_tenants_list_gives(
    liar: Liar, alice: Caller, charlie: Caller
) -> None:
    listed("pypi.org", by_default=True)
    assert run(charlie, "1").status_code == 200
    assert reaches(given(liar), "pypi.org")
    assert run(charlie, "1", network={"mode": "none"}).status_code == 200
    assert given(liar) is None
    # Her own list decides for her.
    own = listed("pypi.org", tenant=alice.tenant.slug)
    assert run(alice, "1").status_code == 200
    assert given(liar) is None
    own.by_default = True
    own.save()
    assert run(alice, "1").status_code == 200
    assert reaches(given(liar), "pypi.org")


def test_a_list_that_only_logs_refuses_nothing(liar: Liar, alice: Caller) -> None:
    listed("pypi.org", log_only=True)
    assert run(alice, "1", network={"allow": ["example.com"]}).status_code == 200
    assert reaches(given(liar), "example.com")
    assert not reaches(given(liar), "pypi.org")


def test_a_draft_is_not_in_force(liar: Liar, alice: Caller) -> None:
    listed(mode="open", draft=True)
    refusal(run(alice, "1", network=PYPI))


def test_a_provider_that_does_not_hold_it_is_not_used(liar: Liar, alice: Caller) -> None:
    listed("pypi.org", by_default=True)
    liar.does("holds_network", lambda: False)
    for body in ({"network": PYPI}, {}):
        error = run(alice, "1", **body).json()["error"]
        assert (error["code"], error["field"]) == ("SB002", "network")
        assert "does not hold network lists" in error["message"]
    assert not liar.module.specs
    assert run(alice, "1", network={"mode": "none"}).status_code == 200


def test_a_policy_without_network_refuses_a_run_with_one(liar: Liar, alice: Caller) -> None:
    listed("pypi.org")
    in_force(alice.tenant.slug, network="none")
    told = run(alice, "1", network=PYPI).json()
    assert (told["status"], told["error"]["code"]) == ("blocked", "SB007")
    assert not liar.module.specs


def test_a_queued_run_is_held_to_the_lists_when_it_runs(liar: Liar, alice: Caller) -> None:
    row = listed("pypi.org", "npmjs.org")
    asked = {"allow": ["npmjs.org"]}
    queued = run(alice, "1", network=asked, mode="async")
    assert queued.status_code == 202
    waiting = Execution.objects.get(pk=queued.json()["id"])
    assert payloads.read(waiting)["network"]["allow"] == ["npmjs.org"]
    row.rules = "pypi.org"
    row.save()
    run_queued()
    error = alice.client.get(f"/api/v1/executions/{waiting.pk}").json()["error"]
    assert error["code"] == "SB002"
    assert not liar.module.specs

    row.rules = "npmjs.org"
    row.save()
    assert run(alice, "1", network=asked, mode="async").status_code == 202
    run_queued()
    assert reaches(given(liar), "npmjs.org")


def test_an_idempotency_key_is_for_the_same_network(liar: Liar, alice: Caller) -> None:
    listed(mode="open")
    first = run(alice, "1", network=PYPI, idempotency_key="key")
    again = run(alice, "1", network=PYPI, idempotency_key="key")
    assert again.json()["id"] == first.json()["id"]
    for other in ({}, {"network": {"allow": ["npmjs.org"]}}, {"network": {"mode": "open"}}):
        assert run(alice, "1", idempotency_key="key", **other).status_code == 409


def test_a_request_without_network_has_the_hash_it_had() -> None:
    plain = ExecutionRequest("1")
    assert plain.run_hash() == ExecutionRequest("1", network=None).run_hash()
    assert plain.run_hash() != ExecutionRequest("1", network={"mode": "none"}).run_hash()  # type: ignore[arg-type]


def test_a_replay_has_the_default_network_of_the_tenant_whose_code_it_is(
    liar: Liar, alice: Caller
) -> None:
    listed("pypi.org", by_default=True)
    listed(mode="none", tenant=alice.tenant.slug)
    run(alice, "1")
    replay_sync(Execution.objects.get())
    assert (len(liar.module.specs), given(liar)) == (2, None)


def test_a_route_passes_over_a_provider_that_does_not_hold_it(
    services: Any, liar: Liar, alice: Caller
) -> None:
    make_route("e2b", "liar")
    listed("pypi.org")
    assert run(alice, "1", network=PYPI).status_code == 200
    assert hops(last_execution()) == ["e2b passed over", "liar served"]
    assert reaches(given(liar), "pypi.org")
