"""Paths of a workspace: as a sandbox has them, as the database has them, and which are none.

A path is bytes. In memory it is text in which a byte that is not UTF-8 is a surrogate, as
`os.fsdecode` has it. No database keeps such a text: there that byte, and the percent sign, are a
percent sign and two digits. So each path has one text, and each text one path.
"""

from __future__ import annotations

import hashlib
import re

MOST_BYTES, MOST_NAME_BYTES, MOST_FOLDERS = 4096, 255, 64

_ESCAPED = re.compile("[%\udc80-\udcff]")
_ESCAPE = re.compile("%([0-9A-F]{2})")


def to_text(path: str) -> str:
    """What the database keeps of it."""
    return _ESCAPED.sub(lambda found: f"%{ord(found[0]) & 0xFF:02X}", path)


def from_text(text: str) -> str:
    """The path that `to_text` made a text of."""

    def unescaped(found: re.Match[str]) -> str:
        value = int(found[1], 16)
        return chr(0xDC00 + value) if value >= 0x80 else chr(value)

    return _ESCAPE.sub(unescaped, text)


def key_of(path: str) -> str:
    """What a path is looked up by: paths are longer than an index takes."""
    return hashlib.sha256(path.encode("utf-8", "surrogateescape")).hexdigest()


def is_path(path: object) -> bool:
    """Whether it names something in a workspace, in the one way that there is to write it."""
    if not isinstance(path, str) or not is_name(path) or len(path) > MOST_BYTES:
        return False
    parts = path.split("/")
    if len(parts) > MOST_FOLDERS or any(part in ("", ".", "..") for part in parts):
        return False
    return _size(path) <= MOST_BYTES and max(map(_size, parts)) <= MOST_NAME_BYTES


def is_name(text: str) -> bool:
    """Whether bytes of a file system can be read as this text."""
    try:
        return "\0" not in text and bool(text.encode("utf-8", "surrogateescape"))
    except UnicodeEncodeError:
        return False


def _size(text: str) -> int:
    return len(text.encode("utf-8", "surrogateescape"))
