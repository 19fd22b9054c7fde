"""Reads the rich outputs of an answer: MIME bundles as the API shows them."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from typing import Any

from providers.json_values import check
from providers.runtime.guest.names import Omissions, too_large, too_many
from providers.runtime.pool.claims import parse_json, readable
from providers.values import RunLimits

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
