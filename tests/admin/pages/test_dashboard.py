"""The dashboard's figures: exact, kept by the transaction that ends an execution, read quickly."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest
from django.contrib.auth import get_user_model
from django.core.management import call_command
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone
from hypothesis import given
from hypothesis import strategies as st

from executions.capabilities.dashboard.service import figures
from executions.capabilities.observability import counters
from executions.capabilities.observability.counters import LATENCY, OUTCOME
from executions.runs.models import Execution
from executions.runs.record import close_record
from executions.runs.statistics import TENANT, Increment, Statistic, add
from tests.conftest import Caller
from tests.support.ended_runs import ended
from tests.support.running import run

pytestmark = pytest.mark.database

NOW = datetime(2026, 11, 21, 12, 30, tzinfo=UTC)


def test_what_ends_is_counted_once_and_what_is_open_is_not(alice: Caller, charlie: Caller) -> None:
    for _ in range(3):
        execution = ended(alice)
    assert not close_record(execution, Execution.Status.FAILED, {})
    ended(alice, "timed_out", error_code="SB005", total_ms=2000.0)
    ended(alice, "cancelled")
    ended(charlie, "failed")

    found = figures(24)
    assert found.total == 6
    assert found.success_percent == pytest.approx(60)
    assert found.ran_percent == pytest.approx(80)
    assert found.errors == [("SB005", "Execution timeout", 1)]
    assert [(t["tenant_slug"], t["number"]) for t in found.tenants] == [
        ("wonderland", 5),
        ("elsewhere", 1),
    ]
    assert [(s.name, sum(s.values)) for s in found.by_provider] == [("local", 6)]
    assert {s.name: s.values[-1] for s in found.by_tenant} == {"wonderland": 5, "elsewhere": 1}


def test_a_record_that_is_not_written_is_not_counted(alice: Caller) -> None:
    with pytest.raises(Exception, match="constraint"):
        ended(alice, "timed_out")
    assert not Statistic.objects.exists()


def test_an_execution_through_the_api_is_counted(scripted: object, alice: Caller) -> None:
    run(alice, "pass")
    assert (figures(24).total, figures(24).success_percent) == (1, 100)


def test_counting_anew_finds_the_same(alice: Caller, charlie: Caller) -> None:
    for number in range(5):
        ended(alice, total_ms=10.0 * number)
        ended(charlie, "error", error_code="SB009", total_ms=None)
    before = set(Statistic.objects.values_list())
    call_command("recount_executions")
    assert set(Statistic.objects.values_list()) == before


@given(st.lists(st.floats(1, 300_000), min_size=1, max_size=200))
def test_percentiles_are_at_most_five_percent_off(latencies: list[float]) -> None:
    histogram: dict[int, int] = {}
    for latency in latencies:
        bucket = counters.bucket_of(latency)
        histogram[bucket] = histogram.get(bucket, 0) + 1
    found = counters.percentiles(histogram.items(), 0.5, 0.95, 0.99)
    for part, value in zip((0.5, 0.95, 0.99), found, strict=True):
        ranked = sorted(latencies)
        exact = ranked[max(0, -(-int(part * 1000) * len(ranked) // 1000) - 1)]
        assert value == pytest.approx(exact, rel=0.05)


def test_there_are_no_percentiles_of_nothing() -> None:
    assert counters.percentiles([], 0.5) == [None]


@pytest.fixture
def million(db: None) -> None:
    """A week of 1,000,000 executions of 200 tenants on 3 providers, as counting leaves them."""
    hours = [
        timezone.now().replace(minute=0, second=0, microsecond=0) - timedelta(hours=h)
        for h in range(168)
    ]
    rng = random.Random(7)
    outcomes = (("succeeded", ""), ("failed", ""), ("timed_out", "SB005"), ("error", "SB009"))
    counts, total = [], 0
    for hour in hours:
        here = 0
        for provider in ("local", "self_managed", "e2b"):
            for status, code in outcomes:
                number = rng.randrange(100, 1000)
                here += number
                counts.append(
                    Increment(OUTCOME, provider, hour, f"{status} {code}".strip(), number)
                )
        total += here
        counts += [Increment(TENANT, f"tenant-{n}", hour, "", here // 200) for n in range(200)]
        for provider in ("local", "self_managed", "e2b"):
            counts += [
                Increment(LATENCY, provider, hour, str(b), rng.randrange(1, 99))
                for b in range(20, 60)
            ]
    assert total >= 1_000_000
    for start in range(0, len(counts), 500):
        add(counts[start : start + 500])


@pytest.mark.parametrize("chosen", ["24h", "7d"])
def test_a_million_executions_are_drawn_in_few_queries(
    million: None, admin_client: Client, chosen: str
) -> None:
    admin_client.get("/admin/")
    with CaptureQueriesContext(connection) as queries:
        assert admin_client.get("/admin/", {"range": chosen}).status_code == 200
    assert len(queries) <= 12
    assert not [q for q in queries if 'executions_execution"' in q["sql"]]


def test_names_of_others_are_shown_harmless(admin_client: Client, db: None) -> None:
    hour = timezone.now().replace(minute=0, second=0, microsecond=0)
    add(
        [
            Increment(OUTCOME, "<script>alert(1)</script>", hour, "succeeded", 3),
            Increment(TENANT, '"><img src=x onerror=alert(1)>', hour, "", 3),
        ]
    )
    page = admin_client.get("/admin/").content.decode()
    assert "<script>alert" not in page
    assert "<img src=x" not in page
    assert not re.search(r"<style|\sstyle=|<script(?![^>]*\bsrc=)", page)


def test_figures_are_for_who_may_see_executions(client: Client, db: None) -> None:
    client.force_login(get_user_model().objects.create_user("clerk", is_staff=True))
    page = client.get("/admin/").content.decode()
    assert "Executions by provider" not in page
    assert client.get("/admin/pool/").status_code == 403
    client.logout()
    assert client.get("/admin/pool/").status_code == 302


def test_the_pool_is_shown_as_it_is(
    local_active: None, alice: Caller, admin_client: Client
) -> None:
    run(alice, "print(1)")
    piece = admin_client.get("/admin/pool/").content.decode()
    assert "Pool of Local" in piece
    assert re.search(r"\d+ busy, \d+ idle", piece)
    assert "below target" in piece
    assert "every 5s" in piece


def test_without_a_provider_the_pool_says_why(no_provider: None, admin_client: Client) -> None:
    assert "SB001" in admin_client.get("/admin/pool/").content.decode()


def test_a_provider_without_a_pool_is_not_asked_again(
    scripted: Callable[[], list[str]], admin_client: Client
) -> None:
    piece = admin_client.get("/admin/pool/").content.decode()
    assert "No pool on this machine." in piece
    assert "every 5s" not in piece
