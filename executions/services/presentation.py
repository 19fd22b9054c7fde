"""Text that somebody hostile wrote, made fit to be looked at.

Nothing in it may act: not as HTML (the templates escape), not as a terminal's control sequence
when it is copied from the page, not as an override that shows the characters in another order
than a machine reads them.
"""

from __future__ import annotations

from dataclasses import dataclass

from providers.hidden_characters import visible as visible

MAX_CHARACTERS = 100_000
MAX_LINE = 2_000


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
