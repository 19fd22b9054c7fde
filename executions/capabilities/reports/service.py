"""Audit reports: requested in the admin or by command, and made by a worker."""

from __future__ import annotations

import hashlib
import json
import logging
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta
from time import monotonic
from typing import IO, Any
from uuid import UUID

from django.db import transaction
from django.db.models import F, Q, QuerySet
from django.db.models.functions import Now
from django.utils import timezone

from executions.capabilities.reports.document import Document
from executions.capabilities.reports.models import Report
from executions.capabilities.reports.reading import KIND, Reading, hashes_of
from executions.capabilities.reports.scope import Scope
from executions.capabilities.reports.signing import PDF_SUBJECT, examined, pdf_end, sign
from executions.kernel.audit import acting_as
from executions.kernel.storage import REPORTS, file_store
from executions.ledger.append import append
from executions.ledger.entry import LedgerUnavailable, signing_key
from executions.ledger.erasures import authentic
from executions.ledger.models import LedgerEntry
from executions.ledger.trust import trusted_keys
from providers.errors import InvalidConfiguration

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
    from executions.capabilities.reports import pdf

    key = signing_key()
    reading = Reading(scope, said)
    document = Document(report_id, reading, key, made_by, timezone.now())
    with tempfile.TemporaryFile("w+", prefix="cofferdam-report-") as kept:
        write_json(document.pieces(_keeper(kept, pdf.MOST_RUNS, pdf.begun)))
        signed = document.signed
        if signed is None:
            raise RuntimeError("the JSON file was not written to its end")
        said("writing the PDF")
        with tempfile.TemporaryFile(prefix="cofferdam-report-") as file:
            kept.seek(0)
            pdf.write(file, document.told, signed, map(json.loads, kept), said)
            pdf_digest = _digest_of(file)
            file.seek(0)
            write_pdf(_pieces(file, pdf_end(sign(key, PDF_SUBJECT, report_id, pdf_digest))))
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


logger = logging.getLogger(__name__)

JSON, PDF = "json", "pdf"
KEPT_DAYS = 30
MOST_TRIES = 3
MOST_WAITING = 20
_CLAIM = timedelta(minutes=5)
_SAY_EVERY = 2.0
_AT_ONCE = 100


class NotAsMade(Exception):
    """A file, or its entry, is not what it was when the report was made."""


class Superseded(Exception):
    """Somebody else makes it by now."""


def scope_of(report: Report) -> Scope:
    ids = tuple(UUID(pk) for pk in report.ids)
    return Scope(report.tenant_slug, report.since, report.until, ids, report.with_code)


def ask(report: Report) -> None:
    """Store it, and make it now if that is soon done; the workers make it within a minute or two
    where it is not. Raises InvalidConfiguration for what no report can be of."""
    scope = scope_of(report)
    check(scope)
    report.save(force_insert=True)
    if scope.is_small():
        transaction.on_commit(lambda: make_one(report.pk))


def check(scope: Scope) -> None:
    """Raises InvalidConfiguration for what no report can be of, and where too many wait already."""
    scope.check()
    if _to_make().count() >= MOST_WAITING:
        raise InvalidConfiguration(
            f"{MOST_WAITING} reports are waiting. Try again when some are done."
        )


def make_waiting() -> int:
    """Make what waits, and what whoever made it left; how many were made."""
    made = 0
    for pk in list(_to_make().values_list("pk", flat=True)[:_AT_ONCE]):
        made += make_one(pk)
    return made


def make_one(pk: UUID) -> bool:
    """Make it, if nobody else does. What is wrong is told by its row."""
    with transaction.atomic():
        claimed = (
            _to_make()
            .filter(pk=pk)
            .update(
                state=Report.State.MAKING,
                started_at=Now(),
                claimed_until=Now() + _CLAIM,
                tries=F("tries") + 1,
                progress="",
            )
        )
        if not claimed:
            return False
        report = Report.objects.get(pk=pk)
    mine = Report.objects.filter(pk=pk, state=Report.State.MAKING, tries=report.tries)
    if report.tries > MOST_TRIES:
        _fail(
            mine,
            f"It was started {MOST_TRIES} times and never completed. Request a smaller report.",
        )
        return False
    try:
        return _make(report, mine)
    except Superseded:
        logger.warning("report %s is made by another process", pk)
    except LedgerUnavailable as error:
        _fail(mine, error.message)
    except OSError as error:
        logger.exception("report %s could not be written", pk)
        _fail(mine, f"The report could not be written: {error.strerror or type(error).__name__}")
    except Exception:
        logger.exception("report %s could not be made", pk)
        _fail(mine, "The report could not be made; see the log.")
    return False


