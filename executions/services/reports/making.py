"""Making a report: its two files, their signatures, and its entry in the ledger."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO, Any

from django.db import transaction
from django.utils import timezone

from executions.ledger.append import append
from executions.ledger.keyring import signing_key
from executions.services.reports.document import Document
from executions.services.reports.entered import KIND
from executions.services.reports.reading import Reading
from executions.services.reports.scope import Scope
from executions.services.reports.signing import PDF, pdf_end, sign

_PIECE = 1 << 18

Pieces = Iterator[bytes]


@dataclass(frozen=True)
class Made:
    """What was made. The hashes are of what is signed of each file."""

    runs: int
    truncated: bool
    findings: int
    json_hash: str
    pdf_hash: str
    ledger_sequence: int


def make(
    report_id: str,
    scope: Scope,
    made_by: str,
    write_json: Callable[[Pieces], object],
    write_pdf: Callable[[Pieces], object],
    said: Callable[[str], None] = lambda progress: None,
    confirm: Callable[[], None] = lambda: None,
) -> Made:
    """Write both files and enter it. Takes little memory, however many runs there are. `confirm`
    is called in the transaction that enters it, and raises where it must not be entered.

    Raises LedgerUnavailable where nothing can be signed or entered, and whatever the writers raise;
    what they have written is then no report that was entered.
    """
    # What writes PDF files takes a tenth of a second to load, in every process that starts.
    from executions.services.reports import paper

    key = signing_key()
    reading = Reading(scope, said)
    document = Document(report_id, reading, key, made_by, timezone.now())
    with tempfile.TemporaryFile("w+", prefix="cofferdam-report-") as kept:
        write_json(document.pieces(_keeper(kept, paper.MOST_RUNS, paper.begun)))
        signed = document.signed
        if signed is None:
            raise RuntimeError("the JSON file was not written to its end")
        said("writing the PDF")
        with tempfile.TemporaryFile(prefix="cofferdam-report-") as file:
            kept.seek(0)
            paper.write(file, document.told, signed, map(json.loads, kept), said)
            pdf_digest = _digest_of(file)
            file.seek(0)
            write_pdf(_pieces(file, pdf_end(sign(key, PDF, report_id, pdf_digest))))
    found = document.told["verification"]
    made = {
        "runs": reading.read,
        "truncated": reading.truncated,
        "findings": len(found["findings"]) + found["more_findings"],
        "json_hash": f"sha256:{signed.digest}",
        "pdf_hash": f"sha256:{pdf_digest}",
    }
    with transaction.atomic():
        confirm()
        entry = append(KIND, report_id, {"made_by": made_by, "asked": scope.stated(), **made})
    return Made(**made, ledger_sequence=entry.sequence)


def _keeper(
    file: IO[str], most: int, begun_of: Callable[[str], str]
) -> Callable[[str, dict[str, Any]], None]:
    """Keeps what the PDF has of the first `most` runs: of their code what `begun_of` leaves."""
    kept = 0

    def keep(name: str, each: dict[str, Any]) -> None:
        nonlocal kept
        kept += 1
        if kept > most:
            return
        code = each.get("code") or ""
        begun = begun_of(code)
        shown = {**each, "code": begun, "code_cut": len(code) - len(begun)}
        file.write(json.dumps([name, shown]) + "\n")

    return keep


def _digest_of(file: IO[bytes]) -> str:
    file.seek(0)
    digest = hashlib.sha256()
    while piece := file.read(_PIECE):
        digest.update(piece)
    return digest.hexdigest()


def _pieces(file: IO[bytes], end: bytes) -> Pieces:
    while piece := file.read(_PIECE):
        yield piece
    yield end
