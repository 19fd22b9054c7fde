"""Calls of tools, answered from outside of the sandbox."""

from __future__ import annotations

import json
from typing import Any

from tests.support.kept_guest import Cell, KeptGuest

Call = tuple[int, str, Any]


def begun(kept: KeptGuest, code: str, *names: str, **fields: Any) -> int:
    return kept.begin_run(code, tools=list(names or ("search",)), **fields)


def calls(kept: KeptGuest, number: int) -> list[Call]:
    found = [parts for header, parts in kept.events(number) if header["event"] == "call"]
    return [
        (int(each["call"]), each["name"].decode(), json.loads(each["arguments"])) for each in found
    ]


def until_called(kept: KeptGuest, number: int, count: int = 1) -> list[Call]:
    kept.read_until(lambda: len(calls(kept, number)) >= count or kept.is_over(number))
    return calls(kept, number)


def answer(kept: KeptGuest, number: int, call: int, **said: Any) -> None:
    body = json.dumps(said, separators=(",", ":")).encode()
    kept.send({"op": "data", "target": number}, (f"answer:{call}", body))


def answered(kept: KeptGuest, number: int, **said: Any) -> Cell:
    """Answer each call in the same way until the run ends."""
    told = 0
    while not kept.is_over(number):
        for call, _, _ in until_called(kept, number, told + 1)[told:]:
            answer(kept, number, call, **said)
            told += 1
    return kept.wait(number)
