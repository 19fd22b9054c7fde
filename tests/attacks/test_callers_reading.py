"""A key that may not read asks for something else, and hopes to be told all the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from executions.doors.native import rendering
from executions.kernel.text import to_json
from executions.runs import event_log, results
from executions.runs.event_log import EventLog
from executions.runs.models import Execution
from executions.tenants.keys import create_api_key
from providers.values import Event, RunLimits
from tests.conftest import Caller
from tests.support.held import ended
from tests.support.held import opened as queued
from tests.support.running import run
from tests.support.sessions import URL, cell, opened

EXECUTIONS = "/api/v1/executions"
SECRET = "the owner's own"


def with_scopes(caller: Caller, scopes: str) -> Caller:
    return Caller(*create_api_key(caller.tenant, scopes, None, scopes))


@pytest.fixture
def cancelled(alice: Caller) -> Execution:
    """Alice's, with some output, and cancelled; to cancel it again is no error."""
    execution = queued(alice, "async")
    assert alice.client.post(f"{EXECUTIONS}/{execution.pk}/cancel").status_code == 200
    Execution.objects.filter(pk=execution.pk).update(
        stdout=SECRET,
        stderr=SECRET,
        result=json.dumps(SECRET),
        has_result=True,
        outputs=json.dumps([{"text/plain": SECRET}]),
        exit_code=7,
        error_message=SECRET,
        hops=[{"provider": SECRET}],
    )
    return execution


@pytest.mark.django_db(transaction=True)
def test_cancel_tells_a_key_without_read_nothing_of_anothers_run(
    cancelled: Execution, alice: Caller, bob: Caller, charlie: Caller
) -> None:
    path = f"{EXECUTIONS}/{cancelled.pk}/cancel"
    blind = with_scopes(alice, "execute")

    answer = blind.client.post(path)

    assert answer.status_code == 200
    assert SECRET not in answer.content.decode()
    told = answer.json()
    assert (told["id"], told["status"]) == (str(cancelled.pk), "cancelled")
    assert (told["exit_code"], told["receipt"], told["stdout_truncated"]) == (None, None, True)
    # The same shape, so that clients can read it.
    for reader in (alice, bob, with_scopes(alice, "execute read")):
        full = reader.client.post(path).json()
        assert full.keys() == told.keys()
        assert (full["stdout"], full["exit_code"], bool(full["receipt"])) == (SECRET, 7, True)
    for stranger in (charlie, with_scopes(charlie, "execute")):
        assert stranger.client.post(path).status_code == 404


@pytest.mark.django_db(transaction=True)
def test_cancel_tells_a_key_without_read_of_its_own_run(alice: Caller) -> None:
    blind = with_scopes(alice, "execute")
    own = queued(blind, "async")
    told = blind.client.post(f"{EXECUTIONS}/{own.pk}/cancel").json()
    assert told["status"] == "cancelled"
    assert told["receipt"]


def test_an_idempotency_key_is_no_way_to_anothers_result(
    scripted: object, alice: Caller, bob: Caller, charlie: Caller
) -> None:
    code = f"answer = ExecutionResult({SECRET!r}, '', 0, 0.0)"
    first = run(alice, code, idempotency_key="guessed").json()
    assert first["stdout"] == SECRET
    blind = with_scopes(alice, "execute")
    for headers in ({}, {"Accept": "application/x-ndjson"}):
        body = {"code": code, "idempotency_key": "guessed"}
        answer = blind.client.post(EXECUTIONS, body, headers=headers)
        content = b"".join(answer) if answer.streaming else answer.content
        assert SECRET not in content.decode(), content
        assert "may not read the result" in content.decode()
    assert run(bob, code, idempotency_key="guessed").json()["id"] == first["id"]
    # Of another tenant it is another key, and another run.
    assert run(charlie, code, idempotency_key="guessed").json()["id"] != first["id"]
    # And one's own is one's own.
    own = run(blind, code, idempotency_key="mine").json()
    assert run(blind, code, idempotency_key="mine").json()["id"] == own["id"]


@pytest.mark.usefixtures("kept_here")
def test_changing_a_session_tells_a_key_without_read_nothing_of_anothers(
    alice: Caller, bob: Caller, charlie: Caller, tmp_path: Path, settings: Any
) -> None:
    settings.DATA_DIR = tmp_path
    session = opened(alice, name=SECRET, metadata={"for": SECRET})
    path = f"{URL}/{session['id']}"
    assert cell(alice, session, "1").status_code == 200
    made = alice.client.post(f"{path}/contexts", {"language": "python", "cwd": "secret"})
    assert made.status_code == 201, made.content
    blind = with_scopes(alice, "sessions")

    def asked(caller: Caller) -> list[Any]:
        again = f"{path}/contexts/{made.json()['id']}/restart"
        return [
            caller.client.patch(path, {"idle_seconds": 700}),
            caller.client.post(again),
            caller.client.post(f"{path}/reset", {}),
        ]

    for stranger in (charlie, with_scopes(charlie, "sessions")):
        assert [each.status_code for each in asked(stranger)] == [404] * 3
    changed, restarted, reset = asked(blind)
    for answer in (changed, restarted, reset):
        assert answer.status_code == 200, answer.content
        assert SECRET not in answer.content.decode()
        assert "secret" not in answer.content.decode()
    assert changed.json()["idle_seconds"] == 700
    assert changed.json()["state"] == "open"
    assert changed.json()["contexts"] == []
    for reader in (alice, bob):
        told = reader.client.patch(path, {"idle_seconds": 800}).json()
        assert told.keys() == changed.json().keys()
        assert (told["name"], told["metadata"]) == (SECRET, {"for": SECRET})
    own = opened(blind, name="own")
    answer = blind.client.patch(f"{URL}/{own['id']}", {"idle_seconds": 700})
    assert answer.json()["name"] == "own"


@pytest.mark.django_db(transaction=True)
def test_what_a_program_made_is_not_read_anew_for_each_who_asks_for_it(
    alice: Caller, bob: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Millions of values in one record held all threads for seconds, as often as a key asked."""
    shown = [{"application/json": [[]] * 3, "text/plain": 'é"x"'}]
    execution = queued(alice, "async")
    written = {"outputs": to_json(shown), "result": to_json({"a": [1.5, None]})}
    ended(execution, has_result=True, **written)
    read: list[str] = []
    monkeypatch.setattr(rendering, "from_json", read.append)
    answer = bob.client.get(f"{EXECUTIONS}/{execution.pk}").json()
    assert (answer["outputs"], answer["result"]) == (shown, {"a": [1.5, None]})
    assert read == []


@pytest.mark.django_db(transaction=True)
def test_a_stream_leaves_what_has_too_many_values_to_the_record(
    alice: Caller, bob: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = [{"application/json": [[]] * 30, "text/plain": "x"}]
    for most, told in ((1000, shown), (20, [])):
        monkeypatch.setattr(results, "MOST_VALUES", most)
        monkeypatch.setattr(event_log, "MOST_VALUES", most)
        execution = queued(alice, "async")
        ended(execution, outputs=to_json(shown))
        events = b"".join(bob.client.get(f"{EXECUTIONS}/{execution.pk}/events")).splitlines()
        said = [json.loads(each) for each in events]
        assert [each["data"] for each in said if each["type"] == "output"] == told
        assert said[-1]["execution"]["outputs"] == shown
        log = EventLog(RunLimits())
        log.emit(Event("output", output=shown[0]))
        assert [each.said for each in log.read(0, 10**9)[0] if each.type == "output"] == [
            {"data": each} for each in told
        ]
