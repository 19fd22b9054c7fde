"""Writing to whoever called: untrusted bytes to a terminal are made harmless."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from typing import Any, BinaryIO, TextIO

# What moves the cursor, changes titles, fills the clipboard or turns text around.
_HARMFUL = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]"
    # A carriage return writes over what stands there, but at the end of a line.
    "|\r(?!\n)"
)


def harmless(text: str) -> str:
    """With every character that a terminal may obey written out."""
    return _HARMFUL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


class Out:
    """Where output goes. A pipe is given every byte; a terminal what is harmless, unless `raw`."""

    def __init__(self, *, raw: bool = False) -> None:
        self._raw = raw

    def stdout(self, content: bytes) -> None:
        self._write(sys.stdout, content)

    def stderr(self, content: bytes) -> None:
        self._write(sys.stderr, content)

    def _write(self, stream: TextIO, content: bytes) -> None:
        target: BinaryIO | None = getattr(stream, "buffer", None)
        if target is not None and (self._raw or not stream.isatty()):
            stream.flush()
            target.write(content)
            target.flush()
        else:
            stream.write(harmless(content.decode(errors="replace")))
            stream.flush()


def line(text: str) -> None:
    """A line of ours, which may hold names that others chose."""
    sys.stdout.write(harmless(text) + "\n")


def problem(text: str) -> None:
    sys.stderr.write(f"cofferdam: {harmless(text)}\n")


def as_json(value: Mapping[str, Any]) -> None:
    """One line of JSON, in ASCII."""
    sys.stdout.write(json.dumps(value) + "\n")


def table(rows: list[tuple[str, ...]]) -> None:
    """Columns as wide as they need to be."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        line("  ".join(cells).rstrip())
