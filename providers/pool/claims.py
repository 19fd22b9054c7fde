"""Text and JSON as a guest claims them, made safe to keep."""

from __future__ import annotations

import json
from typing import Any


def readable(output: bytes) -> str:
    """Text that every database can hold: invalid UTF-8 and NUL become U+FFFD."""
    return output.decode("utf-8", "replace").replace("\0", "\ufffd")


def parse_json(text: bytes) -> Any:
    """The value. Raises ValueError or RecursionError for what is not strictly JSON."""

    def refuse(constant: str) -> Any:
        raise ValueError(f"{constant} is not JSON")

    value = json.loads(text, parse_constant=refuse)
    if b"\\u" in text:
        json.dumps(value, ensure_ascii=False).encode()  # a lone surrogate raises a ValueError
    return value
