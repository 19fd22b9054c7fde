"""What became of each attempt to reach a host: in the record, found by host, and bounded."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from executions.capabilities.network.attempts import store
from executions.capabilities.network.models import NetworkAttempt
from executions.capabilities.observability.metrics import collect
from executions.capabilities.retention.service import apply_retention
from executions.kernel.text import first_uuid7, uuid7
from executions.ledger.verification import verify
from executions.runs.models import Execution
from executions.runs.network import MOST_BYTES, checked_attempts
from providers.network import MOST_LISTED
from tests.conftest import Caller
from tests.support.approvals import signed_in
from tests.support.lying_provider import Liar
from tests.support.networks import ALLOWED, REFUSED, attempts, listed
from tests.support.running import run

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("lists_forgotten")]

LIST = "/api/v1/network/attempts"
ASKED: dict[str, Any] = {"network": {"allow": ["pypi.org", "evil.test"]}}


@pytest.fixture(autouse=True)
def _tries(liar: Liar) -> None:
    """Every run tries two hosts."""
    listed("pypi.org", "evil.test")
    liar.does("holds_network", lambda: True)
    liar.answers(metadata={"network": attempts(ALLOWED, REFUSED).to_json()}, exit_code=0)


def found(caller: Caller, **query: str) -> list[tuple[str, str]]:
    answer = caller.client.get(LIST, query)
    assert answer.status_code == 200, answer.content
    return [(each["host"], each["outcome"]) for each in answer.json()["results"]]


def test_the_record_has_the_lists_the_figures_and_the_attempts(alice: Caller) -> None:
    told = run(alice, "1", **ASKED).json()
    network = told["network"]
    assert [each["name"] for each in network["lists"]] == ["installation", "run"]
    assert network["lists"][1]["allow"] == ["pypi.org", "evil.test"]
    figures = ("allowed", "refused", "failed", "sent", "received")
    assert [network[name] for name in figures] == [1, 1, 0, 120, 4096]
    first, second = network["attempts"]
    assert (first["host"], first["port"], first["rule"]) == ("pypi.org", 443, "pypi.org")
    assert (second["host"], second["outcome"], second["layer"]) == (
        "evil.test",
        "refused",
        "tenant",
    )
    assert alice.client.get(f"/api/v1/executions/{told['id']}").json()["network"] == network
    # A host that was refused is a remark, and says whom to ask.
    [remark] = told["policy"]["warnings"]
    assert remark["name"].startswith("network: evil.test:443 was refused by the tenant's list; ask")


def test_a_run_without_network_says_nothing_of_one(liar: Liar, alice: Caller) -> None:
    liar.answers(exit_code=0)
    assert run(alice, "1").json()["network"] is None


def test_the_ledger_covers_the_attempts_of_a_run(alice: Caller) -> None:
    run(alice, "1", **ASKED)
    assert verify().is_intact
    execution = Execution.objects.get()
    execution.meta["network"]["attempts"][1]["host"] = "good.test"
    Execution.objects.filter(pk=execution.pk).update(meta=execution.meta)
    assert not verify().is_intact


def test_only_its_own_tenant_finds_an_attempt(alice: Caller, bob: Caller, charlie: Caller) -> None:
    run(alice, "1", **ASKED)
    both = [("evil.test", "refused"), ("pypi.org", "allowed")]
    assert sorted(found(alice)) == sorted(found(bob)) == both
    assert found(charlie) == []
    assert found(alice, host="PyPI.org.") == [("pypi.org", "allowed")]
    assert found(alice, host="*.test") == found(alice, outcome="refused") == both[:1]
    assert found(alice, host="ypi.org") == []
    for query in ({"outcome": "lost"}, {"who": "me"}):
        assert alice.client.get(LIST, query).status_code == 400
    alice.api_key.scopes = "execute"
    alice.api_key.save()
    assert alice.client.get(LIST).status_code == 403


def test_pages_go_on_where_the_last_one_ended(alice: Caller) -> None:
    run(alice, "1", **ASKED)
    first = alice.client.get(LIST, {"limit": 1}).json()
    second = alice.client.get(first["next"]).json()
    assert {each["host"] for each in first["results"] + second["results"]} == {
        "pypi.org", "evil.test",
    }  # fmt: skip
    assert second["next"] is None


def test_an_attempt_goes_with_its_execution(alice: Caller) -> None:
    run(alice, "1", **ASKED)
    assert NetworkAttempt.objects.count() == 2
    Execution.objects.get().delete()
    assert not NetworkAttempt.objects.exists()


def test_a_key_that_only_runs_reads_the_network_of_its_own_run(alice: Caller) -> None:
    alice.api_key.scopes = "execute"
    alice.api_key.save()
    assert run(alice, "1", **ASKED).json()["network"]["refused"] == 1


@pytest.mark.parametrize(
    "claimed",
    [
        *(None, 1, "x", []),
        *({"attempts": 1}, {"attempts": [1, None, {}]}),
        *({"allowed": -1}, {"allowed": True}, {"sent": 1 << 60}),
    ],
)
def test_what_is_no_attempt_is_not_recorded(liar: Liar, alice: Caller, claimed: Any) -> None:
    liar.answers(metadata={"network": claimed}, exit_code=0)
    told = run(alice, "1", **ASKED).json()
    assert told["status"] == "succeeded"
    assert told["network"]["attempts"] == []
    assert [told["network"][name] for name in ("allowed", "sent")] == [0, 0]
    assert not NetworkAttempt.objects.exists()


@pytest.mark.parametrize(
    "wrong",
    [
        *({"at": math.nan}, {"at": -1}, {"at": 1e12}, {"at": True}, {"at": "0"}, {"port": 65536}),
        *({"port": True}, {"host": ""}, {"host": 1}, {"outcome": "granted"}, {"outcome": ["x"]}),
    ],
)
def test_an_attempt_that_is_none_is_left_out(wrong: dict[str, Any]) -> None:
    bad = {**ALLOWED.to_json(), **wrong}
    checked = checked_attempts({"allowed": 2, "attempts": [bad, REFUSED.to_json()]})
    assert checked is not None
    assert [each["host"] for each in checked["attempts"]] == ["evil.test"]


def test_what_a_program_names_is_bounded(liar: Liar, alice: Caller) -> None:
    large = replace(REFUSED, host="\0h" * 9999, path="/" + "\ud800p" * 9999, why="w" * 9999)
    small = [replace(ALLOWED, host=f"h{number}.test").to_json() for number in range(1000)]
    claimed = {"allowed": 1001, "attempts": [large.to_json(), *small], "seconds": math.inf}
    checked = checked_attempts(claimed)
    assert checked is not None
    assert len(checked["attempts"]) == MOST_LISTED
    assert len(str(checked["attempts"][0])) < 2000
    many = [replace(large, path=f"/{number}" + "ü" * 300).to_json() for number in range(200)]
    checked = checked_attempts({"attempts": many})
    assert checked is not None
    assert len(str(checked).encode()) < 2 * MOST_BYTES

    liar.answers(metadata={"network": claimed, "other": "x"}, exit_code=0)
    told = run(alice, "1", **ASKED).json()
    assert len(told["network"]["attempts"]) == NetworkAttempt.objects.count() == MOST_LISTED
    assert verify().is_intact


def test_a_provider_states_no_lists(liar: Liar, alice: Caller) -> None:
    liar.answers(metadata={"network_lists": [{"name": "open"}]}, exit_code=0)
    assert run(alice, "1").json()["network"] is None


def test_the_admin_finds_who_talked_to_a_host(
    alice: Caller, charlie: Caller, admin_client: Client, auditor: Client
) -> None:
    run(alice, "1", **ASKED)
    run(charlie, "1", **ASKED)
    page = reverse("admin:executions_networkattempt_changelist")
    shown = admin_client.get(page, {"q": "*.test"}).content.decode()
    assert shown.count("evil.test") == 2 + shown.count('value="evil.test"')
    assert "pypi.org" not in shown
    own = admin_client.get(page, {"q": "evil.test", "tenant_slug": charlie.tenant.slug})
    assert own.content.decode().count("evil.test<") < shown.count("evil.test<")
    one = NetworkAttempt.objects.filter(host="evil.test").latest("id")
    change = reverse("admin:executions_networkattempt_change", args=[one.pk])
    assert b"evil.test" in admin_client.get(change).content
    assert admin_client.post(change, {"host": "x"}).status_code == 403
    assert auditor.get(page).status_code == 403
    assert signed_in("looks", "view_networkattempt").get(page).status_code == 200
    assert User.objects.filter(username="looks").exists()


def test_attempts_between_runs_go_with_the_records_of_their_time(
    alice: Caller, charlie: Caller, settings: Any
) -> None:
    settings.SANDBOX_KEEP_DAYS = {**settings.SANDBOX_KEEP_DAYS, "records": 30}
    settings.SANDBOX_RECORDS_FLOOR_DAYS = 0
    run(alice, "1", **ASKED)
    run(charlie, "1", **ASKED)
    session_id = uuid7()
    [checked] = (checked_attempts(attempts(ALLOWED).to_json()) or {})["attempts"]
    store([checked], alice.tenant.pk, alice.tenant.slug, session_id=session_id)
    old = first_uuid7(timezone.now() - timedelta(days=31))
    NetworkAttempt.objects.filter(session_id=session_id).update(id=old)
    store([checked], alice.tenant.pk, alice.tenant.slug, session_id=session_id)
    apply_retention(dry_run=True)
    assert NetworkAttempt.objects.count() == 6
    apply_retention()
    assert NetworkAttempt.objects.count() == 5
    assert not NetworkAttempt.objects.filter(pk=old).exists()


def test_a_later_tenant_of_the_same_slug_finds_nothing_of_the_former(
    alice: Caller, charlie: Caller
) -> None:
    run(alice, "1", **ASKED)
    slug = alice.tenant.slug
    # As after the removal of a tenant, whose slug is free again.
    NetworkAttempt.objects.update(tenant=None)
    assert NetworkAttempt.objects.filter(tenant_slug=slug).count() == 2
    assert found(alice) == []


def test_attempts_are_counted_by_outcome(alice: Caller) -> None:
    run(alice, "1", **ASKED)
    run(alice, "1", **ASKED)
    families = {family.name: family for family in collect(with_tenants=False)}
    counted = families["cofferdam_network_attempts_total"].samples
    assert ("", {"provider": "liar", "outcome": "refused"}, 2.0) in counted


def test_the_page_of_an_execution_has_them(alice: Caller, admin_client: Client) -> None:
    told = run(alice, "1", **ASKED).json()
    page = reverse("admin:executions_execution_change", args=[told["id"]])
    shown = admin_client.get(page).content.decode()
    assert "1 allowed, 1 refused, 0 failed" in shown
    assert '<th scope="row">evil.test:443</th>' in shown
    assert "list of the tenant" in shown


def test_the_page_of_an_execution_spells_out_what_a_host_hides(
    alice: Caller, admin_client: Client, liar: Liar
) -> None:
    hidden = replace(REFUSED, host="a\u202eb.test", path="/<script>")
    liar.answers(metadata={"network": attempts(hidden).to_json()}, exit_code=0)
    told = run(alice, "1", **ASKED).json()
    page = reverse("admin:executions_execution_change", args=[told["id"]])
    shown = admin_client.get(page).content.decode()
    assert "\u202e" not in shown
    assert "/<script>" not in shown
