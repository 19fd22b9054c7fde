"""The comparison and the dashboard say what the counts say: of all runs, of one moment."""

from __future__ import annotations

import threading
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest
from django.db import connection, connections
from django.test import Client
from django.utils import timezone

from executions.capabilities.dashboard.service import figures
from executions.capabilities.observability.counters import LEFT, OUTCOME, PRICED, recount
from executions.capabilities.spending.service import compare_providers
from executions.runs.models import Execution
from executions.runs.statistics import TENANT, Increment, Statistic, add
from tests.conftest import Caller
from tests.support.held import ended, opened

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.database]


def end(caller: Caller, **changes: Any) -> None:
    ended(opened(caller), total_ms=10.0, **changes)


def test_the_comparison_is_over_all_runs_and_tells_the_unpriced_apart(
    alice: Caller, admin_client: Client
) -> None:
    hour = timezone.now().replace(minute=0, second=0, microsecond=0)
    add(
        [
            Increment(OUTCOME, "e2b", hour, "succeeded", 90_000, 9.0),
            Increment(OUTCOME, "e2b", hour, "failed", 10_000),
            Increment(PRICED, "e2b", hour, "", 45_000),
            Increment(LEFT, "e2b", hour, "SB002", 7),
        ]
    )

    (e2b,) = compare_providers()
    assert (e2b.executions, e2b.priced, e2b.unpriced) == (100_000, 45_000, 55_000)
    assert (e2b.left, e2b.cost_of_thousand) == (7, pytest.approx(0.2))
    page = admin_client.get("/admin/executions/spending/comparison/").content.decode()
    assert "100,000" in page
    assert "55,000" in page
    found = figures(24)
    assert (found.total, found.unpriced) == (100_000, 55_000)
    assert "left" not in found.statuses


def test_the_comparison_says_how_long_a_provider_takes_to_start(
    alice: Caller, admin_client: Client
) -> None:
    for start in (2.0, 3.0, 900.0):
        end(alice, provider="local", start_ms=start)
    end(alice, provider="e2b", start_ms=None)
    rows = {row.provider: row for row in compare_providers()}
    assert (rows["local"].start_ms, rows["local"].cold_ms) == (3.0, 900.0)
    assert (rows["e2b"].start_ms, rows["e2b"].cold_ms) == (None, None)
    page = admin_client.get("/admin/executions/spending/comparison/").content.decode()
    assert "900 ms" in page
    assert "Cold start" in page


def test_what_has_a_price_and_what_was_left_is_counted_as_it_ends(alice: Caller) -> None:
    hop = {"provider": "e2b", "outcome": "failed", "code": "SB002", "ms": 1.0}
    end(alice, provider="local", cost=Decimal("0.5"), hops=[hop])
    end(alice, provider="local")
    rows = {row.provider: row for row in compare_providers()}
    assert (rows["local"].executions, rows["local"].priced, rows["local"].left) == (2, 1, 0)
    assert (rows["e2b"].executions, rows["e2b"].left, rows["e2b"].p50_ms) == (0, 1, None)
    recount()
    assert {row.provider: row for row in compare_providers()} == rows


def test_recounting_corrects_what_has_a_price(alice: Caller) -> None:
    end(alice, provider="local", cost=Decimal("0.5"))
    then = timezone.now() - timedelta(hours=5)
    Execution.objects.update(finished_at=then)
    Statistic.objects.all().delete()
    recount()
    Statistic.objects.filter(kind=PRICED).update(count=0)
    assert compare_providers()[0].priced == 0
    recount()
    assert compare_providers()[0].priced == 1


def test_all_numbers_of_the_dashboard_are_of_one_moment(alice: Caller) -> None:
    end(alice, provider="local")
    ended_meanwhile = threading.Event()

    def end_another() -> None:
        try:
            end(alice, provider="local")
        finally:
            connections.close_all()

    def watch(execute: Any, sql: str, *args: Any) -> Any:
        answer = execute(sql, *args)
        if sql.startswith("SELECT") and not ended_meanwhile.is_set():
            ended_meanwhile.set()
            thread = threading.Thread(target=end_another)
            thread.start()
            thread.join()
        return answer

    with connection.execute_wrapper(watch):
        found = figures(24)

    assert ended_meanwhile.is_set()
    shown = [found.total, *(sum(line.values) for line in (*found.by_provider, *found.by_tenant))]
    assert shown == [1, 1, 1]
    assert figures(24).total == 2


def test_the_others_are_counted_and_never_less_than_none(alice: Caller) -> None:
    hour = timezone.now().replace(minute=0, second=0, microsecond=0)
    add(Increment(TENANT, f"t{number}", hour, "", 10 - number) for number in range(9))
    # As while some rows were corrected and the others were not yet.
    add([Increment(OUTCOME, "local", hour, "succeeded")])
    found = figures(24)
    assert [(line.name, sum(line.values)) for line in found.by_tenant[-2:]] == [
        ("t5", 5),
        ("others", 9),
    ]
