"""Messages of Connect as they are sent: five bytes of flags and length, then JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from executions.api.e2b.errors import Refused, invalid, unimplemented
from providers.json_reading import read_text
from providers.json_values import TooMuch
from providers.slices import json_text

STREAM_TYPE = "application/connect+json"
_COMPRESSED, _END = 1, 2
_HEAD = 5
MOST_MESSAGES = 10_000


def message(body: Mapping[str, Any], flags: int = 0) -> bytes:
    content = json_text(body).encode(errors="replace")
    return bytes([flags]) + len(content).to_bytes(4, "big") + content


def end(error: Mapping[str, str] | None = None) -> bytes:
    """What a stream ends with."""
    return message({} if error is None else {"error": error}, _END)


def messages_in(body: bytes) -> Iterator[dict[str, Any]]:
    """The messages of a whole body. Raises Refused for one that is cut off, or is no object."""
    # By where each begins: a body of empty ones is not copied for every one of them.
    at = number = 0
    while at < len(body):
        number += 1
        if number > MOST_MESSAGES:
            raise _too_much(f"Must be at most {MOST_MESSAGES} messages")
        begin = at + _HEAD
        flags, length = body[at], int.from_bytes(body[at + 1 : begin], "big")
        if len(body) < begin + length:
            raise invalid("A message is shorter than its envelope says.")
        at = begin + length
        if flags & _COMPRESSED:
            raise unimplemented("Compression of messages")
        if not flags & _END:
            yield object_in(body[begin:at])


def object_in(content: bytes) -> dict[str, Any]:
    """Raises Refused for what is no object of JSON."""
    try:
        body = read_text(content).value
    except TooMuch as error:
        raise _too_much(str(error)) from None
    except ValueError as error:
        raise invalid(f"Must be JSON: {error}.") from None
    if not isinstance(body, dict):
        raise invalid("Must be a JSON object.")
    return body


def _too_much(why: str) -> Refused:
    return Refused(413, "resource_exhausted", f"{why}.")
