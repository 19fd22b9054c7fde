"""The names of fetched files."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, unquote, unquote_to_bytes

if TYPE_CHECKING:
    import httpx

MOST_CHARACTERS = 8192

# The two that RFC 5987 asks for. Others could mean anything.
_CHARSETS = {"utf-8": "utf-8", "iso-8859-1": "latin-1"}


def filename(value: str) -> str:
    """As it is sent, to be cleaned; "" where there is none. `filename*` goes before `filename`."""
    found: dict[str, str] = {}
    for part in _parameters(value[:MOST_CHARACTERS]):
        key, separator, content = part.partition("=")
        if separator:
            found.setdefault(key.strip().lower(), content.strip())
    return _extended(found.get("filename*", "")) or _plain(found.get("filename", ""))


def _parameters(value: str) -> Iterator[str]:
    """What lies between the semicolons that are not within quotes."""
    start, quoted, escaped = 0, False, False
    for position, char in enumerate(value):
        if escaped:
            escaped = False
        elif quoted and char == "\\":
            escaped = True
        elif char == '"':
            quoted = not quoted
        elif char == ";" and not quoted:
            yield value[start:position]
            start = position + 1
    yield value[start:]


def _plain(content: str) -> str:
    if not content.startswith('"'):
        return content
    plain, escaped = [], False
    for char in content[1:]:
        if escaped or char not in '"\\':
            plain.append(char)
            escaped = False
        elif char == "\\":
            escaped = True
        else:
            break
    return "".join(plain)


def _extended(content: str) -> str:
    """`charset'language'percent-encoded`; "" where it is not well-formed."""
    charset, _, rest = content.strip('"').partition("'")
    _, separator, encoded = rest.partition("'")
    encoding = _CHARSETS.get(charset.strip().lower(), "")
    if not separator or not encoding:
        return ""
    try:
        return unquote_to_bytes(encoded).decode(encoding)
    except UnicodeError:
        return ""


MOST_BYTES = 200
UNNAMED = "file"

# Parameters of a URL that say what an answer's Content-Disposition is to be, as S3's does.
_PARAMETERS = ("content-disposition", "response-content-disposition")
_RESERVED = set('<>:"|?*\ufffd')
# What these would become once somebody normalises them.
_LEADING_OUT = set("./\\")
_UNSEEN = ("Cc", "Cf", "Cs", "Co")
# tar.gz is one ending.
_ENDING = re.compile(r"(?:\.tar)?\.[^.\s]{1,16}\Z", re.IGNORECASE)
_WINDOWS = re.compile(r"(?:CON|PRN|AUX|NUL|CLOCK\$|CONIN\$|CONOUT\$|COM\d|LPT\d)", re.IGNORECASE)


def name_of(disposition: str, asked: httpx.URL, final: httpx.URL) -> str:
    """By the header of the answer, then the URL that was given, then its redirects; "" by none."""
    for candidate in _candidates(disposition, asked, final):
        if name := clean_name(candidate):
            return name
    return ""


def _candidates(disposition: str, asked: httpx.URL, final: httpx.URL) -> Iterator[str]:
    yield filename(disposition)
    for url in (asked, final):
        for key, value in parse_qsl(url.query.decode("ascii"), errors="replace"):
            if key.lower() in _PARAMETERS:
                yield filename(value)
    for url in (final, asked):
        path = url.raw_path.partition(b"?")[0].decode("ascii")
        yield unquote(path.rpartition("/")[2], errors="replace")


def clean_name(text: str) -> str:
    """The name of a file in `text`, safe in any folder of any system; "" where there is none.

    One part of a path, MOST_BYTES at most in UTF-8 with its ending kept, in NFC. Nothing unseen or
    that turns the direction of writing, no dot at its start or end, no device of Windows.
    """
    last = re.split(r"[/\\]", text[:4096].rstrip("/\\"))[-1]
    shown = "".join(map(_shown, unicodedata.normalize("NFC", last)))
    name = _trimmed(unicodedata.normalize("NFC", shown))
    if not name.strip("_"):
        return ""
    stem = unicodedata.normalize("NFKC", name).partition(".")[0].strip()
    if _WINDOWS.fullmatch(stem) or name[0] in "-~":
        # A shell reads the latter as an option and as somebody's home.
        name = f"_{name}"
    return _shortened(name)


def _shown(char: str) -> str:
    category = unicodedata.category(char)
    if category in _UNSEEN:
        return " " if char in "\t\r\n" else ""
    if category[0] == "Z":
        return " "
    compatible = unicodedata.normalize("NFKC", char)
    if char in _RESERVED or (compatible != char and set(compatible) & _LEADING_OUT):
        return "_"
    return char


def _trimmed(name: str) -> str:
    return " ".join(name.split()).strip(" .")


def _shortened(name: str) -> str:
    if len(name.encode()) <= MOST_BYTES:
        return name
    stem, ending = _parts(name)
    room = MOST_BYTES - len(ending.encode())
    return _trimmed(stem.encode()[:room].decode(errors="ignore")) + ending


def _parts(name: str) -> tuple[str, str]:
    found = _ENDING.search(name)
    if found is None or found.start() == 0:
        return name, ""
    return name[: found.start()], found[0]


class Names:
    """The names of one folder: no two that any system would take for the same."""

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self._taken = set(map(_folded, taken))
        # By name, the number to go on with: there may be thousands, for each of many files.
        self._next: dict[str, int] = {}

    def distinct(self, name: str) -> str:
        """`name`, or UNNAMED for "", with a number where it is taken; which it is from now on."""
        name = name or UNNAMED
        stem, ending = _parts(name)
        candidate, number = name, self._next.get(name, 2)
        while _folded(candidate) in self._taken:
            candidate, number = f"{stem}-{number}{ending}", number + 1
        self._next[name] = number
        self._taken.add(_folded(candidate))
        return candidate


def _folded(name: str) -> str:
    folded = unicodedata.normalize("NFKC", name).casefold()
    return unicodedata.normalize("NFKC", folded)
