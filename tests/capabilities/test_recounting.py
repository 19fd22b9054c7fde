"""Counting anew: exact although executions end meanwhile, and nobody waits for it."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection, connections
from django.db.models import QuerySet, Sum

from executions.capabilities.observability import counters
from executions.capabilities.observability.counters import LATENCY, OUTCOME, Recounting, recount
from executions.runs.models import Execution
from executions.runs.statistics import ALL_TIME, STORED, TENANT, Statistic
from tests.capabilities.write_transactions import write_transactions
from tests.conftest import Caller
from tests.support.held import ended, opened

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.database]


def hours(*kinds: str) -> QuerySet[Statistic]:
    return Statistic.objects.filter(kind__in=kinds, hour__gt=ALL_TIME)


def counted() -> list[int]:
    """What the hours of each kind add up to."""
    return [
        hours(kind).aggregate(sum=Sum("count"))["sum"] or 0 for kind in (OUTCOME, TENANT, LATENCY)
    ]


def end(caller: Caller, **changes: Any) -> None:
    ended(opened(caller), total_ms=10.0, **changes)


def test_what_ends_while_it_is_counted_is_counted_once(alice: Caller) -> None:
    for _ in range(5):
        end(alice)
    hours(OUTCOME).update(count=2)
    hours(TENANT).delete()
    reading = threading.Event()

    def end_another() -> None:
        try:
            end(alice, provider="other")
        finally:
            connections.close_all()

    def watch(execute: Any, sql: str, *args: Any) -> Any:
        answer = execute(sql, *args)
        if sql.startswith("SELECT") and 'FROM "executions_execution"' in sql:
            thread = threading.Thread(target=end_another)
            thread.start()
            thread.join()
            reading.set()
        return answer

    with connection.execute_wrapper(watch):
        assert recount() == 5

    assert reading.is_set()
    assert counted() == [6, 6, 6]
    assert recount() == 6
    assert counted() == [6, 6, 6]


def test_too_many_are_taken_back_and_what_was_stored_stays(alice: Caller) -> None:
    end(alice, stdout="x" * 1000)
    stored = hours(STORED).get().count
    assert stored >= 1000
    hours(OUTCOME, LATENCY).update(count=9)
    Execution.objects.all().delete()

    assert recount() == 0

    assert not hours(OUTCOME, LATENCY).exists()
    assert hours(TENANT).get().count == 0
    assert hours(STORED).get().count == stored


@pytest.mark.only_on("sqlite")
def test_others_can_write_after_every_few_rows(
    alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counters, "_CORRECTED", 3)
    for hour in range(8):
        end(alice)
        newest = Execution.objects.latest("pk")
        ended_at = newest.finished_at
        assert ended_at is not None
        Execution.objects.filter(pk=newest.pk).update(finished_at=ended_at - timedelta(hours=hour))
    hours(OUTCOME, TENANT, LATENCY).delete()

    with write_transactions() as transactions:
        recount()

    assert counted() == [8, 8, 8]
    inserted = [sum(sql.startswith("INSERT") for sql, _ in each) for each in transactions]
    assert (sum(inserted), max(inserted)) == (24, 3)


def test_two_at_once_do_not_both_add_what_is_missing(alice: Caller) -> None:
    end(alice)
    with counters._recounting_alone():
        found = []

        def recount_too() -> None:
            try:
                recount()
            except Recounting as error:
                found.append(str(error))
            finally:
                connections.close_all()

        thread = threading.Thread(target=recount_too)
        thread.start()
        thread.join()
    assert found == ["The executions are already being counted. Wait until this has ended."]
