"""Text that every database, client and encoding can hold: identifiers, and paths of a workspace.

A path is bytes. In memory it is text in which a byte that is not UTF-8 is a surrogate, as
`os.fsdecode` has it. No database keeps such a text: there that byte, and the percent sign, are a
percent sign and two digits. So each path has one text, and each text one path.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from providers.runtime.guest import wire

MAX_DEPTH = 200

_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")
_SURROGATE = re.compile("[\ud800-\udfff]")


def storable(text: str) -> str:
    """`text` with every NUL and lone surrogate replaced by U+FFFD."""
    if text.isascii() and "\0" not in text:
        # Both are known at once, while the expression looks at every character.
        return text
    return _UNSTORABLE.sub("\ufffd", text)


def is_storable(text: str) -> bool:
    if text.isascii():
        return "\0" not in text
    return _UNSTORABLE.search(text) is None


def to_json(value: Any) -> str:
    """`value` as JSON text. Raises ValueError when it is not JSON or nested too deeply.

    Lone surrogates are kept, so that callers can tell them; NaN and infinities are refused.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except RecursionError:
        raise ValueError(f"nested more than {MAX_DEPTH} levels deep") from None
    except TypeError as error:
        raise ValueError(str(error)) from None
    if text.count("[") + text.count("{") > MAX_DEPTH and _depth(value) > MAX_DEPTH:
        raise ValueError(f"nested more than {MAX_DEPTH} levels deep")
    return text


def without_nan(value: Any) -> Any:
    """A copy of a value with null for NaN and infinities, which JSON has not.

    Raises ValueError for what is no JSON for another reason.
    """
    try:
        return from_json(wire.dumps_value(value))
    except (TypeError, RecursionError) as error:
        raise ValueError(str(error)) from None


def without_surrogates(text: str) -> str:
    """JSON text with its lone surrogates replaced. It needs no more: JSON escapes NUL."""
    return _SURROGATE.sub("\ufffd", text)


def storable_value(value: Any) -> Any:
    """A copy of what a provider says of itself, reduced to JSON that every database takes."""
    if isinstance(value, Mapping):
        return {storable(str(key)): storable_value(child) for key, child in value.items()}
    if isinstance(value, (list, tuple)):
        return [storable_value(child) for child in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, (bool, int, float)):
        return value
    return storable(str(value))


def from_json(text: str | bytes) -> Any:
    """The value of a JSON text. Raises ValueError when it is not JSON, or too deep."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError(f"nested more than {MAX_DEPTH} levels deep") from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _depth(value: Any) -> int:
    """How deeply lists and objects are nested, without recursion."""
    depth = 0
    level = [value]
    while level := [item for item in level if isinstance(item, (dict, list, tuple))]:
        depth += 1
        level = [
            child for item in level for child in (item.values() if isinstance(item, dict) else item)
        ]
    return depth


def uuid7() -> UUID:
    """A version 7 UUID (RFC 9562): 60 bits of time, to a quarter of a microsecond, then 62 random.

    The finer part of the time replaces the first random bits, so that two rows made by one
    process within a millisecond still sort in the order they were made.
    """
    milliseconds, nanoseconds = divmod(time.time_ns(), 1_000_000)
    fraction = (nanoseconds << 12) // 1_000_000
    random = int.from_bytes(os.urandom(8), "big") & ((1 << 62) - 1)
    return UUID(int=milliseconds << 80 | 7 << 76 | fraction << 64 | 2 << 62 | random)


def time_of(made: UUID) -> datetime:
    """When such an identifier was made, to the millisecond."""
    return datetime.fromtimestamp((made.int >> 80) / 1000, UTC)


def first_uuid7(at: datetime) -> UUID:
    """No identifier made at `at` or later is less than this one, to the millisecond."""
    return UUID(int=int(at.timestamp() * 1000) << 80 | 7 << 76 | 2 << 62)


MOST_PATH_BYTES, MOST_NAME_BYTES, MOST_FOLDERS = 4096, 255, 64

_ESCAPED = re.compile("[%\udc80-\udcff]")
_ESCAPE = re.compile("%([0-9A-F]{2})")


def to_text(path: str) -> str:
    """What the database keeps of a path."""
    return _ESCAPED.sub(lambda found: f"%{ord(found[0]) & 0xFF:02X}", path)


def from_text(text: str) -> str:
    """The path that `to_text` made a text of."""

    def unescaped(found: re.Match[str]) -> str:
        value = int(found[1], 16)
        return chr(0xDC00 + value) if value >= 0x80 else chr(value)

    return _ESCAPE.sub(unescaped, text)


def key_of(path: str) -> str:
    """What a path is looked up by: paths are longer than an index takes."""
    return hashlib.sha256(path.encode("utf-8", "surrogateescape")).hexdigest()


def is_path(path: object) -> bool:
    """Whether it names something in a workspace, in the one way that there is to write it."""
    if not isinstance(path, str) or not is_name(path) or len(path) > MOST_PATH_BYTES:
        return False
    parts = path.split("/")
    if len(parts) > MOST_FOLDERS or any(part in ("", ".", "..") for part in parts):
        return False
    return _size(path) <= MOST_PATH_BYTES and max(map(_size, parts)) <= MOST_NAME_BYTES


def is_name(text: str) -> bool:
    """Whether bytes of a file system can be read as this text."""
    try:
        return "\0" not in text and bool(text.encode("utf-8", "surrogateescape"))
    except UnicodeEncodeError:
        return False


def _size(text: str) -> int:
    return len(text.encode("utf-8", "surrogateescape"))
