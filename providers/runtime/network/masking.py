"""The values of credentials in what a server sends back, masked by as many `*` as they have bytes.

A value is found as it is, and in the forms that servers give what they repeat: base64, hexadecimal,
percent-encoded, and escaped for JSON and HTML. A server that hides it otherwise is not one to bind
a credential to.
"""

from __future__ import annotations

import html
import json
import re
import zlib
from base64 import b64encode, urlsafe_b64encode
from collections.abc import Iterable
from urllib.parse import quote, quote_plus

# What is unpacked at once. A whole of zeros takes a thousandth when it is packed.
_PIECE = 256 * 1024


class Mask:
    """Masks some values, wherever they are in a text."""

    def __init__(self, values: Iterable[str]) -> None:
        forms = sorted({form for value in values for form in _forms(value)}, key=len, reverse=True)
        self._pattern = re.compile(b"|".join(map(re.escape, forms)), re.IGNORECASE)
        self._forms = tuple(form.lower() for form in forms)
        self._longest = len(forms[0])
        self._firsts = frozenset(form[0] for form in self._forms)

    def apply(self, text: bytes) -> bytes:
        """Mask a whole text."""
        return self._pattern.sub(lambda found: b"*" * len(found[0]), text)

    def beginning(self, text: bytes) -> int:
        """How many bytes at the end of a text may be the beginning of a value."""
        tail = text[-self._longest + 1 :].lower()
        for at, first in enumerate(tail):
            if first in self._firsts and any(form.startswith(tail[at:]) for form in self._forms):
                return len(tail) - at
        return 0


class MaskedBody:
    """A body that comes in pieces. What cannot be part of a value is passed on at once."""

    def __init__(self, mask: Mask) -> None:
        self._mask = mask
        self._held = b""

    def feed(self, piece: bytes) -> bytes:
        text = self._mask.apply(self._held + piece)
        kept = self._mask.beginning(text)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]

    def end(self) -> bytes:
        held, self._held = self._held, b""
        return held


class Unpacked:
    """A body that is packed by gzip or deflate."""

    def __init__(self) -> None:
        # Of gzip or zlib, as the first bytes say.
        self._unpack = zlib.decompressobj(zlib.MAX_WBITS | 32)

    def feed(self, piece: bytes) -> Iterable[bytes]:
        """Pieces of bounded size. Raises zlib.error."""
        while piece:
            yield self._unpack.decompress(piece, _PIECE)
            piece = self._unpack.unconsumed_tail


def _forms(value: str) -> set[bytes]:
    plain = value.encode()
    texts = {
        value,
        quote(value, safe=""),
        quote(value),
        quote_plus(value),
        json.dumps(value)[1:-1],
        json.dumps(value)[1:-1].replace("/", "\\/"),
        html.escape(value),
        html.escape(value, quote=False),
        value.encode().hex(),
    }
    return {text.encode() for text in texts} | _base64_forms(plain)


def _base64_forms(plain: bytes) -> set[bytes]:
    """Base64 of texts in which it stands at any place: without the characters that share bits with
    what stands around it."""
    found = set()
    for before in range(3):
        padded = bytes(before) + plain
        own = slice((before * 8 + 5) // 6, len(padded) * 8 // 6)
        found |= {encode(padded)[own] for encode in (b64encode, urlsafe_b64encode)}
    return found
