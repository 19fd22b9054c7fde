"""Write output. Control characters of untrusted code are escaped on a terminal."""

from __future__ import annotations

import codecs
import json
import re
import sys
from collections.abc import Mapping
from typing import Any, BinaryIO, TextIO

# What moves the cursor, changes titles, fills the clipboard or turns text around.
_HARMFUL = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]"
    # A carriage return overwrites the line, except at the end of a line.
    "|\r(?!\n)"
)

_ENDS = re.compile("[\n\r\t\u2028\u2029]")


def harmless(text: str) -> str:
    """Escape every character that can control a terminal."""
    return _HARMFUL.sub(_written_out, text)


def _written_out(found: re.Match[str]) -> str:
    return f"\\x{ord(found[0]):02x}"


_UTF8 = codecs.getincrementaldecoder("utf-8")


class Out:
    """The output of a run: every byte for a pipe, escaped for a terminal unless `raw`."""

    def __init__(self, *, raw: bool = False) -> None:
        self._raw = raw
        # A character may come in two pieces.
        self._decoders = {name: _UTF8("replace") for name in ("stdout", "stderr")}
        self._is_in_line = False

    def stdout(self, content: bytes) -> None:
        self._write(sys.stdout, "stdout", content)
        self._is_in_line = not content.endswith(b"\n") if content else self._is_in_line

    def value(self, data: Mapping[str, Any]) -> None:
        """Write a value on lines of its own: its text, or else its MIME types."""
        text = data.get("text/plain")
        if not isinstance(text, str):
            text = f"<{', '.join(map(str, data))}>"
        self.stdout(f"{chr(10) if self._is_in_line else ''}{text}\n".encode())

    def stderr(self, content: bytes) -> None:
        self._write(sys.stderr, "stderr", content)

    def _write(self, stream: TextIO, name: str, content: bytes) -> None:
        target: BinaryIO | None = getattr(stream, "buffer", None)
        if target is not None and (self._raw or not stream.isatty()):
            stream.flush()
            target.write(content)
            target.flush()
        else:
            stream.write(harmless(self._decoders[name].decode(content)))
            stream.flush()


def line(text: str) -> None:
    """Write one line of the command itself. Line ends in names are escaped."""
    sys.stdout.write(_ENDS.sub(_written_out, harmless(text)) + "\n")


def problem(text: str) -> None:
    sys.stderr.write(f"cofferdam: {harmless(text)}\n")


def as_json(value: Mapping[str, Any]) -> None:
    """Write one line of JSON, in ASCII."""
    sys.stdout.write(json.dumps(value) + "\n")


def table(rows: list[tuple[str, ...]]) -> None:
    """Write rows in aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        line("  ".join(cells).rstrip())
