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
            lines = "1 long line is" if self.cut_lines == 1 else f"{self.cut_lines} long lines are"
            parts.append(f"{lines} shortened.")
        if self.cut_characters:
            rest = self.cut_characters
            left = "1 more character is" if rest == 1 else f"{rest:,} more characters are"
            parts.append(f"{left} not shown.")
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


def in_time(milliseconds: float) -> str:
    """A duration in the units that a person would use."""
    if 0 < milliseconds < 1:
        return "under 1 ms"
    if milliseconds < 1000:
        return f"{milliseconds:.0f} ms"
    if milliseconds < 60_000:
        return f"{milliseconds / 1000:.2f} s"
    minutes, seconds = divmod(round(milliseconds / 1000), 60)
    if minutes < 60:
        return f"{minutes} min {seconds} s"
    return f"{minutes // 60} h {minutes % 60} min"
