"""The lists, measurements, snapshots and ends of sandboxes, as E2B's API has them."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any
from urllib.parse import quote

import pytest
from django.utils import timezone

from executions.models import Session, Snapshot
from tests.conftest import Caller
from tests.support.sessions import aged

pytestmark = [pytest.mark.database, pytest.mark.usefixtures("kept_here", "own_storage")]


def made(caller: Caller, **body: object) -> dict[str, Any]:
    answer = caller.client.post("/v2/sandboxes", body)
    assert answer.status_code == 201, answer.content
    found: dict[str, Any] = answer.json()
    return found


def listed(caller: Caller, query: str = "") -> list[str]:
    answer = caller.client.get(f"/v2/sandboxes{query}")
    assert answer.status_code == 200, answer.content
    return [each["sandboxID"] for each in answer.json()]


def test_sandboxes_are_listed_in_either_order_and_page_by_page(alice: Caller) -> None:
    first, second, third = (made(alice)["sandboxID"] for _ in range(3))
    assert listed(alice) == listed(alice, "?order=desc") == [third, second, first]
    assert listed(alice, "?order=asc") == [first, second, third]
    page = alice.client.get("/v2/sandboxes?order=asc&limit=2")
    token = page["X-Next-Token"]
    assert listed(alice, f"?order=asc&limit=2&nextToken={token}") == [third]
    assert alice.client.get("/v2/sandboxes?order=up").status_code == 400


def test_sandboxes_are_listed_by_when_they_were_started(alice: Caller) -> None:
    old, new = made(alice)["sandboxID"], made(alice)
    aged({"id": old}, created_at=100)
    started = alice.client.get(f"/sandboxes/{new['sandboxID']}").json()["startedAt"]
    assert listed(alice, f"?startedAfter={quote(started)}") == [new["sandboxID"]]
    later = (timezone.now() + timedelta(minutes=1)).isoformat()
    assert listed(alice, f"?startedAfter={quote(later)}") == []
    assert alice.client.get("/v2/sandboxes?startedAfter=today").status_code == 400


def test_sandboxes_are_listed_by_the_template_that_is_told_of_them(alice: Caller) -> None:
    sandbox = made(alice)
    assert listed(alice, f"?template={sandbox['templateID']}") == [sandbox["sandboxID"]]
    assert listed(alice, "?template=unknown") == []
    assert alice.client.get("/v2/sandboxes?template=%00").status_code == 400


def test_only_ones_own_sandboxes_are_listed(alice: Caller, bob: Caller, charlie: Caller) -> None:
    sandbox = made(alice)["sandboxID"]
    for query in ("?order=asc", "?template=base", "?startedAfter=2000-01-01T00:00:00Z"):
        assert sandbox in listed(alice, query)
        assert sandbox in listed(bob, query)
        assert listed(charlie, query) == []


def test_only_now_is_measured(alice: Caller) -> None:
    path, now = f"/sandboxes/{made(alice)['sandboxID']}/metrics", int(time.time())

    def count(query: str) -> int:
        return len(alice.client.get(f"{path}{query}").json())

    assert (
        count("") == count(f"?start={now - 60}") == count(f"?start={now - 60}&end={now + 60}") == 1
    )
    assert count(f"?start={now - 3600}&end={now - 1800}") == 0
    assert count(f"?start={now + 600}") == 0
    assert alice.client.get(f"{path}?start=today").status_code == 400


def test_network_rules_that_ask_for_no_more_than_holds_are_accepted(alice: Caller) -> None:
    made(alice, network={"allowPublicTraffic": False})
    for network in ({"denyOut": ["8.8.8.8"]}, {"allowPublicTraffic": 1}, {"new": True}, ["x"]):
        answer = alice.client.post("/v2/sandboxes", {"network": network})
        assert answer.status_code == 501, network


def test_a_snapshot_is_taken_listed_begun_with_and_deleted(
    alice: Caller, bob: Caller, charlie: Caller
) -> None:
    sandbox = made(alice)["sandboxID"]
    path = f"/sandboxes/{sandbox}/snapshots"
    taken = alice.client.post(path, {"name": "first"})
    assert (taken.status_code, taken.json()["names"]) == (201, ["first"])
    snapshot = taken.json()["snapshotID"]
    assert charlie.client.post(path, {}).status_code == 404
    for query, found in (
        ("", 1),
        (f"?sandboxID={sandbox}", 1),
        (f"?sandboxID={'0' * 32}", 0),
        ("?sandboxID=x", 0),
        ("?name=first", 1),
        ("?name=second", 0),
    ):
        for caller in (alice, bob):
            assert len(caller.client.get(f"/snapshots{query}").json()) == found, query
        assert charlie.client.get(f"/snapshots{query}").json() == []
    made(bob, templateID=snapshot)
    assert charlie.client.post("/v2/sandboxes", {"templateID": snapshot}).status_code == 404
    assert charlie.client.delete(f"/templates/{snapshot}").status_code == 404
    assert alice.client.delete(f"/templates/{snapshot}").status_code == 204
    assert alice.client.delete(f"/templates/{snapshot}").status_code == 404


def test_a_fork_leaves_no_snapshot_behind(alice: Caller, charlie: Caller) -> None:
    sandbox = made(alice, metadata={"k": "v"})["sandboxID"]
    path = f"/sandboxes/{sandbox}/fork"
    forked = alice.client.post(path, {"count": 2, "timeout": 77})
    assert forked.status_code == 201, forked.content
    ids = [each["sandbox"]["sandboxID"] for each in forked.json()]
    assert len({sandbox, *ids}) == 3
    for each in ids:
        session = Session.objects.get(pk=each)
        assert (session.max_seconds, session.metadata) == (77, {"k": "v"})
    assert not Snapshot.objects.exists()
    for count in (11, -1, "2", True):
        assert alice.client.post(path, {"count": count}).status_code == 400, count
    assert charlie.client.post(path, {}).status_code == 404
