"""What a worker makes of the events of an agent's session, in whatever order and how often."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from executions.doors.claude.transcript import TooManyCalls, Transcript


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
    transcript.note_history([use("a"), use("b"), result("a")])
    assert next_id(transcript) == "b"
    call = transcript.next_call()
    assert call is not None
    transcript.note_answered(call)
    # The history comes again with each connection.
    transcript.note_history([use("a"), use("b")])
    assert next_id(transcript) is None


def test_a_result_before_its_call_answers_it(transcript: Transcript) -> None:
    transcript.note_history([result("a"), use("a")])
    assert next_id(transcript) is None


def waits_for(*calls: str, event_id: str = "w1") -> dict[str, Any]:
    reason = {"type": "requires_action", "event_ids": list(calls)}
    return {"type": "session.status_idle", "id": event_id, "stop_reason": reason}


def test_tools_of_others_are_left_to_them(transcript: Transcript) -> None:
    custom = {**use("c"), "type": "agent.custom_tool_use"}
    transcript.note_history([use("a", "web_search"), custom, waits_for("c")])
    assert next_id(transcript) is None
    transcript.note({"type": "agent.tool_result", "id": "r", "tool_use_id": "a"})
    transcript.note(waits_for("a", event_id="w2"))
    assert next_id(transcript) is None


def test_a_call_that_the_agent_waits_for_is_ours_to_answer(transcript: Transcript) -> None:
    transcript.note_history([use("a", "newer"), waits_for("a")])
    call = transcript.next_call()
    assert call is not None
    assert not transcript.is_ours(call)
    # It works again.
    transcript.note({"type": "session.status_running", "id": "s"})
    assert next_id(transcript) is None


def test_the_answer_of_one_call_ends_the_waiting_for_no_other(transcript: Transcript) -> None:
    transcript.note_history([use("a", "newer"), use("b", "newer"), waits_for("a", "b")])
    transcript.note(result("a"))
    assert next_id(transcript) == "b"


def test_a_call_of_another_tool_that_waits_for_a_verdict_is_not_answered(
    transcript: Transcript,
) -> None:
    transcript.note_history([use("a", "newer", evaluated_permission="ask"), waits_for("a")])
    assert next_id(transcript) is None
    transcript.note(verdict("a", "allow"))
    assert next_id(transcript) is None
    transcript.note(waits_for("a", event_id="w2"))
    assert next_id(transcript) == "a"


def test_what_the_server_has_answered_itself_is_not_begun(transcript: Transcript) -> None:
    transcript.note_history([use("a"), {**result("a"), "type": "agent.tool_result"}])
    assert next_id(transcript) is None


def test_a_history_that_breaks_off_begins_nothing(transcript: Transcript, clock: Clock) -> None:
    def pages(*events: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield from events
        raise ConnectionError

    with pytest.raises(ConnectionError):
        transcript.note_history(pages(use("a"), IDLE))
    clock.now += 1000
    assert next_id(transcript) is None
    assert not transcript.is_idle
    assert transcript.idle_seconds() == 0
    transcript.note(use("b"))
    assert next_id(transcript) is None
    transcript.note_history([use("a"), IDLE, result("a")])
    assert next_id(transcript) == "b"


@pytest.mark.parametrize(
    ("name", "most"), [("MOST_EVENTS", 30), ("MOST_OPEN", 30), ("MOST_GIVEN", 500)]
)
def test_a_session_may_only_be_so_large(
    transcript: Transcript, monkeypatch: pytest.MonkeyPatch, name: str, most: int
) -> None:
    monkeypatch.setattr(f"executions.doors.claude.transcript.{name}", most)
    with pytest.raises(TooManyCalls):
        transcript.note_history(use(str(number)) for number in range(1000))


def test_what_has_been_answered_takes_no_room(
    transcript: Transcript, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("executions.doors.claude.transcript.MOST_GIVEN", 500)
    monkeypatch.setattr("executions.doors.claude.transcript.MOST_OPEN", 10)
    for number in range(100):
        call = f"c{number}"
        transcript.note_history([use(call), result(call, f"r{number}")])
    assert next_id(transcript) is None


@pytest.mark.parametrize("said", ["ask", "later", 7, {}, False])
def test_what_is_not_known_to_be_allowed_asks(transcript: Transcript, said: Any) -> None:
    transcript.note_history([use("a", evaluated_permission=said)])
    call = transcript.next_call()
    assert call is not None
    assert call.asks


@pytest.mark.parametrize("said", ["allow", None])
def test_what_is_allowed_asks_nobody(transcript: Transcript, said: Any) -> None:
    transcript.note_history([use("a", evaluated_permission=said)])
    call = transcript.next_call()
    assert call is not None
    assert not call.asks


def test_what_the_server_denies_never_runs(transcript: Transcript) -> None:
    transcript.note_history([use("a", evaluated_permission="deny"), verdict("a", "allow")])
    assert next_id(transcript) is None


@pytest.mark.parametrize("said", ["deny", "perhaps", None, True])
def test_a_verdict_that_does_not_allow_denies(transcript: Transcript, said: Any) -> None:
    transcript.note_history([use("a", evaluated_permission="ask")])
    call = transcript.next_call()
    assert call is not None
    assert not transcript.is_dropped(call)
    transcript.note_history([verdict("a", said), verdict("a", "allow", "v2")])
    assert transcript.is_dropped(call)
    assert next_id(transcript) is None


def test_calls_of_a_thread_that_has_ended_are_dropped(transcript: Transcript) -> None:
    transcript.note_history([use("a", session_thread_id="t1"), use("b")])
    call = transcript.next_call()
    assert call is not None
    ended = {"type": "session.thread_status_terminated", "id": "e", "session_thread_id": "t1"}
    transcript.note_history([ended])
    assert transcript.is_dropped(call)
    assert next_id(transcript) == "b"


def test_an_end_of_the_session_drops_everything(transcript: Transcript) -> None:
    transcript.note_history([use("a")])
    call = transcript.next_call()
    assert call is not None
    transcript.note_history([{"type": "session.deleted", "id": "d"}])
    assert transcript.is_over
    assert transcript.is_dropped(call)


def test_a_history_that_comes_again_does_not_renew_the_idle_time(
    transcript: Transcript, clock: Clock
) -> None:
    history = [use("a"), result("a"), IDLE]
    transcript.note_history(history)
    clock.now += 30
    transcript.note_history(history)
    assert transcript.idle_seconds() == 30
    # A verdict is no work; a call is.
    transcript.note_history([verdict("z", "allow")])
    assert transcript.idle_seconds() == 30
    transcript.note_history([use("b")])
    assert transcript.idle_seconds() == 0


def test_who_waits_for_an_action_is_not_idle(transcript: Transcript) -> None:
    transcript.note_history(
        [{**IDLE, "stop_reason": {"type": "requires_action", "event_ids": ["a"]}}]
    )
    assert transcript.idle_seconds() == 0


@pytest.mark.parametrize(
    "event",
    [
        {},
        {"type": 1, "id": "x"},
        {"type": "agent.tool_use"},
        {"type": "agent.tool_use", "id": ["x"]},
        {"type": "agent.tool_use", "id": "x" * 1000, "name": "bash"},
        {"type": "agent.tool_use", "id": "x\n[critical] forged", "name": "bash"},
        {"type": "agent.tool_use", "id": "x", "name": ["bash"]},
        {"type": "session.status_idle", "id": "x", "stop_reason": "end_turn"},
        {"type": "user.tool_result", "id": "x", "tool_use_id": {}},
    ],
)
def test_events_of_no_known_form_begin_nothing(
    transcript: Transcript, event: dict[str, Any]
) -> None:
    transcript.note_history([event])
    assert next_id(transcript) is None


def test_an_input_that_is_no_object_is_an_empty_one(transcript: Transcript) -> None:
    transcript.note_history([use("a", input=["rm", "-rf"])])
    call = transcript.next_call()
    assert call is not None
    assert call.given == {}
