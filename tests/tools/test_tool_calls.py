"""Calls of tools in the service: who may approve, what is told to a webhook, what is kept."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import pytest
from django.contrib.auth.models import Permission, User
from django.db import connection
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from executions.capabilities.policies.approvals import AlreadyDecided
from executions.capabilities.retention import service as retention
from executions.capabilities.tools import calls
from executions.capabilities.tools.calls import ToolCallDispatcher
from executions.capabilities.tools.models import ToolCall
from executions.ledger.models import LedgerEntry
from executions.ledger.verification import verify
from executions.runs import orphaned_runs, record, requests
from executions.runs.event_log import EventLog
from executions.runs.models import Execution, ExecutionEvent
from executions.runs.requests import ExecutionRequest, run_limits
from executions.sessions import queries
from executions.tenants.models import ApiKey
from providers.values import Event
from providers.values import ToolCall as Called
from tests.conftest import Caller
from tests.support.running import run, run_queued
from tests.support.sessions import wait_for
from tests.support.webhook_receivers import CODE, Receiver, is_signed, queue

pytest_plugins = ["tests.support.webhook_receivers"]
pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.database]

TOOLS = [
    {"name": "search", "parameters": {"type": "object"}},
    {"name": "delete", "parameters": {"type": "object"}, "writes": True},
]


class At:
    """A desk without a sandbox: what its code would be answered."""

    def __init__(self, execution: Execution) -> None:
        self.execution = execution
        self.answers: dict[int, Any] = {}
        self.log = EventLog(run_limits())
        self.log.begin(execution.pk)
        tools = ExecutionRequest("1", tools=TOOLS).tools
        self.desk = ToolCallDispatcher(execution, tools, self.log, self.hear)

    def hear(self, number: int, answer: bytes) -> None:
        self.answers[number] = json.loads(answer)

    def call(self, number: int, name: str = "search", arguments: bytes = b"{}") -> None:
        self.desk.take(Event("tool_call", call=Called(number, name, arguments)))

    def told(self, kind: str) -> list[Any]:
        return [each.said for each in self.log.read(0, 10**6)[0] if each.type == kind]

    def told_of(self, call: ToolCall) -> dict[str, Any]:
        arguments = json.loads(call.arguments)
        return {"id": str(call.pk), "name": call.name, "arguments": arguments}

    def until(self, count: int, kind: str = "tool_call") -> ToolCall:
        """The row of the last of so many."""
        wait_for(lambda: len(self.told(kind)) >= count)
        return ToolCall.objects.get(pk=self.told(kind)[-1]["id"])


@pytest.fixture
def at(alice: Caller) -> Iterator[At]:
    execution, _ = record.open_record(ExecutionRequest("1"), requests.Caller.of_key(alice.api_key))
    found = At(execution)
    yield found
    found.desk.close()
    wait_for(lambda: not calls._clerk.loop.is_running)


def answered(caller: Caller, call: ToolCall, body: Any) -> int:
    path = f"/api/v1/executions/{call.execution_id}/tool_calls/{call.pk}"
    status: int = caller.client.post(path, body).status_code
    return status


def signed_in(name: str, *permissions: str) -> Client:
    user = User.objects.create_user(name, password="x", is_staff=True)
    user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
    client = Client()
    client.force_login(user)
    return client


def page(name: str, call: ToolCall) -> str:
    return reverse(f"admin:executions_toolcall_{name}", args=[call.pk])


def decided(client: Client, call: ToolCall, how: str, **more: str) -> str:
    sent = {how: "1", "arguments_hash": call.arguments_hash, **more}
    status = client.post(page("decide", call), sent).status_code
    call.refresh_from_db()
    return call.state if status == 302 else str(status)


def test_an_answer_of_another_process_is_found_and_handed_in(
    at: At, alice: Caller, bob: Caller, charlie: Caller
) -> None:
    at.call(7)
    call = at.until(1)

    for other, status in ((bob, 403), (charlie, 404)):
        assert answered(other, call, {"result": "theirs"}) == status
    # Past the view, as another web process would.
    calls.answer_call(at.execution, call.pk, alice.api_key, '{"result":"mine"}')
    wait_for(lambda: at.answers == {7: {"result": "mine"}})
    assert LedgerEntry.objects.filter(kind="tool_call").count() == 2
    assert verify().is_intact


def test_only_who_may_decide_approves_and_not_who_began_it(at: At, alice: Caller) -> None:
    at.call(1, "delete", b'{"path":"\\u202etxt"}')
    call = at.until(1, "tool_call_held")
    viewer = signed_in("vera", "view_toolcall")
    ada = signed_in("ada", "view_toolcall", "decide_approval")
    eve = signed_in("eve", "view_toolcall", "decide_approval")
    queries.record_initiator(User.objects.get(username="eve"), at.execution, "began")

    assert answered(alice, call, {"result": 1}) == 409
    assert decided(viewer, call, "approve") == "403"
    assert "txt" not in viewer.get(page("change", call)).content.decode()
    assert "[U+202E]txt" in ada.get(page("change", call)).content.decode()
    assert decided(eve, call, "approve") == "held"
    assert decided(ada, call, "approve", arguments_hash="sha256:other") == "held"
    assert not at.told("tool_call")
    assert decided(ada, call, "approve") == "waiting"
    assert at.until(1).pk == call.pk
    assert decided(ada, call, "reject") == "waiting"
    assert answered(alice, call, {"result": None}) == 200
    wait_for(lambda: at.answers == {1: {"result": None}})


@pytest.mark.parametrize(
    "shown",
    [
        {"arguments": '{"path":"/tmp/x"}'},
        {"name": "search"},
        {"arguments_hash": calls.hash_of('{"path":"/etc"}')},
    ],
    ids=["arguments", "name", "hash"],
)
def test_nobody_approves_what_the_row_says_instead(at: At, shown: dict[str, str]) -> None:
    """Whoever writes the database shows something harmless beside the hash, and puts it back."""
    at.call(1, "delete", b'{"path":"/srv"}')
    call = at.until(1, "tool_call_held")
    ada = signed_in("ada", "view_toolcall", "decide_approval")
    whole = ada.get(page("change", call)).content.decode()
    ToolCall.objects.filter(pk=call.pk).update(**shown)
    altered = ada.get(page("change", call)).content.decode()

    assert ">Approve<" in whole
    assert ">Approve<" not in altered
    assert "This row does not match the ledger: it was changed. It cannot be approved." in altered
    call.refresh_from_db()
    assert decided(ada, call, "approve") == "held"
    assert not LedgerEntry.objects.filter(statement__contains='"step":"approved"').exists()
    assert decided(ada, call, "reject") == "refused"


@pytest.mark.parametrize("state", ["waiting", "held"])
def test_nobody_approves_a_row_that_is_changed_while_it_is_decided(at: At, state: str) -> None:
    at.call(1, "delete", b'{"path":"/srv"}')
    call = at.until(1, "tool_call_held")
    signed_in("ada", "view_toolcall", "decide_approval")
    ada = User.objects.get(username="ada")
    # As it was read, and as it is by the time it is approved.
    call.state = state
    if state == "held":
        ToolCall.objects.filter(pk=call.pk).update(arguments='{"path":"/etc"}')

    with pytest.raises(AlreadyDecided):
        calls.decide(call, ada, approve=True, arguments_hash=call.arguments_hash)
    assert not LedgerEntry.objects.filter(statement__contains='"step":"approved"').exists()


def test_what_is_rejected_or_late_is_never_handed_out(at: At, alice: Caller) -> None:
    ada = signed_in("ada", "view_toolcall", "decide_approval")
    at.call(1, "delete", b'{"path":"/srv"}')
    assert decided(ada, at.until(1, "tool_call_held"), "reject") == "refused"
    wait_for(lambda: at.answers == {1: {"error": calls.REJECTED}})
    [rejected] = alice.client.get(f"/api/v1/executions/{at.execution.pk}/tool_calls").json()[
        "results"
    ]
    assert (rejected["state"], rejected["arguments"]) == ("refused", None)
    at.call(2, "delete")
    held = at.until(2, "tool_call_held")
    Execution.objects.filter(pk=at.execution.pk).update(
        status="succeeded", finished_at=timezone.now()
    )
    assert decided(ada, held, "approve") == "held"
    assert answered(alice, held, {"result": 1}) == 409
    at.desk.close()
    wait_for(lambda: ToolCall.objects.get(pk=held.pk).state == "given_up")
    assert not at.told("tool_call")


@pytest.mark.parametrize("is_found_dead", [True, False])
def test_a_call_whose_process_has_died_waits_for_nobody(
    at: At, alice: Caller, is_found_dead: bool
) -> None:
    """Nobody closes the desk of one that died, before or after it has closed the record."""
    at.call(1, "search", b'{"query":"x"}')
    at.call(2, "delete")
    held = at.until(1, "tool_call_held")
    call = at.until(1)
    execution = Execution.objects.get(pk=at.execution.pk)
    if is_found_dead:
        assert orphaned_runs.mark_lost(execution, "it died")
    else:
        changes = record.error_changes("SB009", "it died")
        assert record.close_record(execution, Execution.Status.ERROR, changes)
    told = alice.client.get(f"/api/v1/executions/{execution.pk}/tool_calls").json()["results"]

    assert [each["state"] for each in told] == ["given_up"] * 2
    assert ToolCall.objects.filter(state="given_up").count() == (2 if is_found_dead else 0)
    assert [answered(alice, each, {"result": 1}) for each in (call, held)] == [409, 409]
    ada = signed_in("ada", "view_toolcall", "decide_approval")
    assert decided(ada, held, "approve") == held.state != "waiting"
    assert LedgerEntry.objects.filter(kind="tool_call").count() == 2
    assert verify().is_intact


@pytest.mark.parametrize("how", ["run", "key"])
def test_who_writes_whose_run_it_is_does_not_answer(
    at: At, alice: Caller, bob: Caller, how: str
) -> None:
    """Bob's key becomes the run's, or its text the one of the run's key."""
    at.call(1)
    call = at.until(1)
    if how == "run":
        Execution.objects.filter(pk=at.execution.pk).update(api_key=bob.api_key)
    else:
        theirs = bob.api_key.key_hash
        ApiKey.objects.filter(pk=bob.api_key.pk).update(key_hash="0" * 64)
        ApiKey.objects.filter(pk=alice.api_key.pk).update(key_hash=theirs)

    assert answered(bob, call, {"result": "forged"}) == 200
    wait_for(lambda: bool(at.answers))
    assert at.answers == {1: {"error": "the call does not match the ledger"}}


