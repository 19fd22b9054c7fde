"""How a report's files are signed, and what is wrong with one that was changed.

Both are signed with the key that the ledger is signed with. The JSON file is
`{"report":...,"signature":{...}}`; what is signed is the SHA-256 of the canonical JSON between.
A PDF is followed by one line, a comment to whoever shows it; what is signed is the SHA-256 of all
before that line. What is signed begins as everything that this key signs, and then says what it is.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO, Any

from executions.services.ledger.canonical import canonical
from executions.services.ledger.formats import DOMAIN
from executions.services.ledger.keyring import SigningKey, is_signed_by

JSON, PDF = "report", "report pdf"
JSON_START = b'{"report":'
_JSON_END = b',"signature":{'
PDF_END = b"\n%cofferdam-report "
# A signature and the names around it; no more of the end is looked through.
_MOST_END = 1000
_PIECE = 1 << 20


@dataclass(frozen=True)
class Signed:
    """What is signed of a file, as hexadecimal SHA-256, and the signature in base64."""

    digest: str
    key_id: str
    signature: str

    def stated(self) -> dict[str, str]:
        return {"digest": self.digest, "key_id": self.key_id, "signature": self.signature}


def signed_bytes(what: str, digest: str) -> bytes:
    return DOMAIN + f"{what}\n{digest}".encode()


def sign(key: SigningKey, what: str, digest: str) -> Signed:
    return Signed(digest, key.key_id, key.sign(signed_bytes(what, digest)))


def json_end(signed: Signed) -> bytes:
    return b',"signature":' + canonical(signed.stated()).encode() + b"}"


def pdf_end(signed: Signed) -> bytes:
    return PDF_END + canonical(signed.stated()).encode() + b"\n"


def problem_of(file: IO[bytes], public_keys: Mapping[str, str]) -> str:
    """What is wrong with a report's file; "" when one of these keys signed all of it."""
    return examined(file, public_keys)[0]


def examined(file: IO[bytes], public_keys: Mapping[str, str]) -> tuple[str, str]:
    """What is wrong with it, as `problem_of` has it, and the SHA-256 of what is signed of it."""
    start = file.read(len(JSON_START))
    is_json = start == JSON_START
    if not is_json and not start.startswith(b"%PDF-"):
        return "it is not a report", ""
    size = file.seek(0, os.SEEK_END)
    tail_at = max(0, size - _MOST_END)
    file.seek(tail_at)
    tail = file.read()
    mark = _JSON_END if is_json else PDF_END
    at = tail.rfind(mark)
    said = _signature_in(tail[at:], is_json) if at >= 0 else None
    if said is None:
        return "it does not end with a signature", ""
    begin = len(JSON_START) if is_json else 0
    digest = _digest(file, begin, tail_at + at)
    if digest != said["digest"]:
        return "it was changed after it was signed", digest
    public_key = public_keys.get(said["key_id"])
    if public_key is None:
        problem = f"the key {said['key_id']!r} that it names is none of those that are trusted"
        return problem, digest
    message = signed_bytes(JSON if is_json else PDF, digest)
    is_signed = is_signed_by(public_key, message, said["signature"])
    return "" if is_signed else "its signature is forged", digest


def _signature_in(end: bytes, is_json: bool) -> dict[str, str] | None:
    """What the end says, if it is exactly as one is written."""
    try:
        text = end[len(b',"signature":') : -1] if is_json else end[len(PDF_END) :]
        said: Any = json.loads(text)
        signed = Signed(**said)
    except (ValueError, TypeError):
        return None
    if not all(isinstance(value, str) for value in said.values()):
        return None
    return said if (json_end if is_json else pdf_end)(signed) == end else None


def _digest(file: IO[bytes], begin: int, end: int) -> str:
    digest = hashlib.sha256()
    file.seek(begin)
    left = end - begin
    while left > 0 and (piece := file.read(min(left, _PIECE))):
        digest.update(piece)
        left -= len(piece)
    return digest.hexdigest()
