"""Large contents in slices, so that no single call keeps all other threads from their turn.

What is written in C (base64, encryption, JSON) has the interpreter's lock from its first byte to
its last. Of a slice it has it for a millisecond or two.
"""

from __future__ import annotations

import binascii
import json
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from json import encoder
from typing import Any

from providers.json_values import base64_problem

_LINE_ENDS = tuple((chr(code), f"\\u{code:04x}") for code in (0x85, 0x2028, 0x2029))
# A multiple of three and of four: base64 of the slices is base64 of all.
SLICE_BYTES = 3 * 256 * 1024


def slices(content: bytes) -> Iterator[bytes]:
    """The bytes, so many at a time."""
    for at in range(0, len(content), SLICE_BYTES):
        yield content[at : at + SLICE_BYTES]


def in_slices(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """The bytes of pieces of any length, cut anew: all but the last have SLICE_BYTES."""
    held = bytearray()
    for piece in pieces:
        held += piece
        while len(held) >= SLICE_BYTES:
            yield bytes(held[:SLICE_BYTES])
            del held[:SLICE_BYTES]
    if held:
        yield bytes(held)


def encoded(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Base64 of what the pieces are together."""
    for each in in_slices(pieces):
        yield binascii.b2a_base64(each, newline=False)


def encoded_text(content: bytes) -> str:
    """Base64 of a content, as a text."""
    return b"".join(encoded(slices(content))).decode()


def decoded(text: str | bytes, start: int = 0) -> bytes:
    """What a text of base64, from `start` on, stands for. Line breaks in it do not count.

    Raises ValueError, which says what is wrong.
    """
    if isinstance(text, str):
        try:
            whole = text.encode("ascii")
        except UnicodeEncodeError:
            raise ValueError(base64_problem(text)) from None
    else:
        whole = text
    if b"\n" in whole or b"\r" in whole:
        whole = b"".join(piece.translate(None, b"\r\n") for piece in slices(whole[start:]))
        start = 0
    starts = range(start, len(whole), SLICE_BYTES)
    try:
        # The sign ends what is decoded, so there is none before the end.
        if whole.find(b"=", start, len(whole) - 2) != -1:
            raise ValueError("padding within base64")
        return b"".join(
            binascii.a2b_base64(whole[at : at + SLICE_BYTES], strict_mode=True) for at in starts
        )
    except ValueError:
        told = text if isinstance(text, str) else text.decode("utf-8", "replace")
        raise ValueError(base64_problem(told)) from None


class JSONInSlices(json.JSONEncoder):
    """Writes long texts of a value in slices, where it is not to be indented.

    The encoder is the one in C still. For each text it calls a function of ours, and there other
    threads have their turn. That takes longer, so it is done where there is a long text alone.
    """

    def iterencode(self, o: Any, _one_shot: bool = False) -> Iterator[str]:
        make = getattr(encoder, "c_make_encoder", None)
        if make is None or self.indent is not None or not _has_long(o):
            return super().iterencode(o, _one_shot)
        plain = encoder.encode_basestring_ascii if self.ensure_ascii else encoder.encode_basestring
        text = partial(_json_of, plain)
        write = make(
            *({} if self.check_circular else None, self.default, text, None),
            *(self.key_separator, self.item_separator),
            *(self.sort_keys, self.skipkeys, self.allow_nan),
        )
        pieces: Iterator[str] = iter(write(o, 0))
        return pieces


def json_text(value: Any, default: Callable[[Any], Any] | None = None) -> str:
    """A value as compact JSON on one line. `default` and what is raised are as in `json.dumps`."""
    return escape_line_ends(
        json.dumps(
            value, cls=JSONInSlices, ensure_ascii=False, separators=(",", ":"), default=default
        )
    )


def escape_line_ends(text: str) -> str:
    """JSON text whose strings hold no line end: to many readers these three are one, as \\n is."""
    if len(text) > SLICE_BYTES:
        starts = range(0, len(text), SLICE_BYTES)
        return "".join(escape_line_ends(text[at : at + SLICE_BYTES]) for at in starts)
    for character, escape in _LINE_ENDS:
        text = text.replace(character, escape)
    return text


def _has_long(value: Any) -> bool:
    """Whether there is a long text in a value, three levels deep: outputs are on the third."""
    level = [value]
    for _ in range(4):
        below: list[Any] = []
        for each in level:
            if isinstance(each, str):
                if len(each) > SLICE_BYTES:
                    return True
            elif isinstance(each, dict):
                below += each.values()
            elif isinstance(each, (list, tuple)):
                below += each
        level = below
    return False


def _json_of(plain: Callable[[str], str], text: str) -> str:
    if len(text) <= SLICE_BYTES:
        return plain(text)
    starts = range(0, len(text), SLICE_BYTES)
    parts = (plain(text[at : at + SLICE_BYTES])[1:-1] for at in starts)
    return f'"{"".join(parts)}"'
