"""One text for one value, so that a signature over the text is one over the value."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

# What is signed starts with it, so that nothing else this key signs can pass for an entry.
DOMAIN = b"cofferdam-ledger-1\n"

_ENCODER = json.JSONEncoder(
    sort_keys=True, ensure_ascii=True, allow_nan=False, separators=(",", ":")
)


def canonical(value: Any) -> str:
    """JSON in ASCII with sorted keys and no spaces. Raises ValueError for what is not plain JSON.

    A number without a fraction is written as an integer, because databases return 2.0 as 2.
    """
    return _ENCODER.encode(_plain(value))


def digest(statement: str) -> str:
    """What the next entry names this one by: SHA-256 in hexadecimal."""
    return hashlib.sha256(statement.encode()).hexdigest()


def text_hash(text: str) -> str:
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def moment(at: datetime | None) -> str | None:
    """UTC with microseconds, always of one length."""
    return None if at is None else at.astimezone(UTC).isoformat(timespec="microseconds")


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (str, bool)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{value} is not JSON")
        return int(value) if value.is_integer() else value
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ValueError(f"{key!r} is no name")
        return {key: _plain(child) for key, child in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(child) for child in value]
    raise ValueError(f"{type(value).__name__} is not JSON")
