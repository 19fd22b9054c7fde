"""One text for one value, so that a signature over the text is one over the value."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from datetime import UTC, datetime
from json.encoder import encode_basestring
from typing import Any

# The integers that a double holds exactly, all of them (RFC 8785, appendix D).
EXACT = 2**53

_ENCODER_1 = json.JSONEncoder(
    sort_keys=True, ensure_ascii=True, allow_nan=False, separators=(",", ":")
)


def canonical(value: Any) -> str:
    """JSON as RFC 8785 has it. Raises ValueError for what that cannot hold.

    That is what is no JSON, an integer that no double is, and half a surrogate pair.
    """
    text = _text(value)
    if not text.isascii():
        text.encode()
    return text


def canonical_1(value: Any) -> str:
    """JSON as the first format of entries has it: ASCII, keys sorted by code point, 2.0 as 2."""
    return _ENCODER_1.encode(_plain_1(value))


def digest(statement: str) -> str:
    """What the next entry names this one by: SHA-256 in hexadecimal."""
    return hashlib.sha256(statement.encode()).hexdigest()


def text_hash(text: str) -> str:
    return "sha256:" + digest(text)


def moment(at: datetime | None) -> str | None:
    """UTC with microseconds, always of one length."""
    return None if at is None else at.astimezone(UTC).isoformat(timespec="microseconds")


def is_double(value: int) -> bool:
    """Whether a double holds exactly this integer."""
    try:
        return float(value) == value
    except OverflowError:
        return False


def _text(value: Any) -> str:
    if isinstance(value, str):
        return encode_basestring(value)
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return _integer(value)
    if isinstance(value, float):
        return _number(value)
    if isinstance(value, Mapping):
        return "{" + ",".join([f"{_key(key)}:{_text(value[key])}" for key in _sorted(value)]) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join([_text(child) for child in value]) + "]"
    raise ValueError(f"{type(value).__name__} is not JSON")


def _key(key: Any) -> str:
    if not isinstance(key, str):
        raise ValueError(f"{key!r} is no name")
    return encode_basestring(key)


def _sorted(names: Mapping[Any, Any]) -> list[Any]:
    """By UTF-16 code units, as section 3.2.3 has it; of ASCII that is the order of characters."""
    if all(isinstance(name, str) and name.isascii() for name in names):
        return sorted(names)
    return sorted(names, key=lambda name: str(name).encode("utf-16-be", "surrogatepass"))


def _integer(value: int) -> str:
    if -EXACT <= value <= EXACT:
        return int.__repr__(value)
    if not is_double(value):
        raise ValueError("an integer that no double is has no canonical form")
    return _number(float(value))


def _number(value: float) -> str:
    """As ECMAScript writes it (Number::toString), which section 3.2.2.3 asks for."""
    if not math.isfinite(value):
        raise ValueError(f"{value} is not JSON")
    if value == 0:
        return "0"
    text = float.__repr__(value)
    if "e" not in text:
        return text.removesuffix(".0")
    sign = "-" if value < 0 else ""
    mantissa, _, power = text.lstrip("-").partition("e")
    whole, _, fraction = mantissa.partition(".")
    digits = (whole + fraction).rstrip("0")
    # How many digits stand before the point.
    point = int(power) + 1
    if len(digits) <= point <= 21:
        return sign + digits.ljust(point, "0")
    if 0 < point <= 21:
        return f"{sign}{digits[:point]}.{digits[point:]}"
    if -6 < point <= 0:
        return f"{sign}0.{'0' * -point}{digits}"
    tail = f".{digits[1:]}" if len(digits) > 1 else ""
    return f"{sign}{digits[0]}{tail}e{'+' if point > 0 else '-'}{abs(point - 1)}"


def _plain_1(value: Any) -> Any:
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
        return {key: _plain_1(child) for key, child in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain_1(child) for child in value]
    raise ValueError(f"{type(value).__name__} is not JSON")
