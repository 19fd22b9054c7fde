"""What a tenant's policy does not allow is recorded as blocked, and nothing runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.core.exceptions import ValidationError
from django.db import IntegrityError, transaction

from examples.receipts import verify_receipt
from executions.capabilities.playground.service import replay_sync
from executions.capabilities.policies.capability import rules_for
from executions.capabilities.policies.models import Policy
from executions.client import execute_code
from executions.ledger.verification import verify
from executions.runs.models import Execution
from executions.sessions.models import Session
from providers.errors import SandboxError
from providers.leases import close_all
from providers.models import ProviderConfig
from tests.conftest import Caller, require
from tests.support.policies import in_force
from tests.support.routing import last_execution, make_route
from tests.support.running import LOCAL, run, run_queued
from tests.support.sessions import URL, cell, opened

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("policies_forgotten")]

SHELL = "import os\n\nos.system('id')\n"
DENIES: dict[str, Any] = {"analysis": "block", "calls": "os.system"}


def assert_blocked(answer: Any, field: str, *words: str) -> None:
    told = answer.json()
    assert (answer.status_code, told["status"]) == (200, "blocked"), told
    assert told["error"]["code"] == "SB007"
    assert all(word in told["error"]["message"] for word in words), told
    execution = last_execution()
    assert (str(execution.pk), execution.error_code, execution.error_field) == (
        told["id"], "SB007", field,
    )  # fmt: skip
    assert told["receipt"]["status"] == "blocked"
    assert told["receipt"]["policy"]["id"] == told["policy"]["id"]
    assert not execution.retryable
    assert execution.run_ms is None


@pytest.mark.parametrize(
    ("rules", "body", "field"),
    [
        ({"languages": "bash"}, {}, "language"),
        ({"providers": "e2b"}, {}, "provider"),
        ({"max_timeout": 5}, {"timeout": 6}, "timeout"),
        ({"network": "none"}, {}, "network"),
        (DENIES, {"code": SHELL}, "code"),
    ],
)
def test_what_a_policy_does_not_allow_is_recorded_as_blocked_and_does_not_run(
    scripted: Callable[[], list[str]],
    alice: Caller,
    charlie: Caller,
    rules: dict[str, Any],
    body: dict[str, Any],
    field: str,
) -> None:
    policy = in_force(alice.tenant.slug, **rules)
    code = body.pop("code", "answer = ExecutionResult('', '', 0, 0.0)")
    asked = len(scripted())
    assert_blocked(run(alice, code, **body), field)
    assert last_execution().meta["policy"] == {"id": policy.pk, "version": 0}
    assert len(scripted()) == asked

    # What was queued is held to it too, and told in its record.
    queued = run(alice, code, mode="async", **body)
    assert queued.status_code == 202
    run_queued()
    told = alice.client.get(f"/api/v1/executions/{queued.json()['id']}").json()
    assert (told["status"], told["error"]["code"]) == ("blocked", "SB007")
    assert told["policy"]["id"] == policy.pk

    # And nobody else is.
    run(charlie, code, **body)
    assert last_execution().status != "blocked"
    assert "policy" not in last_execution().meta
    assert verify().is_intact


def test_a_policy_of_all_holds_for_whoever_has_none_and_isolation_only_strengthens(
    scripted: Callable[[], list[str]], alice: Caller, bob: Caller, charlie: Caller
) -> None:
    everybody = in_force(languages="bash", minimum_isolation="microvm")
    assert_blocked(run(charlie, "pass"), "language", "bash")
    assert charlie.client.get("/api/v1/languages").json() == {"languages": [], "packages": {}}
    own = in_force(alice.tenant.slug, max_timeout=5, minimum_isolation="none")
    for caller in (alice, bob):
        answer = run(caller, "answer = ExecutionResult('', '', 0, 0.0)")
        assert (answer.status_code, answer.json()["error"]["field"]) == (503, "minimum_isolation")
        assert last_execution().meta["policy"]["id"] == own.pk
    everybody.minimum_isolation = ""
    everybody.save()
    assert run(bob, "answer = ExecutionResult('', '', 0, 0.0)").json()["status"] == "succeeded"
    # Without a time of its own it has what the policy allows.
    assert last_execution().timeout == 5


def test_a_warning_is_told_and_recorded_and_a_provider_cannot_speak_for_the_policy(
    scripted: Callable[[], list[str]], alice: Caller, charlie: Caller
) -> None:
    policy = in_force(alice.tenant.slug, analysis="warn", calls="print")
    code = "\n\nprint('x')\nanswer = ExecutionResult('', '', 0, 0.0, metadata={'policy': 'mine'})"
    warning = {"line": 3, "kind": "call", "name": "print"}
    told = run(alice, code).json()
    assert (told["status"], told["policy"]) == (
        "succeeded", {"id": policy.pk, "version": 0, "warnings": [warning], "approved": None},
    )  # fmt: skip
    assert last_execution().meta["policy"]["warnings"] == [warning]
    assert told["receipt"]["policy_hash"] == verify_receipt.policy_hash(told["policy"])
    assert run(charlie, code).json()["policy"] is None

    # What cannot be read here is said, and fails where it runs.
    assert run(alice, "(").status_code == 503
    [note] = last_execution().meta["policy"]["warnings"]
    assert note["kind"] == "note"

    # `enable_ast_analysis` of a provider is `warn` where no policy looks.
    remark = "metadata={'advice': [[1, 'os', 'reaches files and processes']]}"
    told = run(charlie, f"answer = ExecutionResult('', '', 0, 0.0, {remark})").json()
    named = {"line": 1, "kind": "remark", "name": "os: reaches files and processes"}
    assert told["policy"] == {"id": None, "version": None, "warnings": [named], "approved": None}
    assert verify().is_intact
    # Which policy held is bound with the rest of the record.
    held = Execution.objects.filter(tenant_slug=alice.tenant.slug).first()
    assert held is not None
    Execution.objects.filter(pk=held.pk).update(meta={})
    assert not verify().is_intact


def test_blocked_code_is_named_by_its_lines_and_text_too_large_to_look_at_is_blocked(
    scripted: Callable[[], list[str]], alice: Caller
) -> None:
    in_force(alice.tenant.slug, **DENIES)
    assert_blocked(run(alice, f"{SHELL}\nfrom os import system as s\ns('id')"), "code", "line 3:")
    assert "line 6: call of os.system" in last_execution().error_message
    assert_blocked(run(alice, "#" * 300_000), "code", "256 KiB")


def test_the_runs_of_a_route_go_where_the_policy_lets_them(
    scripted: Callable[[], list[str]], alice: Caller
) -> None:
    require("bwrap")
    ProviderConfig.objects.create(provider_id="local", config=LOCAL)
    make_route("scripted", "local")
    policy = in_force(alice.tenant.slug, network="none", max_memory_mib=256)
    told = run(alice, "print(1)").json()
    assert (told["status"], told["provider"], told["stdout"]) == ("succeeded", "local", "1\n")
    assert [hop["outcome"] for hop in last_execution().hops] == ["passed over", "served"]

    policy.max_memory_mib = 1
    policy.save()
    assert_blocked(run(alice, "print(1)"), "memory", "1 MiB")
    policy.max_memory_mib, policy.network, policy.providers = None, "", "local"
    policy.save()
    assert run(alice, "print(1)").json()["provider"] == "local"
    assert not scripted()
    close_all()


def test_what_runs_in_a_session_is_held_to_it_by_every_way_in(
    kept_here: None, alice: Caller, charlie: Caller
) -> None:
    session = opened(alice)
    policy = in_force(alice.tenant.slug, **DENIES)
    assert_blocked(cell(alice, session, SHELL), "code", "line 3: call of os.system")
    assert cell(alice, session, "60*60").json()["status"] == "succeeded"

    policy.languages, policy.network = "python", "none"
    policy.save()
    url = f"{URL}/{session['id']}/processes"
    assert_blocked(alice.client.post(url, {"shell": "id"}), "language", "bash")
    refused = alice.client.post(url, {"shell": "id", "background": True})
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "SB007")
    assert (last_execution().status, last_execution().retryable) == ("blocked", False)
    assert_blocked(cell(alice, session, "60*60"), "network")
    policy.languages = "python bash"
    policy.save()
    refused = alice.client.post(url, {"shell": "id", "background": True})
    assert refused.json()["error"]["field"] == "network"
    refused = alice.client.post(URL, {})
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "SB007")
    assert Session.objects.filter(closed_at=None).count() == 1
    assert cell(charlie, opened(charlie), "60*60").json()["status"] == "succeeded"


def test_code_from_this_process_and_what_is_run_again_are_held_to_it(
    scripted: Callable[[], list[str]], alice: Caller
) -> None:
    run(alice, "answer = ExecutionResult('', '', 0, 0.0)\nprint(1)")
    ran = last_execution()
    policy = in_force(alice.tenant.slug, analysis="block", calls="print")
    outcome = replay_sync(ran)
    assert (outcome.execution.status, outcome.execution.meta["policy"]["id"]) == (
        "blocked", policy.pk,
    )  # fmt: skip
    in_force(analysis="block", calls="eval")
    with pytest.raises(SandboxError, match="line 2: call of eval"):
        execute_code("\neval('1')")


def test_a_policy_is_held_to_what_it_can_say(alice: Caller) -> None:
    for wrong in (
        {"imports": "os; rm"},
        {"calls": "os.system()"},
        {"max_timeout": 0},
        {"analysis": "perhaps"},
        {"imports": " ".join(f"m{n}" for n in range(1001))},
    ):
        with pytest.raises(ValidationError):
            Policy(**wrong).full_clean()
    with pytest.raises(ValidationError, match="slug of a tenant"):
        Policy.objects.create(tenant_slug="nobody")
    in_force()
    with pytest.raises(IntegrityError), transaction.atomic():
        in_force()
    in_force(alice.tenant.slug, draft=True, languages="bash")
    assert rules_for(alice.tenant.slug) is rules_for("charlie")
