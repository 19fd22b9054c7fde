"""The values of credentials in what a server sends back, masked by as many `*` as they have bytes.

A value is found as it is, and in the forms that servers give what they repeat: base64, hexadecimal,
percent-encoded, and escaped for JSON and HTML. A server that hides it otherwise is not one to bind
a credential to.
"""

from __future__ import annotations

import html
import json
import zlib
from base64 import b64encode, urlsafe_b64encode
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple
from urllib.parse import quote, quote_plus

# What is unpacked at once. A whole of zeros takes a thousandth when it is packed.
_PIECE = 256 * 1024
# What a form of a value may consist of: values are printable ASCII.
_PRINTABLE = bytes(range(0x20, 0x7F))
_BASE64 = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/-_")
# What libraries leave as it is in an address and its parts.
_SAFE = ("", "/", "!'()*~", ";,/?:@&=+$#!'()*~", "$&+=:@", "!$&'()*+,;=:@", "!$&'()*+,;=:@/")
# Characters that libraries escape in JSON, and in HTML.
_JSON_ESCAPED = ("", "<>&", "<>&'", "<>&'\"+`")
_HTML_ESCAPED: tuple[Mapping[str, str], ...] = (
    {'"': "&#34;", "'": "&#39;", "+": "&#43;"},
    {'"': "&#34;", "'": "&#39;"},
    {'"': "&quot;", "'": "&#39;", "/": "&#x2F;", "=": "&#x3D;", "`": "&#x60;"},
    {'"': "&quot;", "'": "&#x27;", "=": "&#x3D;", "`": "&#x60;"},
    {'"': "&quot;", "'": "&#039;"},
    {'"': "&quot;", "'": "&apos;"},
)


class _Form(NamedTuple):
    """A text of small letters. Of base64 the characters around it may hold bits of it, too."""

    text: bytes
    before: bool = False
    after: bool = False


class Mask:
    """Masks some values, wherever they are in a text."""

    def __init__(self, values: Iterable[str]) -> None:
        self._values: dict[str, set[_Form]] = {}
        self._forms: tuple[_Form, ...] = ()
        self._longest = 0
        self.change(values)

    def change(self, values: Iterable[str]) -> None:
        """Mask these values from now on."""
        self._values = {each: self._values.get(each) or _forms(each) for each in values}
        self._forms = tuple(set().union(*self._values.values()))
        self._longest = max((len(form.text) for form in self._forms), default=0) + 2

    def apply(self, text: bytes) -> bytes:
        """Mask a whole text."""
        return _starred(text, self.spans(text))

    def spans(self, text: bytes) -> list[tuple[int, int]]:
        """Where its values are, each from its first byte to behind its last."""
        lowered = text.lower()
        found = []
        for form in self._forms:
            at = lowered.find(form.text)
            while at >= 0:
                end = at + len(form.text)
                is_before = form.before and at > 0 and text[at - 1] in _BASE64
                is_after = form.after and end < len(text) and text[end] in _BASE64
                found.append((at - is_before, end + is_after))
                at = lowered.find(form.text, at + 1)
        return found

    def open_end(self, text: bytes) -> int:
        """How many bytes at the end of a text a value may go on from.

        Does not depend on the values but on their length. A program that has a host repeat its
        guesses would learn otherwise from the pieces of an answer how a value begins.
        """
        tail = text[-self._longest :] if self._longest else b""
        return len(tail) - len(tail.rstrip(_PRINTABLE))


class MaskedBody:
    """A body that comes in pieces. What ends a line, or is not of ASCII, holds nothing back."""

    def __init__(self, mask: Mask) -> None:
        self._mask = mask
        self._held = b""
        # How many bytes of it are the end of a value whose beginning was passed on.
        self._starred = 0

    def feed(self, piece: bytes) -> bytes:
        text = self._held + piece
        spans = self._mask.spans(text)
        masked = _starred(text, [(0, self._starred), *spans])
        cut = len(text) - self._mask.open_end(text)
        # A longer value may begin with one that is here already, so this is kept as it came.
        self._held = text[cut:]
        ends = (end for start, end in spans if start < cut)
        self._starred = max(cut, self._starred, *ends) - cut
        return masked[:cut]

    def end(self) -> bytes:
        text, self._held = self._held, b""
        return _starred(text, [(0, self._starred), *self._mask.spans(text)])


class Unpacked:
    """A body that is packed by gzip or deflate."""

    def __init__(self) -> None:
        self._unpack = _unpacking()
        self._is_empty = True

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """Pieces of bounded size. Raises zlib.error."""
        self._is_empty = self._is_empty and not piece
        while piece:
            if self._unpack.eof:
                # A whole may have several members.
                self._unpack = _unpacking()
            if plain := self._unpack.decompress(piece, _PIECE):
                yield plain
            piece = self._unpack.unused_data or self._unpack.unconsumed_tail

    def end(self) -> Iterator[bytes]:
        """What is left. Raises zlib.error for a body that was cut off."""
        while plain := self._unpack.decompress(b"", _PIECE):
            yield plain
        if not self._unpack.eof and not self._is_empty:
            raise zlib.error("the body was cut off")


def _unpacking() -> zlib._Decompress:
    # Of gzip or zlib, as the first bytes say.
    return zlib.decompressobj(zlib.MAX_WBITS | 32)


def _starred(text: bytes, spans: Iterable[tuple[int, int]]) -> bytes:
    found = bytearray(text)
    for start, end in spans:
        found[start:end] = b"*" * (min(end, len(text)) - start)
    return bytes(found)


def _forms(value: str) -> set[_Form]:
    plain = value.encode()
    percent = {
        quote_plus(value),
        quote_plus(value, safe="*").replace("~", "%7E"),
        *(quote(value, safe=safe) for safe in _SAFE),
    }
    # An address within an address, as where to go after a login.
    percent |= {quote(each, safe="") for each in percent}
    quoted = {repr(value)[1:-1], *_json_forms(value)}
    marked = {html.escape(value), html.escape(value, quote=False)}
    for names in _HTML_ESCAPED:
        escaped = {"<": "&lt;", ">": "&gt;", "&": "&amp;", **names}
        marked.add("".join(escaped.get(each, each) for each in value))
    texts = {value, plain.hex(), "".join(f"%{byte:02x}" for byte in plain)}
    texts |= percent | quoted | marked
    texts |= {html.escape(each) for each in percent | quoted}
    for each in marked | quoted:
        texts |= _json_forms(each)
    return {_Form(text.lower().encode()) for text in texts} | _base64_forms(plain)


def _json_forms(value: str) -> set[str]:
    found = set()
    plain = json.dumps(value)[1:-1]
    for characters in _JSON_ESCAPED:
        inner = plain.replace('\\"', '"') if '"' in characters else plain
        text = inner.translate({ord(each): f"\\u{ord(each):04x}" for each in characters})
        found |= {text, text.replace("/", "\\/")}
    return found


def _base64_forms(plain: bytes) -> set[_Form]:
    """Base64 of texts in which it stands at any place: without the characters that share bits with
    what stands around it."""
    found = set()
    for before in range(3):
        padded = bytes(before) + plain
        own = slice((before * 8 + 5) // 6, len(padded) * 8 // 6)
        for encode in (b64encode, urlsafe_b64encode):
            found.add(_Form(encode(padded)[own].lower(), before > 0, len(padded) % 3 > 0))
    return found
