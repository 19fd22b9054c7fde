"""Runs at a later time: accepted now, taken by no worker before, and asked again when they begin."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from django.db import connection
from django.utils import timezone

from executions.capabilities.observability.metrics import collect
from executions.capabilities.playground.service import recorded_request
from executions.capabilities.spending.models import Budget
from executions.capabilities.spending.service import spend
from executions.ledger.verification import verify
from executions.runs.models import Execution
from executions.runs.orphaned_runs import end_stale_executions
from executions.runs.queue import claim, claim_next
from executions.tenants.keys import create_api_key, revoke
from tests.conftest import Caller
from tests.support.approvals import ASKED, RULES, decided, page, signed_in
from tests.support.held import bounded
from tests.support.later_runs import CODE, come, in_seconds, later
from tests.support.policies import in_force
from tests.support.running import run, run_queued

pytestmark = [pytest.mark.django_db, pytest.mark.database]


def gauge(name: str) -> float:
    [family] = [each for each in collect(with_tenants=False) if each.name == name]
    [(_, value)] = [(each[0], each[-1]) for each in family.samples]
    return float(value)


def test_nobody_takes_it_before_its_time_and_then_it_runs(
    scripted: Callable[[], list[str]], alice: Caller
) -> None:
    execution = later(alice)
    told = alice.client.get(f"/api/v1/executions/{execution.pk}").json()
    listed = alice.client.get("/api/v1/executions").json()["results"][0]
    assert execution.run_at is not None
    assert told["run_at"] == listed["run_at"] == execution.run_at.isoformat()
    assert claim(execution.pk) is None
    assert claim_next() is None

    # It holds up nobody: neither its tenant's others nor, with a place of its own, a run.
    bounded(alice, max_running=1)
    other = run(alice, CODE, mode="async").json()
    assert other["run_at"] is None
    assert str(getattr(run_queued(), "execution", None)) == other["id"]
    assert run(alice, CODE).json()["status"] == "succeeded"

    come(execution, 5)
    run_queued()
    told = alice.client.get(f"/api/v1/executions/{execution.pk}").json()
    assert (told["status"], told["stdout"]) == ("succeeded", "it ran")
    # Its wait is counted from its time on.
    assert 5000 <= told["timings"]["queue_ms"] < 3600_000
    execution.refresh_from_db()
    assert execution.run_at is not None
    assert told["receipt"]["run_at"] == execution.run_at.astimezone(UTC).isoformat(
        timespec="microseconds"
    )
    assert verify().is_intact
    Execution.objects.filter(pk=execution.pk).update(run_at=None)
    assert not verify().is_intact


@pytest.mark.parametrize(
    "body",
    [
        {"run_at": "2000-01-01T00:00:00Z", "mode": "async"},
        {"run_at": in_seconds(31 * 86400), "mode": "async"},
        {"run_at": "2999-12-31T23:59:59", "mode": "async"},
        {"run_at": "tomorrow", "mode": "async"},
        {"run_at": "2027-02-30T00:00:00Z", "mode": "async"},
        {"run_at": "0001-01-01T00:00:00+14:00", "mode": "async"},
        {"run_at": 1900000000, "mode": "async"},
        {"run_at": in_seconds(60)},
        {"run_at": in_seconds(60), "mode": "sync"},
    ],
)
def test_what_is_no_time_to_come_within_bounds_is_refused_by_name(
    body: dict[str, Any], scripted: object, alice: Caller
) -> None:
    answer = run(alice, CODE, **body)
    assert (answer.status_code, answer.json()["error"]["field"]) == (400, "run_at")
    assert not Execution.objects.exists()


def test_how_far_ahead_is_bounded_and_the_zone_counts(scripted: object, alice: Caller) -> None:
    too_far = run(alice, CODE, mode="async", run_at=in_seconds(30 * 86400 + 60))
    assert too_far.status_code == 400
    assert "at most 30 days ahead" in too_far.json()["error"]["message"]
    ahead = (datetime.now(UTC) + timedelta(days=29, hours=23)).replace(microsecond=0, tzinfo=None)
    answer = run(alice, CODE, mode="async", run_at=f"{ahead.isoformat()}-01:00")
    assert answer.status_code == 202
    assert answer.json()["run_at"] == (ahead + timedelta(hours=1)).isoformat() + "+00:00"


def test_a_cell_has_none(kept_here: None, alice: Caller) -> None:
    session = alice.client.post("/api/v1/sessions", {}).json()["id"]
    body = {"code": "1", "mode": "async", "run_at": in_seconds(60)}
    for path, more in (
        (f"sessions/{session}/executions", {}),
        ("executions", {"session": session}),
    ):
        answer = alice.client.post(f"/api/v1/{path}", {**body, **more})
        assert (answer.status_code, answer.json()["error"]["field"]) == (400, "run_at")


def test_it_is_cancelled_while_it_waits(
    scripted: Callable[[], list[str]], alice: Caller, bob: Caller, charlie: Caller
) -> None:
    execution = later(alice)
    path = f"/api/v1/executions/{execution.pk}/cancel"
    assert charlie.client.post(path).status_code == 404
    assert bob.client.post(path).json()["status"] == "cancelled"
    come_at = timezone.now() - timedelta(seconds=1)
    Execution.objects.filter(pk=execution.pk).update(run_at=come_at)
    assert claim_next() is None
    assert alice.client.get("/api/v1/usage").json()["quotas"]["queued"]["used"] == 0


def test_a_repeated_key_stands_for_it_also_once_its_time_has_come(
    scripted: object, alice: Caller
) -> None:
    at = in_seconds(60)
    first = run(alice, CODE, mode="async", run_at=at, idempotency_key="once").json()
    again = run(alice, CODE, mode="async", run_at=at, idempotency_key="once")
    assert again.json()["id"] == first["id"]
    for other in (in_seconds(90), None):
        answer = run(alice, CODE, mode="async", run_at=other, idempotency_key="once")
        assert answer.status_code == 409


def test_a_repeated_key_is_answered_after_its_time(
    scripted: object, alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = in_seconds(60)
    first = run(alice, CODE, mode="async", run_at=at, idempotency_key="once").json()
    an_hour_on = timezone.now() + timedelta(hours=1)
    monkeypatch.setattr("executions.runs.requests.timezone.now", lambda: an_hour_on)
    again = run(alice, CODE, mode="async", run_at=at, idempotency_key="once")
    assert (again.status_code, again.json()["id"]) == (202, first["id"])


def test_it_holds_its_place_and_its_reservation_from_the_request_on(
    scripted: object, alice: Caller
) -> None:
    bounded(alice, max_queued=2, max_seconds_per_day=100)
    later(alice, timeout=60)
    answer = run(alice, CODE, mode="async", timeout=60)
    assert (answer.status_code, answer.json()["error"]["field"]) == (429, "seconds_per_day")
    later(alice, timeout=1)
    answer = run(alice, CODE, mode="async", run_at=in_seconds(60), timeout=1)
    assert (answer.status_code, answer.json()["error"]["field"]) == (429, "queued")


def test_figures_and_stale_closing_count_from_its_time(scripted: object, alice: Caller) -> None:
    execution = later(alice, 3 * 3600)
    assert (gauge("cofferdam_queue_depth"), gauge("cofferdam_queue_oldest_seconds")) == (0, 0)
    assert execution.deadline - timedelta(hours=1) == execution.run_at
    # As if it had been asked for days ago.
    long_ago = timezone.now() - timedelta(days=9)
    Execution.objects.filter(pk=execution.pk).update(created_at=long_ago)
    assert end_stale_executions() == 0

    come(execution, 100)
    assert gauge("cofferdam_queue_depth") == 1
    assert 100 <= gauge("cofferdam_queue_oldest_seconds") < 1000
    Execution.objects.filter(pk=execution.pk).update(
        deadline=timezone.now() - timedelta(minutes=11)
    )
    assert end_stale_executions() == 1
    execution.refresh_from_db()
    assert (execution.status, execution.retryable) == ("error", True)


def test_a_clock_that_jumps_back_lets_it_wait_and_run_once(
    scripted: Callable[[], list[str]], alice: Caller
) -> None:
    execution = later(alice)
    come(execution)
    assert claim(execution.pk) is not None
    # It runs, whatever any clock says from now on.
    Execution.objects.filter(pk=execution.pk).update(run_at=timezone.now() + timedelta(hours=1))
    assert claim(execution.pk) is None
    assert claim_next() is None


@pytest.mark.parametrize("to", ["now", "never asked for", "later"])
def test_a_time_that_was_changed_in_the_database_runs_nothing(
    to: str, scripted: Callable[[], list[str]], alice: Caller
) -> None:
    execution = later(alice)
    at = {"now": timezone.now() - timedelta(seconds=1), "never asked for": None}.get(
        to, timezone.now() + timedelta(hours=2)
    )
    if to == "later":
        come(execution)
    Execution.objects.filter(pk=execution.pk).update(run_at=at)
    before = len(scripted())
    if to == "later":
        assert run_queued() is None
        Execution.objects.filter(pk=execution.pk).update(
            run_at=timezone.now() - timedelta(seconds=9)
        )
    run_queued()
    execution.refresh_from_db()
    assert (execution.status, execution.error_code) == ("error", "SB009")
    assert len(scripted()) == before


def test_a_key_that_ends_before_it_runs_nothing(
    scripted: Callable[[], list[str]], alice: Caller
) -> None:
    soon = timezone.now() + timedelta(minutes=30)
    key, text = create_api_key(alice.tenant, "short", soon)
    brief = Caller(key, text)
    answer = run(brief, CODE, mode="async", run_at=in_seconds(3600))
    assert (answer.status_code, answer.json()["error"]["field"]) == (400, "run_at")

    waiting = later(brief, 60)
    assert revoke(key)
    come(waiting)
    before = len(scripted())
    run_queued()
    waiting.refresh_from_db()
    assert waiting.status == "error"
    assert "revoked" in waiting.error_message
    assert len(scripted()) == before


def test_a_budget_that_is_used_up_meanwhile_is_kept(
    scripted: Callable[[], list[str]], alice: Caller
) -> None:
    waiting = later(alice)
    Budget.objects.create(tenant_slug=alice.tenant.slug, limit=1)
    spend(alice.tenant.slug, Decimal(2))
    come(waiting)
    before = len(scripted())
    run_queued()
    waiting.refresh_from_db()
    assert (waiting.status, waiting.error_code) == ("error", "SB008")
    assert len(scripted()) == before


@pytest.mark.usefixtures("policies_forgotten")
def test_it_waits_for_both_its_approval_and_its_time(
    scripted: Callable[[], list[str]], alice: Caller
) -> None:
    in_force(alice.tenant.slug, **RULES)
    waiting = later(alice, 3 * 86400, ASKED)
    assert waiting.run_at is not None
    # It may be approved for as long as it could be taken.
    assert waiting.deadline == waiting.run_at + timedelta(hours=1)
    approver = signed_in("ada", "view_approval", "decide_approval")
    shown = approver.get(page("change", waiting.approval)).content.decode()
    assert waiting.run_at.isoformat() in shown.replace("&#x2B;", "+")
    approved = decided(approver, waiting.approval, "approve")
    assert approved.deadline == waiting.deadline
    assert claim_next() is None
    # Who approved it has approved of that time, too.
    come(approved)
    before = len(scripted())
    run_queued()
    approved.refresh_from_db()
    assert (approved.status, len(scripted())) == ("blocked", before)


def test_a_replay_drops_it(scripted: object, alice: Caller) -> None:
    execution = later(alice)
    come(execution)
    run_queued()
    execution.refresh_from_db()
    request = recorded_request(execution)
    assert (request.run_at, request.mode) == (None, "sync")


@pytest.mark.django_db(transaction=True)
def test_of_many_workers_one_takes_it(scripted: object, alice: Caller) -> None:
    execution = later(alice)
    come(execution)
    taken: list[Execution] = []
    begin = threading.Barrier(6)

    def work() -> None:
        begin.wait(60)
        found = claim_next()
        if found is not None:
            taken.append(found)
        connection.close()

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [each.pk for each in taken] == [execution.pk]
