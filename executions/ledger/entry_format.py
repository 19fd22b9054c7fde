"""How an entry is written and signed: RFC 8785, the number of its format, and what it binds."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from json.encoder import encode_basestring
from typing import Any
from uuid import UUID

from django.db.models.fields.files import FieldFile

from executions.kernel.text import without_surrogates

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


FORMAT = 1
# Characters of a subject that its column has.
_MOST_SUBJECT = 200

# What is signed starts with it, so that nothing else a key signs can pass for an entry.
DOMAIN = b"cofferdam-ledger-1\n"


def parse(statement: str) -> dict[str, Any] | None:
    """What a statement states; None when it is not written as the format it names has it."""
    try:
        stated = json.loads(statement)
        if not isinstance(stated, dict) or write(stated) != statement:
            return None
    except (ValueError, TypeError, RecursionError):
        return None
    sequence = stated.get("sequence")
    return stated if isinstance(sequence, int) and not isinstance(sequence, bool) else None


def bound_row_of(stated: Mapping[str, Any]) -> str | None:
    """What the column `bound_row` of this entry holds; None for an entry of an execution."""
    if stated["kind"] == "execution":
        return None
    return row_name(stated["model"], stated["row"]) if "row_hash" in stated else ""


def subject_of(stated: Mapping[str, Any]) -> str:
    """What the column `subject` of this entry holds. Of an execution it is the tenant: its id has
    a column of its own."""
    return column_of(stated["tenant" if stated["kind"] == "execution" else "subject"])


def column_of(subject: str) -> str:
    """A subject as the column `subject` has it."""
    return subject[:_MOST_SUBJECT]


def row_name(model: str, row: str) -> str:
    """A row as the column `bound_row` has it."""
    return f"{model} {row}"


def write(stated: Mapping[str, Any]) -> str:
    """The statement's text. Raises ValueError for a format that this version does not know."""
    if stated.get("ledger") != FORMAT:
        raise ValueError(f"format {stated.get('ledger')!r} is not known here")
    return canonical(stated)


def signed_bytes(stated: Mapping[str, Any], statement: str) -> bytes:
    """What the signature of this entry is over."""
    return place_bytes(stated["sequence"], digest(statement))


def place_bytes(sequence: int, statement_digest: str) -> bytes:
    """What is signed of an entry."""
    return DOMAIN + f"{sequence}\n{statement_digest}".encode()


def line_bytes(line: Mapping[str, Any]) -> bytes:
    """What is signed of a line of the checkpoints, its signature left out."""
    return DOMAIN + b"checkpoint\n" + canonical(line).encode()


@dataclass(frozen=True)
class Schema:
    """How an execution is sealed.

    `record`: the columns that neither change after its end nor are ever erased; one hash is over
    all of them and over the times of its artifacts. `stated`: the columns that the entry, and so
    the receipt, also says in clear.
    """

    record: tuple[str, ...]
    stated: tuple[str, ...]


SCHEMAS: Mapping[int, Schema] = {
    1: Schema(
        record=(
            *("tenant_slug", "api_key_name", "api_key_prefix", "subject", "request_id"),
            *("client_address", "idempotency_key", "request_hash", "language", "entrypoint"),
            *("mode", "code_hash", "input_files", "timeout", "deadline", "status", "provider"),
            *("config_version", "runtime", "isolation", "sharing", "has_result"),
            *("stdout_truncated", "stderr_truncated", "exit_code", "artifact_count"),
            *("error_code", "error_message", "error_field", "retryable", "meta", "hops", "cost"),
            *("queue_ms", "start_ms", "run_ms", "total_ms"),
            *("created_at", "started_at", "finished_at"),
            *("session_id", "turn", "context", "context_kept", "pid", "background"),
            "output_order",
            # By the caller's word; on whose behalf it ran is a body, of which there is a hash.
            *("agent", "model", "conversation", "traceparent", "trace_id", "priority"),
            *("run_at", "schedule_id"),
        ),
        stated=(
            *("language", "status", "exit_code", "config_version", "has_result"),
            *("stdout_truncated", "stderr_truncated", "turn", "context_kept", "pid"),
            *("agent", "model", "conversation", "traceparent", "run_at"),
        ),
    ),
}
CURRENT = 1


def schema_of(stated: Mapping[str, Any]) -> Schema | None:
    """The schema an entry was sealed with; None for one that a later version brought."""
    return SCHEMAS.get(stated["schema"])


def to_canonical(value: Any) -> Any:
    """A column's value as JSON that has a canonical form, and one only."""
    if value is None or isinstance(value, (bool, float)):
        return value
    if isinstance(value, str):
        return value if value.isascii() else without_surrogates(value)
    if isinstance(value, int):
        if -EXACT <= value <= EXACT:
            return value
        # Some databases return 1e22 as an integer; others come from what a provider says of itself.
        return float(value) if is_double(value) else str(value)
    if isinstance(value, datetime):
        return moment(value)
    if isinstance(value, Decimal):
        return format(value, "f")
    if isinstance(value, Mapping):
        return {without_surrogates(str(name)): to_canonical(child) for name, child in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_canonical(child) for child in value]
    return str(value) if isinstance(value, (UUID, date, FieldFile)) else value
