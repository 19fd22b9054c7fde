"""Executions whose process is gone do not stay open for ever."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.core.management import call_command
from django.utils import timezone
from django_q.models import Schedule

from executions.runs.heartbeat import Heartbeat
from executions.runs.models import Execution
from executions.runs.orphaned_runs import end_stale_executions
from executions.runs.queue import claim
from executions.runs.record import open_record
from executions.runs.requests import Caller as By
from executions.runs.requests import ExecutionRequest
from executions.runs.worker import ensure_schedules
from executions.tasks import end_stale_executions as scheduled
from tests.conftest import Caller
from tests.support.running import run

pytestmark = pytest.mark.database


def opened(caller: Caller, mode: str, **request: Any) -> Execution:
    return open_record(
        ExecutionRequest("print(1)", mode=mode, timeout=10, **request), By.of_key(caller.api_key)
    )[0]


def let_pass(execution: Execution, seconds: float) -> None:
    """Move the record into the past."""
    Execution.objects.filter(pk=execution.pk).update(
        deadline=execution.deadline - timedelta(seconds=seconds)
    )


def test_a_run_that_is_no_processs_ends_by_its_deadline(alice: Caller) -> None:
    execution = opened(alice, "sync")
    let_pass(execution, 200)

    assert end_stale_executions() == 1

    execution.refresh_from_db()
    assert (execution.status, execution.error_code) == ("error", "SB009")
    assert "process that ran it ended" in execution.error_message
    assert execution.finished_at is not None
    assert execution.retryable is False


def test_what_no_worker_took_ends_too_and_may_be_sent_again(alice: Caller) -> None:
    execution = opened(alice, "async", idempotency_key="once")
    let_pass(execution, 2 * 3600)

    assert end_stale_executions() == 1

    execution.refresh_from_db()
    assert (execution.status, execution.error_code) == ("error", "SB009")
    assert "not run" in execution.error_message
    assert execution.pending is None
    assert execution.retryable is True
    assert claim(str(execution.pk)) is None
    assert opened(alice, "async", idempotency_key="once").pk != execution.pk


def test_what_waits_in_line_is_left_alone_while_its_process_lives(
    alice: Caller, lease: Heartbeat
) -> None:
    """A run may wait for its sandbox longer than its deadline allows."""
    lease.take()
    execution = opened(alice, "sync")
    let_pass(execution, 24 * 3600)

    assert end_stale_executions() == 0

    execution.refresh_from_db()
    assert execution.finished_at is None


def test_what_is_queued_outlives_a_clock_that_is_five_minutes_ahead(alice: Caller) -> None:
    execution = opened(alice, "async")
    let_pass(execution, (execution.deadline - timezone.now()).total_seconds() + 300)

    assert end_stale_executions() == 0

    assert claim(execution.pk) is not None


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_what_still_has_time_is_left_alone(mode: str, alice: Caller) -> None:
    execution = opened(alice, mode)
    let_pass(execution, (execution.deadline - timezone.now()).total_seconds() + 5)

    assert end_stale_executions() == 0

    execution.refresh_from_db()
    assert execution.finished_at is None


def test_what_has_ended_is_left_alone(scripted: object, alice: Caller) -> None:
    run(alice, "pass")
    Execution.objects.update(deadline=timezone.now() - timedelta(days=1))

    assert end_stale_executions() == 0
    assert Execution.objects.get().status == "succeeded"


def test_a_claimed_execution_has_its_timeout_from_then_on(alice: Caller) -> None:
    execution = opened(alice, "async")
    let_pass(execution, 3590)

    claimed = claim(str(execution.pk))

    assert claimed is not None
    remaining = (claimed.deadline - timezone.now()).total_seconds()
    assert 100 < remaining < 200
    assert Execution.objects.get().deadline == claimed.deadline


def test_the_sweep_costs_one_statement_when_nothing_is_stale(
    alice: Caller, django_assert_num_queries: Any
) -> None:
    opened(alice, "sync")

    with django_assert_num_queries(1):
        end_stale_executions()


def test_the_schedule_is_made_once_and_names_a_task_that_exists(db: None) -> None:
    ensure_schedules()
    ensure_schedules()

    schedule = Schedule.objects.get(name__endswith="end_stale_executions")
    assert schedule.func == f"{scheduled.__module__}.{scheduled.__name__}"
    assert (schedule.schedule_type, schedule.minutes, schedule.repeats) == ("I", 1, -1)


def test_the_command_ends_them_and_says_how_many(
    alice: Caller, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        let_pass(opened(alice, "sync"), 200)

    call_command("end_stale_executions")

    assert capsys.readouterr().out == "2 ended\n"
    assert set(Execution.objects.values_list("status", flat=True)) == {"error"}
