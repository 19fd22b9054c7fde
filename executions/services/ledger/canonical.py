"""One text for one value, so that a signature over the text is one over the value."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from json.encoder import encode_basestring
from typing import Any

# The integers that a double holds exactly, all of them (RFC 8785, appendix D).
EXACT = 2**53


def canonical(value: Any) -> str:
    """JSON as RFC 8785 has it. Raises ValueError for what that cannot hold.

    That is what is no JSON, an integer that no double is, and half a surrogate pair.
    """
    text = _text(value)
    if not text.isascii():
        text.encode()
    return text


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
    # Some hundred times within every execution: the type itself is asked for first.
    write = _WRITERS.get(type(value))
    if write is not None:
        return write(value)
    for kind in (str, int, float, Mapping, list, tuple):
        if isinstance(value, kind):
            return _WRITERS[kind](value)
    raise ValueError(f"{type(value).__name__} is not JSON")


def _object(value: Mapping[Any, Any]) -> str:
    members = [f"{encode_basestring(name)}:{_text(value[name])}" for name in _sorted(value)]
    return "{" + ",".join(members) + "}"


def _array(value: Iterable[Any]) -> str:
    return "[" + ",".join([_text(child) for child in value]) + "]"


def _sorted(names: Mapping[Any, Any]) -> list[str]:
    """By UTF-16 code units, as section 3.2.3 has it; of ASCII that is the order of characters."""
    for name in names:
        if not isinstance(name, str):
            raise ValueError(f"{name!r} is no name")
    if all(map(str.isascii, names)):
        return sorted(names)
    return sorted(names, key=lambda name: name.encode("utf-16-be", "surrogatepass"))


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


_WRITERS: dict[type[Any], Callable[[Any], str]] = {
    str: encode_basestring,
    type(None): lambda _: "null",
    bool: lambda value: "true" if value else "false",
    int: _integer,
    float: _number,
    dict: _object,
    Mapping: _object,
    list: _array,
    tuple: _array,
}
