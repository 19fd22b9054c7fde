"""The events of a run."""

from __future__ import annotations

import base64
import json
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cofferdam.decoding import decode
from cofferdam.errors import UnexpectedAnswer
from cofferdam.shapes import Execution

OPEN = frozenset({"queued", "running"})


@dataclass(frozen=True)
class Event:
    """One event of a run.

    `type` is started, stdout, stderr, output or done. A type that this client does not know is
    passed on unchanged. stdout and stderr have `text`; output has `data`, by MIME type; done has
    `execution`.
    """

    seq: int
    type: str
    text: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)
    execution: Execution | None = None
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def content(self) -> bytes:
        """The bytes that the run wrote."""
        encoded = self.raw.get("data_base64")
        return base64.b64decode(encoded) if encoded else self.text.encode()


def event_of(line: bytes) -> Event:
    """Decode a line of the stream. Raises UnexpectedAnswer."""
    try:
        said = json.loads(line)
        seq, kind = int(said["seq"]), str(said["type"])
    except (ValueError, KeyError, TypeError):
        raise UnexpectedAnswer("A line of the stream is not an event.") from None
    execution = decode(Execution, said.get("execution")) if kind == "done" else None
    data = said.get("data")
    return Event(
        seq,
        kind,
        str(said.get("text", "")),
        data if isinstance(data, dict) else {},
        execution,
        said,
    )


class Lines:
    """Join pieces into lines. Only a line feed ends a line: JSON may contain every other character
    that can end a line."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._whole: deque[bytes] = deque()

    def feed(self, piece: bytes) -> None:
        first, *rest = piece.split(b"\n")
        self._pieces.append(first)
        for each in rest:
            self._whole.append(b"".join(self._pieces))
            self._pieces = [each]

    def take(self) -> bytes | None:
        """The next line that is not empty."""
        while self._whole:
            if line := self._whole.popleft().strip():
                return line
        return None
