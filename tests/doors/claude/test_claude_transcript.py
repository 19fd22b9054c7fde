"""What a worker makes of the events of an agent's session, in whatever order and how often."""

from __future__ import annotations

from typing import Any

import pytest

from executions.doors.claude.transcript import Transcript, slim


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def transcript(clock: Clock) -> Transcript:
    return Transcript(("bash", "read"), clock)


def use(event_id: str, name: str = "bash", **said: Any) -> dict[str, Any]:
    return {
        "type": "agent.tool_use",
        "id": event_id,
        "name": name,
        "input": {"command": "x"},
    } | said


def result(call: str, event_id: str = "r1") -> dict[str, Any]:
    return {"type": "user.tool_result", "id": event_id, "tool_use_id": call}


def verdict(call: str, said: str, event_id: str = "v1") -> dict[str, Any]:
    return {
        "type": "user.tool_confirmation",
        "id": event_id,
        "tool_use_id": call,
        "result": said,
    }


IDLE = {"type": "session.status_idle", "id": "i1", "stop_reason": {"type": "end_turn"}}


def next_id(transcript: Transcript) -> str | None:
    found = transcript.next_call()
    return found.id if found is not None else None


def test_calls_come_in_their_order_until_they_are_answered(transcript: Transcript) -> None:
    transcript.note([use("a"), use("b"), result("a")])
    assert next_id(transcript) == "b"
    call = transcript.next_call()
    assert call is not None
    transcript.note_answered(call)
    # The history comes again with each connection.
    transcript.note([use("a"), use("b")])
    assert next_id(transcript) is None


def test_a_result_before_its_call_answers_it(transcript: Transcript) -> None:
    transcript.note([result("a"), use("a")])
    assert next_id(transcript) is None


def test_tools_of_others_are_left_to_them(transcript: Transcript) -> None:
    transcript.note([use("a", "web_search"), {**use("c"), "type": "agent.custom_tool_use"}])
    assert next_id(transcript) is None


@pytest.mark.parametrize("said", ["ask", "later", 7, {}, False])
def test_what_is_not_known_to_be_allowed_asks(transcript: Transcript, said: Any) -> None:
    transcript.note([use("a", evaluated_permission=said)])
    call = transcript.next_call()
    assert call is not None
    assert call.asks


@pytest.mark.parametrize("said", ["allow", None])
def test_what_is_allowed_asks_nobody(transcript: Transcript, said: Any) -> None:
    transcript.note([use("a", evaluated_permission=said)])
    call = transcript.next_call()
    assert call is not None
    assert not call.asks


def test_what_the_server_denies_never_runs(transcript: Transcript) -> None:
    transcript.note([use("a", evaluated_permission="deny"), verdict("a", "allow")])
    assert next_id(transcript) is None


@pytest.mark.parametrize("said", ["deny", "perhaps", None, True])
def test_a_verdict_that_does_not_allow_denies(transcript: Transcript, said: Any) -> None:
    transcript.note([use("a", evaluated_permission="ask")])
    call = transcript.next_call()
    assert call is not None
    assert not transcript.is_dropped(call)
    transcript.note([verdict("a", said), verdict("a", "allow", "v2")])
    assert transcript.is_dropped(call)
    assert next_id(transcript) is None


def test_calls_of_a_thread_that_has_ended_are_dropped(transcript: Transcript) -> None:
    transcript.note([use("a", session_thread_id="t1"), use("b")])
    call = transcript.next_call()
    assert call is not None
    ended = {"type": "session.thread_status_terminated", "id": "e", "session_thread_id": "t1"}
    transcript.note([ended])
    assert transcript.is_dropped(call)
    assert next_id(transcript) == "b"


def test_an_end_of_the_session_drops_everything(transcript: Transcript) -> None:
    transcript.note([use("a")])
    call = transcript.next_call()
    assert call is not None
    transcript.note([{"type": "session.deleted", "id": "d"}])
    assert transcript.is_over
    assert transcript.is_dropped(call)


def test_a_history_that_comes_again_does_not_renew_the_idle_time(
    transcript: Transcript, clock: Clock
) -> None:
    history = [use("a"), result("a"), IDLE]
    transcript.note(history)
    clock.now += 30
    transcript.note(history)
    assert transcript.idle_seconds() == 30
    # A verdict is no work; a call is.
    transcript.note([verdict("z", "allow")])
    assert transcript.idle_seconds() == 30
    transcript.note([use("b")])
    assert transcript.idle_seconds() == 0


def test_who_waits_for_an_action_is_not_idle(transcript: Transcript) -> None:
    transcript.note([{**IDLE, "stop_reason": {"type": "requires_action", "event_ids": ["a"]}}])
    assert transcript.idle_seconds() == 0


@pytest.mark.parametrize(
    "event",
    [
        {},
        {"type": 1, "id": "x"},
        {"type": "agent.tool_use"},
        {"type": "agent.tool_use", "id": ["x"]},
        {"type": "agent.tool_use", "id": "x" * 1000, "name": "bash"},
        {"type": "agent.tool_use", "id": "x", "name": ["bash"]},
        {"type": "session.status_idle", "id": "x", "stop_reason": "end_turn"},
        {"type": "user.tool_result", "id": "x", "tool_use_id": {}},
    ],
)
def test_events_of_no_known_form_begin_nothing(
    transcript: Transcript, event: dict[str, Any]
) -> None:
    transcript.note([slim(event)])
    assert next_id(transcript) is None


def test_an_input_that_is_no_object_is_an_empty_one(transcript: Transcript) -> None:
    transcript.note([use("a", input=["rm", "-rf"])])
    call = transcript.next_call()
    assert call is not None
    assert call.given == {}


def test_the_content_of_results_is_not_kept() -> None:
    assert "content" not in slim({**result("a"), "content": [{"text": "x" * 10}]})
