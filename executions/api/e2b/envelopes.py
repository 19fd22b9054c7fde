"""Messages of Connect as they are sent: five bytes of flags and length, then JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from executions.api.e2b.errors import invalid, unimplemented
from executions.text import from_json

STREAM_TYPE = "application/connect+json"
_COMPRESSED, _END = 1, 2
_HEAD = 5


def message(body: Mapping[str, Any], flags: int = 0) -> bytes:
    content = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode(errors="replace")
    return bytes([flags]) + len(content).to_bytes(4, "big") + content


def end(error: Mapping[str, str] | None = None) -> bytes:
    """What a stream ends with."""
    return message({} if error is None else {"error": error}, _END)


def messages_in(body: bytes) -> list[dict[str, Any]]:
    """All messages of a whole body. Raises Refused for one that is cut off, or is no object."""
    found = []
    while body:
        length = int.from_bytes(body[1:_HEAD], "big")
        if len(body) < _HEAD or len(body) < _HEAD + length:
            raise invalid("A message is shorter than its envelope says.")
        flags, content, body = body[0], body[_HEAD : _HEAD + length], body[_HEAD + length :]
        if flags & _COMPRESSED:
            raise unimplemented("Compression of messages")
        if not flags & _END:
            found.append(object_in(content))
    return found


def object_in(content: bytes) -> dict[str, Any]:
    """Raises Refused for what is no object of JSON."""
    try:
        body = from_json(content)
    except ValueError as error:
        raise invalid(f"Must be JSON: {error}.") from None
    if not isinstance(body, dict):
        raise invalid("Must be a JSON object.")
    return body
