"""The lists, measurements, snapshots and ends of sandboxes, as E2B's API has them."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any
from urllib.parse import quote

import pytest
from django.utils import timezone

from executions.ledger.models import LegalHold
from executions.sessions.models import Session, Snapshot
from providers.manager import manager
from providers.sandbox import FileEntry
from providers.services import save_config
from tests.conftest import Caller
from tests.support import kept_here
from tests.support.folder_files import FolderFiles
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


def test_a_moment_at_the_end_of_all_time_is_answered(alice: Caller) -> None:
    sandbox = made(alice)["sandboxID"]
    assert listed(alice, "?startedAfter=0001-01-01T00:00:00Z") == [sandbox]
    assert listed(alice, "?startedAfter=9999-12-31T23:59:59Z") == []
    for text in ("0001-01-01T00:00:00%2B23:00", "9999-12-31T23:59:59-23:00"):
        assert alice.client.get(f"/v2/sandboxes?startedAfter={text}").status_code == 400, text


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


def test_a_folder_is_listed_once_however_much_is_in_it(
    alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = made(alice)["sandboxID"]
    asked = []
    entries = [FileEntry(f"/workspace/{n:05}", "file") for n in range(20_001)]

    def listing(self: FolderFiles, path: str = "", depth: int = 1) -> list[FileEntry]:
        asked.append(path)
        return entries

    monkeypatch.setattr(FolderFiles, "list", listing)
    for count, status in ((20_001, 400), (20_000, 200), (1, 200)):
        del entries[count:]
        asked.clear()
        answer = alice.client.post(
            "/filesystem.Filesystem/ListDir", {"path": ""}, HTTP_E2B_SANDBOX_ID=token
        )
        assert (answer.status_code, len(asked)) == (status, 1), answer.content[:300]
        assert status == 400 or len(answer.json()["entries"]) == count


def test_a_fork_of_what_has_no_network_has_none(
    alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = property(lambda provider: provider.mark)
    monkeypatch.setattr(kept_here.KeptHere, "network", network, raising=False)
    save_config("kept_here", {"mark": "none"})
    manager.close()
    sandbox = made(alice, allow_internet_access=False)["sandboxID"]
    path = f"/sandboxes/{sandbox}/fork"
    assert "sandbox" in alice.client.post(path, {}).json()[0]
    save_config("kept_here", {"mark": "all"})
    manager.close()
    (told,) = alice.client.post(path, {}).json()
    assert "network" in told["error"]["message"]
    assert Session.objects.count() == 2


def test_a_fork_under_a_legal_hold_is_told_of_what_it_has_opened(alice: Caller) -> None:
    sandbox = made(alice)["sandboxID"]
    LegalHold.objects.create(tenant_slug=alice.tenant.slug, reason="Case 7.")
    forked = alice.client.post(f"/sandboxes/{sandbox}/fork", {})
    assert forked.status_code == 201, forked.content
    assert Session.objects.filter(pk=forked.json()[0]["sandbox"]["sandboxID"]).exists()
    # Which is the holds' to keep.
    assert Snapshot.objects.count() == 1
