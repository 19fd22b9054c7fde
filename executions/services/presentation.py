"""Text that somebody hostile wrote, made fit to be looked at.

Nothing in it may act: not as HTML (the templates escape), not as a terminal's control sequence
when it is copied from the page, not as an override that shows the characters in another order
than a machine reads them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

MAX_CHARACTERS = 100_000
MAX_LINE = 2_000

# Controls without tab and line feed, and every character that is invisible or reorders others
# (Unicode Technical Report 36, sections 2.5 and 3.6; the bidi ones are those of CVE-2021-42574).
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f"
    "\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb"
    "\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)


@dataclass(frozen=True)
class Shown:
    """Text to show, and what was left out of it."""

    text: str
    cut_characters: int = 0
    cut_lines: int = 0

    @property
    def note(self) -> str:
        parts = []
        if self.cut_lines:
            parts.append(f"{self.cut_lines} long lines are shortened.")
        if self.cut_characters:
            parts.append(f"{self.cut_characters} more characters are not shown.")
        return " ".join(parts)


def visible(text: str) -> str:
    """`text` with every character that cannot be seen, or that moves others, spelled out."""
    return _HIDDEN.sub(lambda found: f"[U+{ord(found[0]):04X}]", text)


def shown(text: str, most: int = MAX_CHARACTERS) -> Shown:
    """`text` as a page may hold it: harmless, of bounded length, in lines of bounded length."""
    kept = text[:most].replace("\r\n", "\n")
    cut_lines = 0
    lines = []
    for line in kept.split("\n"):
        if len(line) > MAX_LINE:
            cut_lines += 1
            line = f"{line[:MAX_LINE]}… [{len(line) - MAX_LINE} more characters]"
        lines.append(visible(line))
    return Shown("\n".join(lines), max(0, len(text) - most), cut_lines)