def _make(report: Report, mine: QuerySet[Report]) -> bool:
    storage = file_store(REPORTS)
    last = monotonic() - _SAY_EVERY

    def said(progress: str) -> None:
        nonlocal last
        now = monotonic()
        if now - last < _SAY_EVERY:
            return
        last = now
        if not mine.update(progress=progress, claimed_until=Now() + _CLAIM):
            raise Superseded

    def confirm() -> None:
        # Whoever claims it now waits until it is entered.
        if not mine.update(claimed_until=Now() + _CLAIM):
            raise Superseded

    with acting_as(lambda: report.made_by):
        made = make(
            str(report.pk),
            scope_of(report),
            report.made_by,
            lambda pieces: storage.save_stream(name_of(report, JSON), pieces),
            lambda pieces: storage.save_stream(name_of(report, PDF), pieces),
            said,
            confirm,
        )
    return bool(
        mine.update(
            state=Report.State.READY,
            finished_at=timezone.now(),
            claimed_until=None,
            runs=made.runs,
            truncated=made.truncated,
            findings=made.findings,
            json_hash=made.json_hash,
            pdf_hash=made.pdf_hash,
            ledger_sequence=made.ledger_sequence,
        )
    )


def open_file(report: Report, file_format: str) -> IO[bytes]:
    """A copy of its file, which is the one that was entered. Raises OSError where it is not there,
    NotAsMade where it is another one, LedgerUnavailable where that cannot be told."""
    keys = trusted_keys()
    entry = LedgerEntry.objects.filter(sequence=report.ledger_sequence or 0).first()
    stated = authentic(entry, keys) if entry else None
    if stated is None or (stated["kind"], stated["subject"]) != (KIND, str(report.pk)):
        raise NotAsMade("The ledger entry of this report was changed after it was signed.")
    copy = tempfile.TemporaryFile(prefix="cofferdam-report-")  # noqa: SIM115
    try:
        with closing(file_store(REPORTS).open_range(name_of(report, file_format))) as pieces:
            copy.writelines(pieces)
        copy.seek(0)
        signed = examined(copy, keys)
        recorded = {JSON: report.json_hash, PDF: report.pdf_hash}[file_format]
        is_same = not isinstance(signed, str) and (
            signed.report == stated["subject"]
            and f"sha256:{signed.digest}" == recorded == hashes_of(stated)[file_format]
        )
        if not is_same:
            raise NotAsMade("The stored file is not the one that was made.")
        copy.seek(0)
    except BaseException:
        copy.close()
        raise
    return copy


def name_of(report: Report, file_format: str) -> str:
    """By attempt: of two makers neither writes the other's file."""
    return f"{report.pk.hex}-{report.tries}.{file_format}"


def remove_old() -> int:
    """Remove the files of what was made long ago: they may hold code that retention has erased."""
    before = timezone.now() - timedelta(days=KEPT_DAYS)
    old = Report.objects.filter(
        state__in=(Report.State.READY, Report.State.FAILED),
        files_removed_at=None,
        created_at__lt=before,
    )
    removed = 0
    for report in old[:_AT_ONCE]:
        try:
            for tried in range(1, report.tries + 1):
                report.tries = tried
                for file_format in (JSON, PDF):
                    file_store(REPORTS).delete(name_of(report, file_format))
        except OSError:
            logger.exception("the files of report %s could not be removed", report.pk)
            continue
        removed += Report.objects.filter(pk=report.pk).update(files_removed_at=timezone.now())
    return removed


def _to_make() -> QuerySet[Report]:
    silent = Q(state=Report.State.MAKING, claimed_until__lt=Now())
    return Report.objects.filter(Q(state=Report.State.WAITING) | silent).order_by("pk")


def _fail(mine: QuerySet[Report], problem: str) -> None:
    mine.update(
        state=Report.State.FAILED,
        problem=problem[:500],
        finished_at=timezone.now(),
        claimed_until=None,
    )
