"""The events of a run in memory: what a provider tells is a claim, and no reader is hurried."""

from __future__ import annotations

from typing import Any, cast
from uuid import uuid4

import pytest

from executions.runs.event_log import MOST_KEPT, MOST_UNREAD, EventLog, whole_characters
from providers.network import MOST_LISTED
from providers.values import Event, ExecutionResult, RunLimits

MUCH = 10**9


def log(**limits: int) -> EventLog:
    begun = EventLog(RunLimits(**limits))
    begun.begin(uuid4())
    return begun


def out(data: bytes) -> Event:
    return Event("stdout", data)


def err(data: bytes) -> Event:
    return Event("stderr", data)


def bodies(events: EventLog, after: int = 1) -> list[dict[str, Any]]:
    return [entry.body() for entry in events.read(after, MUCH)[0]]


def test_they_are_numbered_in_the_order_in_which_they_came() -> None:
    events = log()
    for event in (out(b"a"), err(b"b"), Event("output", output={"text/plain": "1"}), out(b"c")):
        events.emit(event)

    found = bodies(events, 0)

    assert [body["seq"] for body in found] == [1, 2, 3, 4, 5]
    assert [body["type"] for body in found] == ["started", "stdout", "stderr", "output", "stdout"]
    assert found[3]["data"] == {"text/plain": "1"}
    assert events.order() == [[1, 1], [2, 1], [1, 1]]


def test_what_nobody_was_given_is_joined_and_what_was_given_stays() -> None:
    events = log()
    events.emit(out(b"a"))
    events.emit(out(b"b"))
    assert [body["text"] for body in bodies(events)] == ["ab"]
    events.emit(out(b"c"))

    assert [(body["seq"], body["text"]) for body in bodies(events)] == [(2, "ab"), (3, "c")]


def test_a_character_cut_between_two_events_is_kept_together() -> None:
    events = log()
    for byte in "é€😀".encode():
        events.emit(out(bytes([byte])))
        bodies(events)

    assert [body["text"] for body in bodies(events)] == ["é", "€", "😀"]


def test_bytes_that_are_no_text_come_beside_it() -> None:
    events = log()
    events.emit(out(b"a\xff"))
    events.emit(err(b"\xe2\x82"))
    events.finish()

    found = bodies(events)

    assert found[0] == {
        "seq": 2,
        "type": "stdout",
        "text": "a\ufffd",
        "data_base64": "Yf8=",
    }
    assert (found[1]["text"], found[1]["data_base64"]) == ("\ufffd", "4oI=")


@pytest.mark.parametrize("data", [b"", b"a", b"\x80\x80\x80\x80", b"\xff", b"\xc0", b"\xf8a"])
def test_what_begins_no_character_is_not_waited_for(data: bytes) -> None:
    assert whole_characters(data) == (data, b"")


def test_a_flood_of_single_bytes_that_nobody_reads_stays_few_events() -> None:
    events = log()
    for _ in range(20_000):
        events.emit(out(b"o"))
        events.emit(err(b"e"))

    found = bodies(events)

    assert len(found) <= MOST_UNREAD + 2
    texts = {
        stream: "".join(body["text"] for body in found if body["type"] == stream)
        for stream in ("stdout", "stderr")
    }
    assert texts == {"stdout": "o" * 20_000, "stderr": "e" * 20_000}
    assert events.order() is None


def test_a_flood_that_is_read_keeps_what_came_last() -> None:
    events = log()
    for _ in range(2 * MOST_KEPT):
        events.emit(out(b"o"))
        events.read(events._next - 2, MUCH)

    found = bodies(events, 0)

    assert MOST_KEPT <= len(found) <= 2 * MOST_KEPT
    assert found[-1]["seq"] == 2 * MOST_KEPT + 1
    assert [body["seq"] for body in found] == list(range(found[0]["seq"], found[-1]["seq"] + 1))


def test_no_more_than_the_limits_is_taken() -> None:
    events = log(output_bytes=10, rich_output_count=2)
    for _ in range(5):
        events.emit(out(b"1234"))
        events.emit(Event("output", output={"text/plain": "x"}))

    assert "".join(body.get("text", "") for body in bodies(events)) == "1234123412"
    assert [body["type"] for body in bodies(events)].count("output") == 2


def test_attempts_to_reach_hosts_are_events_as_many_as_a_record_lists() -> None:
    events = log()
    attempt = {"at": 1.5, "host": "pypi.org", "port": 443, "outcome": "allowed", "more": "x"}
    for _ in range(MOST_LISTED + 10):
        events.emit(Event("network", attempt=attempt))

    found = bodies(events)

    assert len(found) == MOST_LISTED
    assert found[0]["type"] == "network"
    assert found[0]["attempt"]["host"] == "pypi.org"
    assert found[0]["attempt"]["at"] == "1970-01-01T00:00:01.500000+00:00"
    assert "more" not in found[0]["attempt"]


@pytest.mark.parametrize(
    "claim",
    [
        Event("network"),
        Event("network", attempt=cast("Any", [1])),
        Event("network", attempt={"host": "a", "port": "443", "outcome": "allowed", "at": 1}),
        None,
        b"bytes",
        Event(cast("Any", "done"), b"x"),
        Event(cast("Any", ["stdout"]), b"x"),
        Event("stdout", cast("Any", "text")),
        Event("output"),
        Event("output", output={}),
        Event("output", output=cast("Any", [1])),
        Event("output", output={"a": {1}}),
        Event("output", output=cast("Any", {1: "x"})),
    ],
)
def test_what_is_no_event_is_left_out_and_raises_nothing(claim: Any) -> None:
    events = log()
    events.emit(claim)
    assert bodies(events) == []


def test_a_provider_that_tells_with_its_answer_is_told_of_at_the_end() -> None:
    events = log()
    events.emit(out(b"told, "))
    events.emit(Event("output", output={"text/plain": "1"}))
    result = ExecutionResult(
        "told, and more", "never told", 0, 0.1, outputs=[{"text/plain": "1"}, {"text/plain": "2"}]
    )

    events.put_out(result)
    events.finish()

    found = bodies(events)
    assert "".join(body["text"] for body in found if body["type"] == "stdout") == "told, and more"
    assert [body["text"] for body in found if body["type"] == "stderr"] == ["never told"]
    outputs = [body["data"]["text/plain"] for body in found if body["type"] == "output"]
    assert outputs == ["1", "2"]


def test_who_waits_is_told_of_the_next_one_and_of_the_end() -> None:
    events = log()
    assert events.next_change(0).done()
    waiting, other = events.next_change(1), events.next_change(1)
    other.cancel()
    assert not waiting.done()
    events.emit(out(b"x"))
    assert waiting.done()

    last = events.next_change(2)
    assert events.read(2, MUCH) == ([], False)
    events.finish()
    assert last.done()
    assert events.read(2, MUCH) == ([], True)
    events.emit(out(b"late"))
    assert bodies(events, 2) == []


@pytest.mark.parametrize("after", [-1, 10**15])
def test_a_number_that_no_event_has_is_no_harm(after: int) -> None:
    events = log()
    events.emit(out(b"x"))
    events.finish()
    found, is_all = events.read(after, MUCH)
    assert is_all
    assert len(found) in (0, 2)
