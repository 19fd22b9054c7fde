"""A caller makes entries of the ledger, and rows, without running anything."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from executions.doors.native.authentication import ENTERED, NEEDS
from executions.ledger.models import LedgerEntry
from executions.sessions.models import Snapshot
from executions.sessions.storage import snapshots
from executions.tenants import quotas
from executions.tenants.models import RequestWindow
from executions.tenants.quotas import ENTRY_COUNTS_AS
from tests.conftest import Caller
from tests.support.at_once import at_once
from tests.support.held import bounded
from tests.support.saved_files import write
from tests.support.sessions import URL, cell, opened

# Why the ledger has no more of these than of runs, or none.
NOT_ENTERED = {
    "runs": {
        *("executions", "session-executions", "session-processes", "agent-sandbox-execute"),
        *("e2b-execute", "e2b-process"),
    },
    "ends a run, once": {"execution-cancel"},
    "ends a build, once": {"template-version-cancel"},
    "answers a call of a run, of which there are few": {"execution-tool-call"},
    "opens or closes a sandbox": {
        *("sessions", "session", "e2b-sandboxes", "e2b-sandboxes-2", "e2b-sandbox"),
        "agent-sandbox-stop",
    },
    "counted by its tool": {"mcp"},
    "has no entry": {
        *("session-interrupt", "session-contexts", "session-context", "session-context-restart"),
        *("session-process-stdin", "session-process-signal", "session-process-resize"),
        *("session-files", "session-file-content", "session-file-move", "session-file-mkdir"),
        *("session-file-archive", "agent-sandbox-upload", "agent-sandbox-upload-urls"),
        *("e2b-process-list", "e2b-process-connect", "e2b-filesystem", "e2b-files"),
        *("e2b-contexts", "e2b-context", "e2b-context-restart"),
    },
}


@pytest.fixture(autouse=True)
def nothing_remembered(tmp_path: Path, settings: Any, kept_here: None) -> Iterator[None]:
    settings.DATA_DIR = tmp_path
    yield
    quotas._refused.clear()


def entries() -> int:
    return LedgerEntry.objects.count()


def places_taken(caller: Caller) -> int:
    return RequestWindow.objects.get(tenant=caller.tenant).taken


def refused(answer: Any) -> None:
    assert answer.status_code == 429, answer.content
    assert answer.json()["error"]["code"] == "SB008"
    assert 1 <= int(answer["Retry-After"]) <= 60


def test_each_endpoint_that_changes_something_says_whether_the_ledger_enters_it() -> None:
    changing = {
        (name, method) for name, methods in NEEDS.items() for method in methods if method != "GET"
    }
    entered = {(name, method) for name, methods in ENTERED.items() for method in methods}
    known = set().union(*NOT_ENTERED.values())
    assert entered <= changing
    left = changing - entered
    assert {name for name, _ in left} == known


def test_changes_of_a_session_use_up_the_minute_of_their_tenant_and_of_nobody_else(
    alice: Caller, bob: Caller, charlie: Caller
) -> None:
    session, other = opened(alice), opened(charlie)
    RequestWindow.objects.update(taken=0)
    bounded(alice, max_requests_per_minute=3 * ENTRY_COUNTS_AS)
    before = entries()

    answers = [
        caller.client.patch(f"{URL}/{session['id']}", {"metadata": {"n": str(n)}})
        for n in range(20)
        for caller in (alice, bob)
    ]

    assert [each.status_code for each in answers] == [200] * 3 + [429] * 37
    for each in answers[3:]:
        refused(each)
    assert entries() == before + 3
    # Nor is anything else of hers answered: it is one minute.
    refused(bob.client.get(URL))
    changed = charlie.client.patch(f"{URL}/{other['id']}", {"metadata": {"n": "1"}})
    assert changed.status_code == 200
    # To ask for somebody else's costs as much, and enters nothing.
    assert charlie.client.patch(f"{URL}/{session['id']}", {"metadata": {}}).status_code == 404
    assert entries() == before + 4


def test_schedules_snapshots_and_resets_count_as_much(alice: Caller) -> None:
    session = opened(alice)
    assert cell(alice, session, write("f", "kept")).json()["status"] == "succeeded"
    wanted = {"name": "a", "cron": "0 0 1 1 *", "request": {"code": "1"}}

    def cost(method: str, path: str, body: Any = None) -> tuple[int, Any]:
        before = places_taken(alice)
        answer = getattr(alice.client, method)(f"/api/v1/{path}", body)
        assert answer.status_code < 300, answer.content
        return places_taken(alice) - before, answer.json() if answer.content else None

    costs = []
    spent, schedule = cost("post", "schedules", wanted)
    costs.append(spent)
    costs.append(cost("patch", f"schedules/{schedule['id']}", {"paused": True})[0])
    costs.append(cost("delete", f"schedules/{schedule['id']}")[0])
    spent, snapshot = cost("post", f"sessions/{session['id']}/snapshot")
    costs.append(spent)
    costs.append(cost("delete", f"snapshots/{snapshot['id']}")[0])
    costs.append(cost("post", f"sessions/{session['id']}/reset")[0])
    assert costs == [ENTRY_COUNTS_AS] * 6
    assert cost("get", "sessions")[0] == 1
    assert cost("post", f"sessions/{session['id']}/executions", {"code": "1"})[0] == 1


def test_a_tenant_has_so_many_snapshots_and_others_have_theirs(
    alice: Caller, bob: Caller, charlie: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "MOST_SNAPSHOTS", 2)
    session, other = opened(alice), opened(charlie)
    for owner, each in ((alice, session), (charlie, other)):
        assert cell(owner, each, write("f", "kept")).json()["status"] == "succeeded"
    url = f"{URL}/{session['id']}/snapshot"
    made = [caller.client.post(url) for caller in (alice, bob)]
    assert [each.status_code for each in made] == [201, 201]

    for caller in (alice, bob):
        answer = caller.client.post(url)
        assert (answer.status_code, answer.json()["error"]["field"]) == (429, "snapshots")
        assert "Delete some" in answer.json()["error"]["message"]
    assert charlie.client.post(url).status_code == 404
    assert charlie.client.post(f"{URL}/{other['id']}/snapshot").status_code == 201

    assert bob.client.delete(f"/api/v1/snapshots/{made[0].json()['id']}").status_code == 204
    assert alice.client.post(url).status_code == 201
    assert Snapshot.objects.filter(tenant=alice.tenant).count() == 2


@pytest.mark.django_db(transaction=True)
def test_snapshots_taken_at_the_same_time_at_one_below_the_bound_are_one(
    alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "MOST_SNAPSHOTS", 3)
    sessions = [opened(alice) for _ in range(4)]
    for each in sessions:
        assert cell(alice, each, write("f", "kept")).json()["status"] == "succeeded"
    url = "{}/{}/snapshot"
    for each in sessions[:2]:
        assert alice.client.post(url.format(URL, each["id"])).status_code == 201
    waiting = list(sessions)

    def take() -> None:
        answer = Caller(alice.api_key, alice.key_text).client.post(
            url.format(URL, waiting.pop()["id"])
        )
        if answer.status_code != 201:
            raise snapshots.quota.QuotaExceeded(answer.content.decode())

    assert at_once(4, take) == 1
    assert Snapshot.objects.filter(tenant=alice.tenant).count() == 3
