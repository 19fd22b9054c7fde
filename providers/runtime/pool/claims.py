"""Text, JSON and rich outputs (MIME bundles) as a guest claims them, made safe to keep."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from typing import Any

from providers.json_values import check
from providers.runtime.guest.names import Omissions, too_large, too_many
from providers.runtime.guest.wire import EXCEPTION_BYTES
from providers.values import RunLimits, exception_of

# Turns of stdout and stderr that a guest may tell of.
MOST_PIECES = 4096


def readable(output: bytes) -> str:
    """Text that every database can hold: invalid UTF-8 and NUL become U+FFFD."""
    return output.decode("utf-8", "replace").replace("\0", "\ufffd")


def parse_json(text: bytes) -> Any:
    """The value. Raises ValueError or RecursionError for what is not strictly JSON."""
    value = json.loads(text.decode())
    # Writing it again refuses what the parser let through: NaN, 1e999 and lone surrogates.
    json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    return value


def exit_code(claimed: object) -> int | None:
    """As processes have them, None for what is none."""
    return claimed if type(claimed) is int and 0 <= claimed <= 255 else None


def measured(claimed: object) -> int | float | None:
    """A figure that can be one, None for what cannot."""
    if type(claimed) in (int, float) and 0 <= claimed < 2**53:  # type: ignore[operator]
        return claimed  # type: ignore[return-value]
    return None


def remarks(claimed: object) -> list[list[int | str]] | None:
    """The [line, name, what it does] of an analysis, as far as they are that; None without one."""
    if not isinstance(claimed, list):
        return None
    return [
        [entry[0], entry[1][:100], entry[2][:100]]
        for entry in claimed[:50]
        if isinstance(entry, list)
        and len(entry) == 3
        and type(entry[0]) is int
        and 0 < entry[0] < 2**31
        and all(isinstance(text, str) and text.isprintable() for text in entry[1:])
    ]


def order(header: Mapping[str, object]) -> list[list[int]] | None:
    """The [1 or 2, bytes] of which stream came when; None for what is none, or not all."""
    claimed = header.get("order")
    if header.get("order_cut") is True or not isinstance(claimed, list):
        return None
    if len(claimed) > MOST_PIECES:
        return None
    is_order = all(
        isinstance(piece, list)
        and len(piece) == 2
        and type(piece[0]) is int
        and type(piece[1]) is int
        and piece[0] in (1, 2)
        and piece[1] > 0
        for piece in claimed
    )
    return claimed if is_order else None


def exception(claimed: bytes | None) -> dict[str, str] | None:
    """The type, message and traceback of what ended a program; None for what is not that."""
    if not claimed or len(claimed) > EXCEPTION_BYTES:
        return None
    try:
        told = parse_json(claimed)
    except (ValueError, RecursionError):
        return None
    return exception_of(told)


# Of those that are read at once: to read so many takes a tenth of a second, in which all wait.
MOST_VALUES = 500_000
# Part names are "output:<number>:<MIME type>".
_PART = re.compile(
    r"output:(\d{1,4}):([a-z]{1,20}/[a-z0-9][a-z0-9.+_-]{0,79}(?:; ?[a-z]+=[a-z0-9]+)?)"
)


def read_outputs(
    parts: Mapping[str, bytes], limits: RunLimits, skipped: Omissions | None = None
) -> list[dict[str, Any]]:
    """The claimed outputs that are well formed and within the limits, in their order. What is JSON
    has MOST_VALUES together; a part with more is left out. `skipped` is told what is left out."""
    bundles: dict[int, dict[str, Any]] = {}
    room, values = limits.rich_output_bytes, MOST_VALUES
    noted = Omissions() if skipped is None else skipped
    for part, content in parts.items():
        if not part.startswith("output:"):
            continue
        match = _PART.fullmatch(part)
        if match is None:
            noted.add(part, "its name is not a MIME type")
            continue
        number, mime = int(match[1]), match[2]
        name = f"output {number + 1}: {mime}"
        if len(content) > room:
            noted.add(name, too_large(limits.rich_output_bytes, "outputs"))
            continue
        if number not in bundles and len(bundles) >= limits.rich_output_count:
            noted.add(name, too_many(limits.rich_output_count, "outputs"))
            continue
        try:
            if _is_json(mime):
                # Before any is made.
                values -= check(content, values, len(content))
            data = _decode(mime, content)
        except (ValueError, RecursionError) as error:
            noted.add(name, f"it cannot be read: {error}")
            continue
        room -= len(content)
        bundles.setdefault(number, {})[mime] = data
    return [bundles[number] for number in sorted(bundles)]


def _is_json(mime: str) -> bool:
    kind = mime.partition(";")[0]
    return kind == "application/json" or kind.endswith("+json")


def _decode(mime: str, content: bytes) -> Any:
    if _is_json(mime):
        return parse_json(content)
    kind = mime.partition(";")[0]
    if kind.startswith("text/") or kind.endswith(("+xml", "/xml", "/javascript")):
        return readable(content)
    return base64.b64encode(content).decode()
