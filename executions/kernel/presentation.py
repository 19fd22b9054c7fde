"""Text that somebody hostile wrote, made fit to be looked at.

Nothing in it may act: not as HTML (the templates escape), not as a terminal's control sequence
when it is copied from the page, not as an override that shows the characters in another order
than a machine reads them.
"""

from __future__ import annotations

from dataclasses import dataclass

from providers.hidden_characters import spelled_length
from providers.hidden_characters import visible as visible

MAX_CHARACTERS = 100_000
MAX_LINE = 2_000
_STEP = 1_000


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
    cut = max(0, len(text) - most)
    fits = _fitting(kept, most)
    cut, kept = cut + len(kept) - fits, kept[:fits]
    lines = kept.split("\n")
    long = [number for number, line in enumerate(lines) if len(line) > MAX_LINE]
    for number in long:
        line = lines[number]
        lines[number] = f"{line[:MAX_LINE]}… [{len(line) - MAX_LINE} more characters]"
    return Shown(visible("\n".join(lines)), cut, len(long))


def _fitting(text: str, most: int) -> int:
    """How many of its characters fit, where those that cannot be seen are spelled out."""
    size = 0
    for start in range(0, len(text), _STEP):
        piece = text[start : start + _STEP]
        size += spelled_length(piece)
        if size > most:
            return start
    return len(text)


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
