"""How many API requests a tenant may send in a minute, with all its keys and to all processes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from django.db import connection, connections, transaction
from django.db.models import F
from django.test import Client
from django.test.utils import CaptureQueriesContext

from executions.ledger.models import LedgerEntry
from executions.tenants import quotas
from executions.tenants.keys import create_api_key
from executions.tenants.models import RequestWindow
from executions.tenants.quotas import take_request
from tests.conftest import Caller
from tests.support.at_once import at_once
from tests.support.held import bounded

pytestmark = pytest.mark.database

LIST = "/api/v1/executions"


@pytest.fixture(autouse=True)
def nothing_remembered() -> Iterator[None]:
    """What a process knows of tenants, whose numbers are others' in the next test."""
    yield
    quotas._refused.clear()
    quotas._by_itself.clear()
    quotas._away_until = float("-inf")


def told(answer: Any) -> tuple[int, int]:
    return int(answer["X-RateLimit-Limit"]), int(answer["X-RateLimit-Remaining"])


def test_every_answer_to_a_key_says_what_is_left_and_keys_share_it(
    scripted: object, alice: Caller, bob: Caller, charlie: Caller
) -> None:
    bounded(alice, max_requests_per_minute=8)
    _, executing = create_api_key(alice.tenant, "k", None, "execute")
    missing = f"{LIST}/01a1fd3e-5869-7be3-b4ad-c3848c823008"
    answers = [
        alice.client.get(LIST),
        bob.client.get(missing),
        alice.client.post(LIST, {"code": 1}),
        Client(headers={"X-API-Key": executing}).get(LIST),
        alice.client.post("/v1/execute", {}),
        alice.client.get("/api/admin/sandbox/providers"),
        alice.client.post(LIST, {"code": "pass"}, headers={"Accept": "application/x-ndjson"}),
        bob.client.post(LIST, {"code": "pass"}),
    ]
    statuses = [each.status_code for each in answers]
    assert statuses == [200, 404, 400, 403, 400, 403, 200, 200]
    assert [told(each) for each in answers] == [(8, left) for left in range(7, -1, -1)]
    resets_at = {int(each["X-RateLimit-Reset"]) for each in answers}
    assert len(resets_at) == 1
    assert 0 < resets_at.pop() - time.time() <= 61

    for path in (LIST, "/v1/files/list", "/api/admin/sandbox/providers", missing):
        refused = bob.client.get(path)
        assert refused.status_code == 429, path
        assert told(refused) == (8, 0)
        assert 1 <= int(refused["Retry-After"]) <= 60
    error = bob.client.get(LIST).json()["error"]
    assert (error["code"], error["field"]) == ("SB008", "requests_per_minute")
    assert "8 requests per minute" in error["message"]
    assert told(charlie.client.get(LIST)) == (6000, 5999)
    # Without a key nobody is counted.
    for answer in (Client().get(LIST), Client().get("/api/v1/ledger/keys")):
        assert "X-RateLimit-Limit" not in answer
    # What an administrator raises holds at once.
    bounded(alice, max_requests_per_minute=10)
    bob.api_key.tenant.refresh_from_db()
    assert told(bob.client.get(LIST)) == (10, 1)
    bounded(alice, max_requests_per_minute=0)
    assert bob.client.get(LIST).status_code == 429


def test_a_large_body_counts_by_its_size_and_needs_one_place(alice: Caller) -> None:
    bounded(alice, max_requests_per_minute=10)
    assert take_request(alice.tenant, counts_as=6).remaining == 4
    assert take_request(alice.tenant).remaining == 3
    # The largest can be sent by whoever has a place at all.
    assert take_request(alice.tenant, counts_as=64).remaining == 0
    assert take_request(alice.tenant).wait is not None
    large = {"code": "", "x": "y" * (2 << 20)}
    assert told(alice.client.post(LIST, large)) == (10, 0)
    bounded(alice, max_requests_per_minute=100)
    assert told(alice.client.post(LIST, large)) == (100, 26)


