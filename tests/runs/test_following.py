"""Streams and the events of an execution, as the API tells them to whom, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
from django.contrib.auth import get_user_model
from django.contrib.auth.models import Permission
from django.test import Client
from django.utils import timezone

from executions.runs import active_runs, event_log
from executions.runs.event_log import EventLog
from executions.runs.models import Execution, ExecutionEvent, RunSignal
from executions.tasks import forget_events
from providers.values import Event, RunLimits
from tests.conftest import Caller
from tests.support.held import ended, opened
from tests.support.running import run, run_queued

pytestmark = pytest.mark.database

EXECUTIONS = "/api/v1/executions"
NDJSON = "application/x-ndjson"
SAYS = "answer = ExecutionResult('out', 'err', 0, 0.0, outputs=[{'text/plain': '1'}])"


def events_of(answer: Any) -> list[dict[str, Any]]:
    assert answer.streaming, answer.content
    return [json.loads(line) for line in b"".join(answer).splitlines()]


def stream(caller: Caller, code: str, query: str = "", **body: Any) -> Any:
    body = {"code": code, **body}
    return caller.client.post(EXECUTIONS + query, body, headers={"accept": NDJSON})


def follow(caller: Caller, execution_id: object, query: str = "", **headers: str) -> Any:
    return caller.client.get(f"{EXECUTIONS}/{execution_id}/events{query}", headers=headers)


def types(events: list[dict[str, Any]]) -> list[str]:
    return [event["type"] for event in events]


@pytest.mark.django_db
def test_a_provider_that_tells_at_the_end_is_streamed_all_the_same(
    scripted: object, alice: Caller
) -> None:
    answer = stream(alice, SAYS)

    assert (answer.status_code, answer["Content-Type"]) == (200, NDJSON)
    assert (answer["Cache-Control"], answer["X-Accel-Buffering"]) == ("no-store", "no")
    events = events_of(answer)
    assert types(events) == ["started", "stdout", "stderr", "output", "done"]
    assert events[3]["data"] == {"text/plain": "1"}
    assert events[4]["execution"]["outputs"] == [{"text/plain": "1"}]


@pytest.mark.django_db
def test_what_is_refused_is_no_stream(scripted: object, alice: Caller) -> None:
    assert stream(alice, "").status_code == 400
    assert stream(alice, "pass", timeout=-1).json()["error"]["field"] == "timeout"
    assert stream(alice, "pass", "?detach=maybe").json()["error"]["field"] == "detach"
    assert stream(alice, "pass", language="cobol").status_code == 400
    assert not Execution.objects.exists()


@pytest.mark.django_db
def test_what_the_provider_cannot_do_is_the_record_at_the_end(
    scripted: object, alice: Caller
) -> None:
    events = events_of(stream(alice, "pass", language="unlucky"))

    assert types(events) == ["started", "done"]
    assert events[1]["execution"]["status"] == "error"
    assert events[1]["execution"]["error"]["code"] == "SB004"


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("accept", "is_stream"),
    [
        ("application/json, text/event-stream", False),
        ("text/event-stream, application/json", True),
        ("application/json;q=0.5, text/event-stream", True),
        ("text/event-stream;q=0.1, */*", False),
        ("text/event-stream;q=much", False),
        ("*/*", False),
        ("text/html" + ",a" * 10_000, False),
    ],
)
def test_plain_json_is_answered_unless_a_stream_is_preferred(
    scripted: object, alice: Caller, accept: str, is_stream: bool
) -> None:
    answer = alice.client.post(EXECUTIONS, {"code": "pass"}, headers={"accept": accept})
    assert answer.status_code == 200
    assert answer.streaming == is_stream


@pytest.mark.django_db
def test_what_is_queued_is_answered_at_once(scripted: object, alice: Caller) -> None:
    assert stream(alice, "pass", mode="async").status_code == 202


@pytest.mark.django_db
def test_a_known_idempotency_key_is_followed_and_not_run_again(
    scripted: Callable[[], list[str]], alice: Caller
) -> None:
    first = events_of(stream(alice, SAYS, idempotency_key="once"))
    ran = scripted()

    again = events_of(stream(alice, SAYS, idempotency_key="once"))

    assert again == first
    assert scripted() == ran


@pytest.mark.django_db
def test_one_that_has_ended_is_told_from_its_record(
    scripted: object, alice: Caller, bob: Caller, charlie: Caller
) -> None:
    body = run(alice, SAYS).json()

    events = events_of(follow(bob, body["id"]))

    assert types(events) == ["started", "stdout", "stderr", "output", "done"]
    assert [event["seq"] for event in events] == [1, 2, 3, 4, 5]
    assert events[0]["id"] == body["id"]
    assert events[4]["execution"] == body
    assert events_of(follow(alice, body["id"], "?after=3")) == events[3:]
    assert events_of(follow(alice, body["id"], "?after=1", last_event_id="4")) == events[4:]
    assert types(events_of(follow(alice, body["id"], "?after=999999999999999"))) == ["done"]
    assert follow(charlie, body["id"]).status_code == 404


@pytest.mark.django_db
@pytest.mark.parametrize("after", ["-1", "x", "1.5", "", "9" * 16, "9" * 5000, "٣", "1%00"])
def test_a_number_that_is_none_is_refused(alice: Caller, after: str) -> None:
    answer = follow(alice, UUID(int=0), f"?after={after}")
    assert answer.status_code == 400
    assert answer.json()["error"]["field"] == "after"


@pytest.mark.django_db
def test_both_streams_come_in_the_order_that_the_record_has(alice: Caller) -> None:
    execution = opened(alice)
    order = [[1, 1], [2, 3], [1, 2], [2, 50]]
    ended(execution, stdout="abcd", stderr="123é", output_order=order)

    events = events_of(follow(alice, execution.pk))[1:-1]

    pieces = [("stdout", "a"), ("stderr", "123"), ("stdout", "bc"), ("stderr", "é")]
    assert [(each["type"], each["text"]) for each in events] == [*pieces, ("stdout", "d")]


@pytest.mark.django_db
def test_who_may_look_at_executions_in_the_admin_may_follow_them(alice: Caller) -> None:
    execution = opened(alice)
    ended(execution, stdout="x")
    path = f"{EXECUTIONS}/{execution.pk}/events"
    client = Client()

    assert client.get(path).status_code == 401
    user = get_user_model().objects.create_user("auditor", password="x", is_staff=True)
    client.force_login(user)
    assert client.get(path).status_code == 403
    user.user_permissions.set(Permission.objects.filter(codename="view_execution"))
    assert types(events_of(client.get(path))) == ["started", "stdout", "done"]
    assert client.get(path, headers={"x-api-key": "cfd_wrong"}).status_code == 401


@pytest.mark.django_db(transaction=True)
def test_a_detached_run_keeps_its_numbers_for_a_minute(scripted: object, alice: Caller) -> None:
    events = events_of(stream(alice, SAYS, "?detach=1"))
    execution_id = events[0]["id"]
    assert ExecutionEvent.objects.count() == 1
    Execution.objects.update(stdout="not read any more")

    found = events_of(follow(alice, execution_id))

    assert found[:-1] == events[:-1]
    assert forget_events() == 0
    Execution.objects.update(finished_at=timezone.now() - timedelta(minutes=2))
    assert forget_events() == 1
    assert events_of(follow(alice, execution_id))[1]["text"] == "not read any more"


@pytest.mark.django_db(transaction=True)
def test_a_run_that_nobody_follows_keeps_no_events(scripted: object, alice: Caller) -> None:
    events_of(stream(alice, SAYS))
    run(alice, SAYS, mode="async")
    run_queued()
    assert not ExecutionEvent.objects.exists()


@pytest.mark.django_db(transaction=True)
def test_what_somebody_asked_for_is_kept_in_batches(alice: Caller) -> None:
    execution = opened(alice)
    log = EventLog(RunLimits())
    log.begin(execution.pk)
    log.emit(Event("stdout", b"a\x00\xff"))
    event_log.write(log)
    event_log.write(log)
    log.emit(Event("stdout", b"b"))
    log.is_kept = True
    log.finish()
    event_log.write_rest(log)

    assert list(ExecutionEvent.objects.values_list("first", "last")) == [(1, 2), (3, 3)]
    ended(execution)
    found = events_of(follow(alice, execution.pk, "?after=1"))
    assert [event.get("text") for event in found[:-1]] == ["a\x00\ufffd", "b"]
    assert found[0]["data_base64"] == "YQD/"


@pytest.mark.django_db(transaction=True)
def test_what_is_as_deep_as_it_may_be_is_kept_and_its_run_is_closed(
    scripted: object, alice: Caller
) -> None:
    deep = "[" * 198 + "1" + "]" * 198
    code = (
        "import json\n"
        f"deep = json.loads({deep!r})\n"
        "answer = ExecutionResult('', '', 0, 0.0, outputs=[{'application/json': deep}])"
    )
    events = events_of(stream(alice, code, "?detach=true"))
    execution = Execution.objects.get()

    assert types(events) == ["started", "output", "done"]
    assert execution.status == "succeeded"
    assert events_of(follow(alice, execution.pk))[:-1] == events[:-1]


@pytest.mark.django_db(transaction=True)
def test_a_signal_goes_with_its_execution(alice: Caller) -> None:
    execution, other = opened(alice), opened(alice)
    for each in (execution, other):
        assert active_runs.post_request(each.pk, RunSignal.Kind.FOLLOW, "x")
        assert not active_runs.post_request(each.pk, RunSignal.Kind.FOLLOW, "y")
    ended(execution)

    assert forget_events() == 1
    assert RunSignal.objects.get().execution_id == other.pk
