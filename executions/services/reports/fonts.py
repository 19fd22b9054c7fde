"""The letters of a report's PDF, and text that any two of them can write.

Code and names are whatever their authors wanted. What neither font has, what cannot be seen, what
moves other characters or piles up on them is spelled out, as [U+202E]: nothing is dropped.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from functools import cache, lru_cache
from pathlib import Path

from reportlab.pdfbase import pdfmetrics
from reportlab.pdfbase.ttfonts import TTFont

from providers.hidden_characters import visible

# Latin, Greek, Cyrillic and signs; then what GB 2312 and JIS X 0208 have of Chinese and Japanese.
MONO, CJK = "CofferdamMono", "CofferdamCJK"
_FILES = {MONO: "DejaVuSansMono.ttf", CJK: "NotoSansSC-subset.ttf"}
_PILED = ("Mn", "Me")


@cache
def register() -> None:
    """Have reportlab know both fonts."""
    for name, file in _FILES.items():
        pdfmetrics.registerFont(TTFont(name, Path(__file__).with_name("fonts") / file))


def spelled(text: str) -> str:
    """One line of text as these fonts can show it."""
    return "".join(map(_spelled, visible(text).replace("\t", "    ").replace("\n", "[U+000A]")))


@lru_cache(maxsize=4096)
def _spelled(character: str) -> str:
    if character.isascii():
        return character
    is_piled = unicodedata.category(character) in _PILED
    return f"[U+{ord(character):04X}]" if is_piled or font_of(character) is None else character


@lru_cache(maxsize=4096)
def font_of(character: str) -> str | None:
    register()
    for name in _FILES:
        if ord(character) in pdfmetrics.getFont(name).face.charToGlyph:
            return name
    return None


@lru_cache(maxsize=4096)
def width_of(character: str, size: float) -> float:
    return float(pdfmetrics.stringWidth(character, font_of(character) or MONO, size))


def wrapped(text: str, size: float, most: float) -> Iterator[str]:
    """Spelled text in lines that are no wider than `most` points; an empty one is one line."""
    line: list[str] = []
    width = 0.0
    for character in text:
        more = width_of(character, size)
        if line and width + more > most:
            yield "".join(line)
            line, width = [], 0.0
        line.append(character)
        width += more
    yield "".join(line)


def in_fonts(text: str) -> Iterator[tuple[str, str]]:
    """Spelled text in pieces, each with the font that has it."""
    piece: list[str] = []
    current = MONO
    for character in text:
        font = font_of(character) or MONO
        if font != current and piece:
            yield current, "".join(piece)
            piece = []
        current = font
        piece.append(character)
    if piece:
        yield current, "".join(piece)
