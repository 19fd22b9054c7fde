"""What a door asks for runs only once a person has approved it, with a policy and without one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.utils import timezone

from executions.capabilities.policies.approvals import ASKED as KEY
from executions.capabilities.policies.approvals import ask_for
from executions.kernel.coroutines import run_sync
from executions.runs.models import Approval, Execution
from executions.runs.requests import Caller, ExecutionRequest
from executions.runs.service import execute
from tests.conftest import Caller as Client
from tests.support.approvals import ANSWER, ASKED, RULES, decided, signed_in
from tests.support.policies import in_force
from tests.support.running import run, run_queued

pytestmark = [
    pytest.mark.django_db,
    pytest.mark.usefixtures("policies_forgotten"),
    pytest.mark.database,
]


def asked(client: Client, code: str = ANSWER) -> Approval:
    """A request whose door has it wait."""
    request = ExecutionRequest(code, mode="async", idempotency_key=f"{KEY}1")
    outcome = run_sync(
        execute(request, Caller(client.tenant), beside=lambda made: ask_for(made, request, []))
    )
    return Approval.objects.get(execution=outcome.execution)


def test_it_runs_once_it_is_approved(scripted: Callable[[], list[str]], alice: Client) -> None:
    approval = asked(alice)
    assert run_queued() is None
    approver = signed_in("ada", "view_approval", "decide_approval")
    decided(approver, approval, "approve")
    assert run_queued() is not None
    execution = Execution.objects.get()
    assert execution.status == "succeeded"
    said = execution.meta["policy"]
    assert (said["id"], said["approved"]["by"]) == (None, "user:ada")


def test_a_policy_that_asks_too_adds_what_it_found(
    scripted: Callable[[], list[str]], alice: Client
) -> None:
    in_force(alice.tenant.slug, **RULES)
    approval = asked(alice, ASKED)
    assert [each["name"] for each in approval.findings] == ["print"]
    assert Approval.objects.count() == 1


def test_a_row_that_only_the_database_says_is_approved_runs_nothing(
    scripted: Callable[[], list[str]], alice: Client
) -> None:
    approval = asked(alice)
    Approval.objects.filter(pk=approval.pk).update(
        status="approved", decided_by="user:ada", decided_at=timezone.now()
    )
    run_queued()
    assert Execution.objects.get().status == "blocked"
    assert scripted() == []


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_key_that_says_so_runs_nothing_without_an_approval(
    scripted: Callable[[], list[str]], alice: Client, mode: str
) -> None:
    answer: Any = run(alice, ANSWER, mode=mode, idempotency_key=f"{KEY}2")
    assert answer.status_code in (200, 202, 403), answer.content
    run_queued()
    assert Execution.objects.get().status == "blocked"
    assert scripted() == []
