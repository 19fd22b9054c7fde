"""What a tenant may have at once and store in a day, whichever way its requests come."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import connection, connections
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from executions.capabilities.observability.counters import recount
from executions.capabilities.playground.service import replay_sync
from executions.capabilities.spending.models import Budget
from executions.client import execute_code
from executions.ledger.append import append
from executions.ledger.models import LedgerEntry
from executions.runs.models import Execution
from executions.runs.orphaned_runs import end_stale_executions
from executions.runs.record import open_record
from executions.runs.requests import Caller as By
from executions.runs.requests import ExecutionRequest
from executions.runs.statistics import STORED, Statistic
from executions.tenants.models import Tenant
from executions.tenants.quotas import COLUMNS, MIB, Quota, limit_of
from executions.tenants.service import internal_tenant
from providers.errors import RateLimited
from tests.conftest import Caller
from tests.support.held import bounded, ended, opened
from tests.support.running import run

pytestmark = pytest.mark.database

TENANTS = "/admin/executions/tenant/"


def refused(answer: Any) -> bool:
    """Whether it is SB008 as callers are to see it; anything else but 200 and 202 fails."""
    if answer.status_code in (200, 202):
        return False
    assert answer.status_code == 429
    assert answer.json()["error"]["code"] == "SB008"
    assert answer.json()["id"] is None
    assert int(answer["Retry-After"]) >= 1
    return True


def test_a_tenant_runs_ten_at_once_and_others_are_not_touched(
    scripted: Callable[[], list[str]], alice: Caller, bob: Caller, charlie: Caller
) -> None:
    running = [opened(alice) for _ in range(10)]
    entries = LedgerEntry.objects.count()

    assert refused(run(alice, "pass"))
    assert refused(run(bob, "pass"))
    assert (Execution.objects.count(), LedgerEntry.objects.count()) == (10, entries)
    assert scripted() == []
    assert not refused(run(charlie, "pass"))

    ended(running[0])
    assert not refused(run(bob, "pass"))
    assert not refused(run(alice, "pass"))


def test_a_tenant_queues_a_hundred_at_once(alice: Caller, charlie: Caller) -> None:
    for _ in range(100):
        opened(alice, "async")

    with pytest.raises(RateLimited, match="100 executions queued"):
        opened(alice, "async")
    assert Execution.objects.count() == 100
    opened(alice, "sync")
    opened(charlie, "async")


def test_a_process_that_died_gives_its_places_back(alice: Caller) -> None:
    bounded(alice, max_running=1)
    lost = opened(alice)
    Execution.objects.filter(pk=lost.pk).update(deadline=lost.created_at.replace(year=2020))

    assert end_stale_executions() == 1

    opened(alice)


def test_what_a_tenant_stores_in_a_day_is_bounded(
    scripted: object, alice: Caller, charlie: Caller
) -> None:
    bounded(alice, max_stored_mib=1)
    artifact = "answer.artifacts.append(ArtifactFile('a', 'text/plain', b'x' * 600_000))"
    code = f"answer = ExecutionResult('o' * 190_000, '', 0, 0.0)\n{artifact}"

    assert not refused(run(alice, code))
    stored = Statistic.objects.get(kind=STORED).count
    assert 790_000 < stored < 791_000
    assert not refused(run(alice, code))  # what begins below the bound is finished

    answer = run(alice, "pass")
    assert refused(answer)
    assert "1 MiB per day" in answer.json()["error"]["message"]
    assert 1 <= int(answer["Retry-After"]) <= 86_400
    assert not refused(run(charlie, code))
    yesterday = timezone.now() - timedelta(days=1)
    recount()
    assert refused(run(alice, "pass"))
    Statistic.objects.filter(name=alice.tenant.slug).update(hour=yesterday)
    assert not refused(run(alice, "pass"))


def test_a_queued_request_counts_before_it_is_kept(alice: Caller) -> None:
    bounded(alice, max_stored_mib=1)
    opened(alice, "async", code="#" * 500_000)

    with pytest.raises(RateLimited, match="per day"):
        opened(alice, "async", code="#" * 600_000)
    opened(alice, "async", code="#" * 400_000)


def test_a_key_that_is_known_is_answered_beyond_every_bound(
    scripted: object, alice: Caller
) -> None:
    first = run(alice, "pass", idempotency_key="once")
    waiting = run(alice, "pass", mode="async", idempotency_key="queued")
    bounded(alice, max_running=0, max_queued=0, max_stored_mib=0)

    assert run(alice, "pass", idempotency_key="once").json() == first.json()
    again = run(alice, "pass", mode="async", idempotency_key="queued")
    assert again.json()["id"] == waiting.json()["id"]
    assert refused(run(alice, "pass", idempotency_key="new"))
    Budget.objects.create(limit=0)
    assert run(alice, "pass", idempotency_key="once").json() == first.json()
    assert run(alice, "other", idempotency_key="once").status_code == 409


def test_every_way_in_is_bounded(scripted: Callable[[], list[str]], alice: Caller) -> None:
    assert run(alice, "pass").status_code == 200
    original = Execution.objects.get()
    internal = internal_tenant()
    for tenant in (alice.tenant, internal):
        tenant.max_running = 0
        tenant.save()
    before = len(scripted())

    assert refused(run(alice, "pass"))
    with pytest.raises(RateLimited):
        execute_code("pass")
    with pytest.raises(RateLimited):
        replay_sync(original)
    with pytest.raises((CommandError, SystemExit)):
        call_command("execute", "-")
    assert len(scripted()) == before
    assert Execution.objects.count() == 1


@pytest.mark.django_db(transaction=True)
def test_two_hundred_requests_at_the_same_time_do_not_pass_a_bound_of_ten(alice: Caller) -> None:
    barrier = threading.Barrier(200)
    outcomes: list[object] = []

    def ask() -> None:
        barrier.wait()
        try:
            outcomes.append(opened(alice))
        except RateLimited as error:
            outcomes.append(error)
        finally:
            connections.close_all()

    threads = [threading.Thread(target=ask) for _ in range(200)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(outcomes) == 200
    assert sum(isinstance(outcome, Execution) for outcome in outcomes) == 10
    assert Execution.objects.count() == 10


@pytest.mark.usefixtures("no_lookup_grows_old")
@pytest.mark.django_db(transaction=True)
def test_the_bounds_cost_an_execution_one_statement(alice: Caller) -> None:
    opened(alice)
    with CaptureQueriesContext(connection) as queries:
        opened(alice)

    statements = [query["sql"].split()[0] for query in queries]
    if connection.vendor == "postgresql":  # and the lock, which is no statement to SQLite
        assert statements.pop(1) == "SELECT"
    assert statements == ["BEGIN", "SELECT", "INSERT", "COMMIT"]


@pytest.mark.usefixtures("no_lookup_grows_old")
@pytest.mark.django_db(transaction=True)
def test_a_flood_of_refusals_takes_no_lock(alice: Caller) -> None:
    bounded(alice, max_running=0)
    with pytest.raises(RateLimited):
        opened(alice)
    with CaptureQueriesContext(connection) as queries, pytest.raises(RateLimited):
        opened(alice)

    assert [query["sql"].split()[0] for query in queries] == ["SELECT"]


def test_the_bounds_are_the_installations_until_a_tenant_has_its_own(
    alice: Caller, settings: Any
) -> None:
    counted = (Quota.RUNNING, Quota.QUEUED, Quota.STORED_BYTES, Quota.STORAGE_BYTES)
    assert [limit_of(alice.tenant, each) for each in counted] == [10, 100, 5 * 2**30, 20 * 2**30]
    settings.SANDBOX_MAX_RUNNING = 2
    bounded(alice, max_queued=7, max_stored_mib=3, max_storage_mib=4)
    assert [limit_of(alice.tenant, each) for each in counted] == [2, 7, 3 * MIB, 4 * MIB]


def test_an_administrator_sets_them_and_the_ledger_says_so(
    alice: Caller, admin_client: Client
) -> None:
    page = f"{TENANTS}{alice.tenant.pk}/change/"
    ended(opened(alice, code="#" * MIB))
    opened(alice)
    opened(alice, "async")
    shown = admin_client.get(page).content.decode()
    assert "Limits apply across all processes." in shown
    bars = dict(re.findall(r"<dt>([^<]+)</dt>.*?<span>([^<]*)</span>", shown, re.DOTALL))
    assert bars["Running"] == "1 of 10"
    assert bars["Queued"] == "1 of 100"
    assert bars["Executions per day"].startswith("3 of 1,000,000, until ")
    assert bars["Stored bytes per day"].startswith("1.0\xa0MB of 5.0\xa0GB, until ")
    assert 'placeholder="8640000"' in shown
    form = {"name": "W", "is_active": "on", "max_running": "3", "max_queued": "", **UNSET}

    assert admin_client.post(page, form | {"max_running": "-1"}).status_code == 200
    assert admin_client.post(page, form | {"max_running": "10001"}).status_code == 200
    assert Tenant.objects.get(pk=alice.tenant.pk).max_running is None
    assert admin_client.post(page, form).status_code == 302

    tenant = Tenant.objects.get(pk=alice.tenant.pk)
    assert (tenant.max_running, tenant.max_queued) == (3, None)
    entry = LedgerEntry.objects.filter(kind="tenant").latest("sequence").stated
    assert (entry["action"], entry["max_running"], entry["max_queued"]) == ("changed", 3, None)


UNSET = dict.fromkeys(
    (*COLUMNS[2:], "keep_code_days", "keep_output_days", "keep_artifacts_days"), ""
)


@pytest.mark.usefixtures("no_lookup_grows_old")
def test_stored_bytes_are_counted_behind_what_else_a_new_record_enters(alice: Caller) -> None:
    """An end has the ledger before it counts: the other way round, each would wait for the other."""
    request = ExecutionRequest("pass", mode="async")

    def enter(execution: Execution) -> None:
        append("cancellation", str(execution.pk), {"actor": "ada"})

    with CaptureQueriesContext(connection) as statements:
        open_record(
            request,
            By.of_key(alice.api_key),
            enter,
        )
    inserts = [
        each["sql"] for each in statements.captured_queries if each["sql"].startswith("INSERT")
    ]
    [entered] = [n for n, sql in enumerate(inserts) if "executions_ledgerentry" in sql]
    [counted] = [n for n, sql in enumerate(inserts) if "executions_statistic" in sql]
    assert entered < counted