def test_what_is_counted_here_counts_by_size_too() -> None:
    counted = [quotas._take_in_process(0, 10, each).remaining for each in (1, 8, 4, 1)]
    assert counted == [9, 1, 0, 0]
    assert quotas._take_in_process(0, 10, 1).wait is not None


@pytest.mark.usefixtures("no_lookup_grows_old")
def test_a_flood_of_refusals_writes_nothing_and_asks_only_whose_key_it_is(alice: Caller) -> None:
    bounded(alice, max_requests_per_minute=1)
    assert alice.client.get(LIST).status_code == 200
    assert alice.client.get(LIST).status_code == 429
    entries = LedgerEntry.objects.count()
    with CaptureQueriesContext(connection) as queries:
        assert {alice.client.get(LIST).status_code for _ in range(5)} == {429}
    assert [query["sql"].split()[0] for query in queries] == ["SELECT"] * 5
    assert RequestWindow.objects.get().taken == 1
    assert LedgerEntry.objects.count() == entries
    # Another process does not know, and finds nothing to change either.
    quotas._refused.clear()
    assert take_request(alice.tenant).wait is not None
    assert RequestWindow.objects.get().taken == 1


@pytest.mark.django_db(transaction=True)
def test_a_hundred_at_the_same_time_at_one_below_the_bound_admit_exactly_one(
    alice: Caller,
) -> None:
    bounded(alice, max_requests_per_minute=101)
    for _ in range(100):
        take_request(alice.tenant).require()
    assert at_once(100, lambda: take_request(alice.tenant).require()) == 1
    # And where the minute has just ended, as many as the bound.
    quotas._refused.clear()
    bounded(alice, max_requests_per_minute=7)
    RequestWindow.objects.update(started=F("started") - 61)
    assert at_once(50, lambda: take_request(alice.tenant).require()) == 7
    assert RequestWindow.objects.get().taken == 7


def test_a_minute_that_another_begins_in_between_refuses_nobody(
    alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the statement that finds none and the one that looks why."""
    ask = quotas._ask
    begun = []

    def begin_before_looking(sql: str, values: list[Any]) -> Any:
        if sql == quotas._LOOK and not begun:
            begun.append(True)
            ask(quotas._ADD, values)
            ask(quotas._BEGIN, values)
        return ask(sql, values)

    monkeypatch.setattr(quotas, "_ask", begin_before_looking)
    assert (take_request(alice.tenant).wait, begun) == (None, [True])


def test_a_minute_ends_and_a_clock_that_jumps_neither_opens_nor_closes_it(alice: Caller) -> None:
    bounded(alice, max_requests_per_minute=2)

    def passes_after(seconds: int) -> bool:
        """Whether one more passes once the database's clock was set by so much."""
        quotas._refused.clear()
        RequestWindow.objects.update(started=F("started") - seconds)
        return take_request(alice.tenant).wait is None

    assert [passes_after(0) for _ in range(3)] == [True, True, False]
    assert not passes_after(-30)
    assert not passes_after(30)
    assert passes_after(60)
    assert passes_after(-10)
    assert not passes_after(0)
    # A clock that was a day ahead does not keep the tenant out for a day.
    assert passes_after(-86_400)


@pytest.mark.django_db(transaction=True)
@pytest.mark.only_on("sqlite")
def test_what_only_reads_is_answered_and_bounded_while_nothing_can_be_written(
    alice: Caller,
) -> None:
    bounded(alice, max_requests_per_minute=3)
    assert alice.client.get(LIST).status_code == 200
    writer = connections.create_connection("default")
    try:
        with writer.cursor() as cursor:
            cursor.execute("BEGIN IMMEDIATE")
            answers = [alice.client.get(LIST) for _ in range(4)]
            cursor.execute("ROLLBACK")
    finally:
        writer.close()
    assert [each.status_code for each in answers] == [200, 200, 200, 429]
    assert RequestWindow.objects.get().taken == 1
    with transaction.atomic():
        bounded(alice, max_requests_per_minute=4)
    quotas._away_until = float("-inf")
    assert told(alice.client.get(LIST)) == (4, 2)