def test_who_writes_the_events_of_a_run_has_nobody_carry_out_a_call(at: At, alice: Caller) -> None:
    """Of a run of another process they are read from the database."""
    at.call(1, "search", b'{"query":"x"}')
    true = {"type": "tool_call", **at.told_of(at.until(1))}
    at.call(2, "delete", b'{"path":"/srv"}')
    held = at.until(1, "tool_call_held")
    forged = {"type": "tool_call", **at.told_of(held)}
    ToolCall.objects.filter(pk=held.pk).update(state="given_up", writes=False)
    bodies = [
        *(true, forged, {**true, "name": "delete"}, {**true, "arguments": {"query": "y"}}),
        *({**true, "id": str(uuid4())}, {**true, "id": 7}, {"type": "tool_call"}),
        {"type": "tool_call_held", "id": str(held.pk)},
    ]
    told = [{"seq": 2 + number, **body} for number, body in enumerate(bodies)]
    ExecutionEvent.objects.create(
        execution=at.execution, first=2, last=len(told) + 1, bodies=json.dumps(told)
    )
    Execution.objects.filter(pk=at.execution.pk).update(
        status="succeeded", finished_at=timezone.now()
    )
    answer = alice.client.get(f"/api/v1/executions/{at.execution.pk}/events")
    events = [json.loads(line) for line in b"".join(answer).splitlines()]

    assert events[:-1] == [told[0], told[-1]]


