"""Reads the rich outputs of an answer: MIME bundles as the API shows them."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from typing import Any

from providers.pool.claims import parse_json, readable
from providers.values import RunLimits

# Part names are "output:<number>:<MIME type>".
_PART = re.compile(
    r"output:(\d{1,4}):([a-z]{1,20}/[a-z0-9][a-z0-9.+_-]{0,79}(?:; ?[a-z]+=[a-z0-9]+)?)"
)


def read_outputs(parts: Mapping[str, bytes], limits: RunLimits) -> list[dict[str, Any]]:
    """The claimed outputs that are well formed and within the limits, in their order."""
    bundles: dict[int, dict[str, Any]] = {}
    room = limits.rich_output_bytes
    for part, content in parts.items():
        match = _PART.fullmatch(part)
        if match is None or len(content) > room:
            continue
        number, mime = int(match[1]), match[2]
        if number not in bundles and len(bundles) >= limits.rich_output_count:
            continue
        try:
            data = _decode(mime, content)
        except (ValueError, RecursionError):
            continue
        room -= len(content)
        bundles.setdefault(number, {})[mime] = data
    return [bundles[number] for number in sorted(bundles)]


def _decode(mime: str, content: bytes) -> Any:
    kind = mime.partition(";")[0]
    if kind == "application/json" or kind.endswith("+json"):
        return parse_json(content)
    if kind.startswith("text/") or kind.endswith(("+xml", "/xml", "/javascript")):
        return readable(content)
    return base64.b64encode(content).decode()
