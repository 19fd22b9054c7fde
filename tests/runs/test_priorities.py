"""Priorities: whose code is urgent overtakes its own tenant's, and nobody else's."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import connection

from executions.runs.models import Execution
from executions.runs.queue import claim_next
from tests.conftest import Caller
from tests.support.held import bounded, ended
from tests.support.running import run

pytestmark = [pytest.mark.django_db, pytest.mark.database]


def queue(caller: Caller, **body: Any) -> str:
    answer = run(caller, "pass", mode="async", **body)
    assert answer.status_code == 202, answer.content
    return str(answer.json()["id"])


def served(number: int) -> list[str]:
    """Which were run, when each ends before the next is taken."""
    ids = []
    for _ in range(number):
        execution = claim_next()
        assert execution is not None
        ids.append(str(execution.pk))
        ended(execution)
    return ids


def test_the_urgent_ones_of_a_tenant_come_first_each_in_their_order(
    scripted: object, alice: Caller, bob: Caller
) -> None:
    low, normal = queue(alice, priority="low"), [queue(bob), queue(alice, priority="normal")]
    high = [queue(alice, priority="high"), queue(bob, priority="high")]
    listed = alice.client.get("/api/v1/executions").json()["results"]
    assert [each["priority"] for each in listed] == ["high", "high", "normal", "normal", "low"]

    assert served(5) == [*high, *normal, low]


def test_nobody_elses_turn_is_taken_by_them(
    scripted: object, alice: Caller, charlie: Caller
) -> None:
    ours = [queue(charlie, priority="low") for _ in range(2)]
    theirs = [queue(alice, priority="high") for _ in range(4)]
    order = served(6)
    assert order.index(ours[0]) <= 1
    assert order.index(ours[1]) <= 3
    assert [each for each in order if each in theirs] == theirs


@pytest.mark.parametrize(
    "body", [{"priority": "high"}, {"priority": "urgent", "mode": "async"}, {"priority": 9}]
)
def test_only_what_is_queued_has_a_priority(body: dict[str, Any], alice: Caller) -> None:
    answer = run(alice, "pass", **body)
    assert (answer.status_code, answer.json()["error"]["field"]) == (400, "priority")


def test_a_cell_has_none(kept_here: None, alice: Caller) -> None:
    session = alice.client.post("/api/v1/sessions", {}).json()["id"]
    body = {"code": "1", "mode": "async", "priority": "high"}
    for path, more in (
        (f"sessions/{session}/executions", {}),
        ("executions", {"session": session}),
    ):
        answer = alice.client.post(f"/api/v1/{path}", {**body, **more})
        assert (answer.status_code, answer.json()["error"]["field"]) == (400, "priority")


def test_a_repeated_key_with_another_priority_conflicts(scripted: object, alice: Caller) -> None:
    queue(alice, idempotency_key="once", priority="high")
    assert queue(alice, idempotency_key="once", priority="high")
    assert run(alice, "pass", mode="async", idempotency_key="once").status_code == 409


@pytest.mark.only_on("sqlite")
def test_the_next_one_is_the_first_of_an_index(alice: Caller) -> None:
    bounded(alice, max_running=1)
    waiting = Execution.objects.filter(
        run_at=None, finished_at=None, tenant_slug=alice.tenant.slug, status=Execution.Status.QUEUED
    )
    first = waiting.order_by("run_at", "priority", "pk").values_list("priority", "pk")[:1]
    plan = first.explain()
    assert "COVERING INDEX execution_open_by_time" in plan
    assert "TEMP B-TREE" not in plan
    assert connection.vendor == "sqlite"