# Other databases let nobody write what is no text.
@pytest.mark.only_on("sqlite")
def test_a_row_that_cannot_be_read_keeps_no_other_call_waiting(at: At, alice: Caller) -> None:
    for number in (1, 2):
        at.call(number)
        at.until(number)
    call, spoilt = ToolCall.objects.order_by("pk")
    with connection.cursor() as cursor:
        cursor.execute(
            "UPDATE executions_toolcall SET state = 'answered', answer = CAST(X'ff' AS TEXT), "
            "answered_by = 'x', answered_at = asked_at WHERE id = %s",
            [spoilt.pk.hex],
        )

    assert answered(alice, call, {"result": 1}) == 200
    wait_for(lambda: at.answers == {1: {"result": 1}})


def test_a_provider_that_lies_is_held_to_the_bounds(at: At) -> None:
    for event in (
        Event("tool_call"),
        Event("tool_call", call=Called(1, "none", b"{}")),
        Event("tool_call", call=Called("1", "search", b"{}")),  # type: ignore[arg-type]
        Event("tool_call", call=Called(1, "search", "{}")),  # type: ignore[arg-type]
    ):
        at.desk.take(event)
    for number in range(20):
        at.call(number + 10)
    wait_for(lambda: len(at.told("tool_call")) == 8 and len(at.answers) == 13)

    assert set(map(str, at.answers.values())) == {"{'error': 'the call was not accepted'}"}
    assert ToolCall.objects.count() == at.desk.taken == 8


