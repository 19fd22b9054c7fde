"""What a tenant may have in a day, of executions and of their seconds, and bounds of its own."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from executions.kernel.coroutines import run_sync
from executions.runs import record
from executions.runs.admission import current_usage
from executions.runs.models import Execution, Process
from executions.runs.orphaned_runs import mark_lost
from executions.runs.service import cancel
from executions.runs.statistics import RAN, TENANT, Statistic
from executions.sessions.storage import quota
from providers.errors import RateLimited
from tests.conftest import Caller
from tests.support.at_once import at_once
from tests.support.held import bounded, ended, opened
from tests.support.running import run

pytestmark = pytest.mark.database


def refusal(caller: Caller, mode: str = "sync", **request: Any) -> RateLimited:
    with pytest.raises(RateLimited) as raised:
        opened(caller, mode, **request)
    return raised.value


def seconds_of(caller: Caller) -> tuple[float, float]:
    held = current_usage(caller.tenant)
    return held.seconds, held.reserved


def test_executions_of_a_day_are_bounded_however_they_come_and_end(
    scripted: object, alice: Caller, bob: Caller, charlie: Caller
) -> None:
    bounded(alice, max_executions_per_day=3)
    assert run(alice, "pass").status_code == 200
    queued = opened(alice, "async")
    opened(alice)

    answer = run(bob, "pass")
    assert answer.status_code == 429
    error = answer.json()["error"]
    assert (error["code"], error["field"]) == ("SB008", "executions_per_day")
    assert 1 <= int(answer["Retry-After"]) <= 86_400
    # What is cancelled, by a storm of it too, was one of them.
    run_sync(cancel(queued, "key:x"))
    assert refusal(alice, "async").field == "executions_per_day"
    assert refusal(alice, background=True).field == "executions_per_day"
    assert run(charlie, "pass").status_code == 200

    yesterday = timezone.now() - timedelta(days=1)
    Statistic.objects.filter(kind=TENANT).update(hour=yesterday)
    assert run(bob, "pass").status_code == 200


def test_a_run_reserves_its_timeout_and_gives_back_what_it_did_not_use(alice: Caller) -> None:
    bounded(alice, max_seconds_per_day=100)
    first = opened(alice, timeout=60)
    opened(alice, "async", timeout=30)
    assert seconds_of(alice) == (0, 90)

    beyond = refusal(alice, timeout=11)
    assert beyond.field == "seconds_per_day"
    assert "Request a shorter timeout" in beyond.message
    # Others will have ended by then.
    assert beyond.retry_after is not None
    assert beyond.retry_after < 60
    opened(alice, timeout=10)
    ended(first, run_ms=1500.0, total_ms=1700.0)
    assert seconds_of(alice) == (1.5, 40)
    late = refusal(alice, timeout=99)
    assert late.retry_after is not None
    assert late.retry_after <= 86_400
    # It names none, and may take the longest.
    assert "300 s" in refusal(alice).message
    opened(alice, timeout=58.5)


def test_what_a_run_takes_beyond_its_timeout_is_not_the_tenants(alice: Caller) -> None:
    ended(opened(alice, timeout=2), run_ms=2900.0, total_ms=3000.0)
    assert seconds_of(alice) == (2, 0)


def test_the_seconds_of_a_killed_process_come_back(alice: Caller) -> None:
    lost = opened(alice, timeout=50)
    process = Process.objects.create(instance="h", kind="web", pid=1)
    Execution.objects.filter(pk=lost.pk).update(
        process=process, started_at=timezone.now() - timedelta(seconds=3)
    )
    left = Execution.objects.get(pk=lost.pk)
    assert mark_lost(left, "The process that ran it ended.")
    used, reserved = seconds_of(alice)
    assert 3 <= used < 30
    assert reserved == 0
    # What ran on all the same is counted when it turns out.
    left.refresh_from_db()
    told = {"run_ms": 40_000.0, "finished_at": timezone.now(), "cost": None}
    assert record.record_late(left, Execution.Status.SUCCEEDED, told)
    assert seconds_of(alice) == (40, 0)


def test_what_never_ran_takes_no_seconds(alice: Caller) -> None:
    run_sync(cancel(opened(alice, "async"), "key:x"))
    assert mark_lost(opened(alice), "Nothing was run.", retryable=True)
    # Cancelled while it waited for a sandbox.
    ended(opened(alice), total_ms=9000.0)
    # The clock of whoever closes it is behind.
    ended(opened(alice), finished_at=timezone.now() - timedelta(days=1))
    assert seconds_of(alice) == (0, 0)
    assert not Statistic.objects.filter(kind=RAN, count__gt=0).exists()


def test_a_process_in_the_background_is_among_the_days_and_not_among_those_that_run(
    alice: Caller,
) -> None:
    bounded(alice, max_running=0, max_seconds_per_day=2000)
    begun = opened(alice, background=True, usual_timeout=1800)
    assert seconds_of(alice) == (0, 1800)
    assert refusal(alice).field == "running"
    assert refusal(alice, background=True, usual_timeout=201).field == "seconds_per_day"
    ended(begun, finished_at=timezone.now() + timedelta(seconds=70))
    assert 70 <= seconds_of(alice)[0] < 80


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("bounds", [{"max_executions_per_day": 5}, {"max_seconds_per_day": 50}])
def test_a_hundred_at_the_same_time_at_one_below_the_bound_admit_exactly_one(
    bounds: dict[str, int], alice: Caller
) -> None:
    bounded(alice, **bounds)
    for _ in range(4):
        opened(alice, timeout=10)
    assert at_once(100, lambda: opened(alice, timeout=10)) == 1
    assert Execution.objects.count() == 5


def test_a_tenant_has_its_own_bound_on_saved_files(alice: Caller, charlie: Caller) -> None:
    bounded(alice, max_storage_mib=1)
    quota.reserve(alice.tenant.pk, size=2**20)
    with pytest.raises(quota.QuotaExceeded) as raised:
        quota.reserve(alice.tenant.pk, size=1)
    assert raised.value.field == "tenant_storage_bytes"
    quota.reserve(charlie.tenant.pk, size=2**21)
