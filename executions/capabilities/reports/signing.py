"""How a report's files are signed, and what is wrong with one that was changed.

Both are signed with the key that the ledger is signed with. The JSON file is
`{"report":...,"signature":{...}}`; its SHA-256 is that of the canonical JSON between.
A PDF is followed by one line, a comment to whoever shows it; its SHA-256 is that of all before that
line. What is signed begins as everything that this key signs, then says what it is, the report's
id, and the SHA-256.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO, Any

from executions.ledger.entry import DOMAIN, SigningKey, canonical, is_signed_by

JSON_SUBJECT, PDF_SUBJECT = "report", "report pdf"
JSON_START = b'{"report":'
_JSON_END = b',"signature":{'
PDF_END = b"\n%cofferdam-report "
# A signature and the names around it; no more of the end is looked through.
_MOST_END = 1000
_PIECE = 1 << 20


@dataclass(frozen=True)
class Signed:
    """What is signed of a file: the report's id and the hexadecimal SHA-256; the signature is in
    base64."""

    report: str
    digest: str
    key_id: str
    signature: str

    def stated(self) -> dict[str, str]:
        return {
            "digest": self.digest,
            "key_id": self.key_id,
            "report": self.report,
            "signature": self.signature,
        }


def signed_bytes(what: str, report: str, digest: str) -> bytes:
    return DOMAIN + f"{what}\n{report}\n{digest}".encode()


def sign(key: SigningKey, what: str, report: str, digest: str) -> Signed:
    return Signed(report, digest, key.key_id, key.sign(signed_bytes(what, report, digest)))


def json_end(signed: Signed) -> bytes:
    return b',"signature":' + canonical(signed.stated()).encode() + b"}"


def pdf_end(signed: Signed) -> bytes:
    return PDF_END + canonical(signed.stated()).encode() + b"\n"


def examined(file: IO[bytes], public_keys: Mapping[str, str]) -> Signed | str:
    """What is signed of a report's file; a text says what is wrong, where none of these keys signed
    it."""
    start = file.read(len(JSON_START))
    is_json = start == JSON_START
    if not is_json and not start.startswith(b"%PDF-"):
        return "it is not a report"
    size = file.seek(0, os.SEEK_END)
    tail_at = max(0, size - _MOST_END)
    file.seek(tail_at)
    tail = file.read()
    mark = _JSON_END if is_json else PDF_END
    at = tail.rfind(mark)
    said = _signature_in(tail[at:], is_json) if at >= 0 else None
    if said is None:
        return "it does not end with a signature"
    begin = len(JSON_START) if is_json else 0
    if _digest(file, begin, tail_at + at) != said.digest:
        return "it was changed after it was signed"
    public_key = public_keys.get(said.key_id)
    if public_key is None:
        return f"the key {said.key_id!r} that it names is none of those that are trusted"
    message = signed_bytes(JSON_SUBJECT if is_json else PDF_SUBJECT, said.report, said.digest)
    return said if is_signed_by(public_key, message, said.signature) else "its signature is forged"


def _signature_in(end: bytes, is_json: bool) -> Signed | None:
    """What the end says, if it is exactly as one is written."""
    try:
        text = end[len(b',"signature":') : -1] if is_json else end[len(PDF_END) :]
        said: Any = json.loads(text)
        signed = Signed(**said)
    except (ValueError, TypeError):
        return None
    if not all(isinstance(value, str) for value in said.values()):
        return None
    return signed if (json_end if is_json else pdf_end)(signed) == end else None


def _digest(file: IO[bytes], begin: int, end: int) -> str:
    digest = hashlib.sha256()
    file.seek(begin)
    left = end - begin
    while left > 0 and (piece := file.read(min(left, _PIECE))):
        digest.update(piece)
        left -= len(piece)
    return digest.hexdigest()
