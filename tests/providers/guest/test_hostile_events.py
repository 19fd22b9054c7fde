"""What a guest tells of its run while it runs is a claim: a wrong one ends it, and none is trusted."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from executions.runs.results import validate_result
from providers.runtime.guest import wire
from providers.runtime.pool.sandbox import Sandbox
from providers.values import SANDBOX_ENDED, Event, ExecutionResult, RunLimits
from tests.support.puppets import REQUEST, PuppetGuest, answer, numbered, play

__all__ = ("numbered",)


def event(seq: int, kind: str = "stdout", data: bytes = b"x", number: int = 1) -> bytes:
    parts = [("data", data)]
    return wire.pack({"id": number, "seq": seq, "event": kind}, parts)


def shown(seq: int, **parts: bytes) -> bytes:
    header: dict[str, object] = {"id": 1, "seq": seq, "event": "output"}
    return wire.pack(header, [(f"text/{name}", content) for name, content in parts.items()])


def told(*frames: bytes, listens: bool = True) -> tuple[ExecutionResult, list[Event]]:
    """What comes of a run whose guest says this, and what was told of it meanwhile."""
    events: list[Event] = []

    async def script(sandbox: Sandbox, guest: PuppetGuest) -> ExecutionResult:
        run = asyncio.create_task(sandbox.run(REQUEST, events.append if listens else None))
        await asyncio.sleep(0.02)
        guest.say(b"".join(frames))
        return await run

    return play(script), events


def test_events_of_the_run_are_handed_on_as_they_came() -> None:
    result, events = told(
        event(0), event(1, "stderr"), shown(2, plain=b"1"), answer(parts=[("stdout", b"x")])
    )

    assert [(each.type, each.data) for each in events[:2]] == [("stdout", b"x"), ("stderr", b"x")]
    assert events[2].output == {"text/plain": "1"}
    assert (result.stdout, len(events)) == ("x", 3)


def test_a_guest_that_tells_nothing_meanwhile_tells_with_its_answer() -> None:
    _, events = told(answer(parts=[("stdout", b"late")]))
    assert [(each.type, each.data) for each in events] == [("stdout", b"late")]


LIMITS = REQUEST.limits
FORGED = {
    "another run's": [event(0, number=2)],
    "a number twice": [event(0), event(0)],
    "a number left out": [event(1)],
    "no kind": [event(0, "done")],
    "nothing": [event(0, data=b"")],
    "too long": [event(0, data=b"x" * (64 * 1024 + 1))],
    "more than may be": [
        event(seq, data=b"x" * 60_000) for seq in range(LIMITS.output_bytes // 60_000 + 2)
    ],
    "too many outputs": [shown(seq, plain=b"1") for seq in range(LIMITS.rich_output_count + 1)],
}


@pytest.mark.parametrize("frames", FORGED.values(), ids=FORGED)
def test_a_forged_event_ends_the_run_with_what_was_told_before(frames: list[bytes]) -> None:
    result, events = told(*frames, answer(parts=[("stdout", b"as if nothing had been")]))

    assert "broke the protocol" in result.metadata[SANDBOX_ENDED]
    printed = b"".join(each.data for each in events if each.type == "stdout").decode()
    assert result.stdout == printed
    assert len(printed) <= LIMITS.output_bytes


def test_events_that_nobody_asked_for_end_the_run() -> None:
    result, _ = told(event(0), listens=False)
    assert SANDBOX_ENDED in result.metadata


@pytest.mark.parametrize(
    ("order", "kept"),
    [
        ([[1, 2], [2, 1], [1, 1]], True),
        ([[1, 3], [2, 2]], False),
        ([[1, 4], [2, 1], [1, -1]], False),
        ([[1, 3], [3, 1]], False),
        ([[1, 3, 0], [2, 1]], False),
        ([[True, 3], [2, 1]], False),
        ([[1, 3.0], [2, 1]], False),
        ("12", False),
        ([[1, 1]] * 10_000, False),
    ],
)
def test_an_order_is_kept_where_it_adds_up(order: Any, kept: bool) -> None:
    result = ExecutionResult("abc", "d", 0, 0.1, output_order=order)
    assert validate_result(result, RunLimits()).result.output_order == (order if kept else None)
