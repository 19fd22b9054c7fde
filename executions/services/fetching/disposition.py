"""The file's name in a Content-Disposition (RFC 6266), with or without the type before it."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import unquote_to_bytes

MOST_CHARACTERS = 8192

# The two that RFC 5987 asks for. Others could mean anything.
_CHARSETS = {"utf-8": "utf-8", "iso-8859-1": "latin-1"}


def filename(value: str) -> str:
    """As it is sent, to be cleaned; "" where there is none. `filename*` goes before `filename`."""
    found: dict[str, str] = {}
    for part in _parts(value[:MOST_CHARACTERS]):
        key, separator, content = part.partition("=")
        if separator:
            found.setdefault(key.strip().lower(), content.strip())
    return _extended(found.get("filename*", "")) or _plain(found.get("filename", ""))


def _parts(value: str) -> Iterator[str]:
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
