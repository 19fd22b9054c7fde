"""The rich outputs of an execution, made fit to be looked at.

They come from the program. Only a raster image is drawn, and only if its bytes are one; all else
is shown as the text it is, HTML and SVG included.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from executions.kernel.text import from_json, to_json
from executions.models.execution import Execution

IMAGE_SIGNATURES = {
    "image/png": (b"\x89PNG\r\n\x1a\n",),
    "image/jpeg": (b"\xff\xd8\xff",),
    "image/gif": (b"GIF87a", b"GIF89a"),
    "image/webp": (b"RIFF",),
}
SIGNATURE_BYTES = 16
# Of all outputs of an execution: to read so many takes a tenth of a second.
MOST_VALUES = 500_000
# The best to read, where a bundle offers several.
_TEXTS = ("text/plain", "application/json", "text/markdown", "text/html", "image/svg+xml")


@dataclass(frozen=True)
class RichOutput:
    """One value that was shown. `image` are bytes that a browser may draw as `mime_type`."""

    mime_type: str
    text: str = ""
    image: bytes = b""


def rich_outputs(execution: Execution) -> list[RichOutput]:
    """What the program showed, in its order, as `bundles_of` has it."""
    return [_best(bundle) for bundle in bundles_of(execution)]


def bundles_of(execution: Execution) -> list[dict[str, Any]]:
    """What the program showed, in its order; nothing where it was erased, there was none, or it has
    too many values to be read where others wait for it. The record has it all the same."""
    if not execution.outputs or values_in(execution.outputs) > MOST_VALUES:
        return []
    found: list[dict[str, Any]] = from_json(execution.outputs)
    return found


def values_in(text: str) -> int:
    """How many values a JSON text has at most: what it costs to read it."""
    return text.count(",") + text.count("[") + text.count("{")


def image_type(start: bytes) -> str:
    """What kind of raster image begins so; "" when it is none. SVG is a document with scripts."""
    for mime_type, signatures in IMAGE_SIGNATURES.items():
        if start.startswith(signatures) and (start[:4] != b"RIFF" or start[8:12] == b"WEBP"):
            return mime_type
    return ""


def _best(bundle: Mapping[str, Any]) -> RichOutput:
    for mime_type in IMAGE_SIGNATURES:
        image = _decoded(bundle.get(mime_type))
        if found := image_type(image[:SIGNATURE_BYTES]):
            return RichOutput(found, image=image)
    mime_type = next((name for name in _TEXTS if name in bundle), next(iter(bundle), ""))
    value = bundle.get(mime_type, "")
    return RichOutput(mime_type, text=value if isinstance(value, str) else to_json(value))


def _decoded(value: Any) -> bytes:
    try:
        return base64.b64decode(value, validate=True) if isinstance(value, str) else b""
    except (binascii.Error, ValueError):
        return b""
