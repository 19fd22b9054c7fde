"""A run does not wait for whoever reads its output, and what waits for a reader is bounded."""

from __future__ import annotations

import asyncio

from providers.runtime.pool.protocol import Frame
from providers.runtime.service.relay import MOST_WAITING, Outbox


def taken(outbox: Outbox) -> list[tuple[object, dict[str, bytes]]]:
    async def take() -> list[tuple[object, dict[str, bytes]]]:
        outbox.close()
        return [(header["event"], parts) async for header, parts in outbox.frames()]

    return asyncio.run(take())


def event(kind: str, data: bytes) -> Frame:
    return {"event": kind, "id": 1, "seq": 0}, {"data": data}


def test_events_come_out_as_they_went_in() -> None:
    outbox = Outbox()
    outbox.put(event("stdout", b"1"))
    outbox.put(event("stderr", b"2"))
    outbox.put(({"event": "output", "id": 1, "seq": 2}, {"text/plain": b"3"}))
    assert taken(outbox) == [
        ("stdout", {"data": b"1"}),
        ("stderr", {"data": b"2"}),
        ("output", {"text/plain": b"3"}),
    ]


def test_beyond_the_bound_pieces_are_put_together_and_none_is_lost() -> None:
    outbox = Outbox()
    for number in range(10 * MOST_WAITING):
        outbox.put(event("stdout" if number % 2 else "stderr", b"x"))
    frames = taken(outbox)
    assert len(frames) == MOST_WAITING
    for kind in ("stdout", "stderr"):
        assert sum(len(parts["data"]) for told, parts in frames if told == kind) == 5 * MOST_WAITING


def test_an_output_among_them_is_not_put_together_with_anything() -> None:
    outbox = Outbox()
    for _ in range(2 * MOST_WAITING):
        outbox.put(event("stdout", b"x"))
    outbox.put(({"event": "output"}, {"text/plain": b"3"}))
    outbox.put(event("stderr", b"y"))
    frames = taken(outbox)
    assert frames[-2:] == [("output", {"text/plain": b"3"}), ("stderr", {"data": b"y"})]