def test_a_call_is_told_to_the_webhook_of_its_run(
    scripted: object, at: At, alice: Caller, secret: str, receiver: Receiver
) -> None:
    queued = queue(alice, receiver.url()).json()
    at.desk.execution = Execution.objects.get(pk=queued["id"])
    receiver.statuses = [500]
    at.call(1, "search", b'{"query":"x"}')
    # Tried again, as one message.
    wait_for(lambda: len(receiver.came) == 2)
    (_, first, _), (_, headers, body) = receiver.came
    said = json.loads(body)

    assert is_signed(secret, headers, body)
    assert headers["webhook-id"] == first["webhook-id"]
    assert (said["type"], said["data"]["execution"]) == ("execution.tool_call", queued["id"])
    assert said["data"]["call"]["arguments"] == {"query": "x"}
    call = ToolCall.objects.get(pk=said["data"]["call"]["id"])
    assert answered(alice, call, {"result": 1}) == 200
    wait_for(lambda: at.answers == {1: {"result": 1}})


def test_a_provider_without_tools_refuses_by_name_before_anything_runs(
    scripted: Callable[[], list[str]], alice: Caller
) -> None:
    before = len(scripted())
    queued = run(alice, CODE, mode="async", tools=TOOLS).json()
    run_queued()
    execution = Execution.objects.get(pk=queued["id"])

    assert (execution.status, execution.error_field) == ("error", "tools")
    assert "does not support tools" in execution.error_message
    assert [each for each in scripted()[before:] if each.startswith("run")] == []


def test_what_was_said_goes_with_the_output_and_all_of_it_with_the_record(
    at: At, alice: Caller
) -> None:
    at.call(1, "search", b'{"query":"x"}')
    call = at.until(1)
    assert answered(alice, call, {"result": "y"}) == 200
    retention._erase_rows("output", [at.execution])
    call.refresh_from_db()

    assert (call.arguments, call.answer, call.arguments_hash[:7]) == ("", "", "sha256:")
    found = alice.client.get(f"/api/v1/executions/{at.execution.pk}/tool_calls").json()
    assert found["results"][0]["arguments"] is None
    retention._erase_rows("records", [at.execution])
    assert not ToolCall.objects.exists()


def test_a_tenant_whose_calls_never_end_keeps_nobody_from_an_answer(
    at: At, alice: Caller, charlie: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One thread records for all: while one tenant's calls come faster than they are recorded."""
    of_charlie, _ = record.open_record(
        ExecutionRequest("1"), requests.Caller.of_key(charlie.api_key)
    )
    greedy = At(of_charlie)
    at.call(1)
    call = at.until(1)
    goes_on, recorded = threading.Event(), ToolCallDispatcher._record

    def again(self: ToolCallDispatcher, *args: Any) -> None:
        recorded(self, *args)
        if self is greedy.desk and not goes_on.is_set():
            # Each time there is another before this one is through.
            calls._clerk.do(self, lambda: again(self, *args))

    monkeypatch.setattr(ToolCallDispatcher, "_record", again)
    greedy.call(1, "search", b"[]")
    try:
        at.call(2)
        assert at.until(2).pk != call.pk
        calls.answer_call(at.execution, call.pk, alice.api_key, '{"result":"mine"}')
        wait_for(lambda: at.answers == {1: {"result": "mine"}})
    finally:
        goes_on.set()
        greedy.desk.close()


def test_without_a_thread_the_next_call_has_one(at: At, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        at.call(1)
    at.call(2)

    at.until(2)
