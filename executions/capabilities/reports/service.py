"""Audit reports: requested in the admin or by command, and made by a worker.

The JSON file is canonical, signed, and written as it is read (`Document`).
"""

from __future__ import annotations

import hashlib
import json
import logging
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from time import monotonic
from typing import IO, Any
from uuid import UUID

from django.db import transaction
from django.db.models import F, QuerySet
from django.db.models.functions import Now
from django.utils import timezone

from executions.capabilities.policies.models import Policy
from executions.capabilities.reports import reading as scopes
from executions.capabilities.reports.models import Report
from executions.capabilities.reports.reading import KIND, Reading, Scope, Told, hashes_of, holds_of
from executions.capabilities.reports.signing import (
    JSON_START,
    JSON_SUBJECT,
    PDF_SUBJECT,
    Signed,
    examined,
    json_end,
    pdf_end,
    sign,
)
from executions.kernel.audit import acting_as
from executions.kernel.claims import by_claim, claim, end, is_free
from executions.kernel.storage import REPORTS, file_store
from executions.ledger.append import append
from executions.ledger.entry import (
    DOMAIN,
    LedgerUnavailable,
    SigningKey,
    canonical,
    keyring,
    moment,
    signing_key,
    to_canonical,
)
from executions.ledger.erasures import authentic
from executions.ledger.models import LedgerEntry, Verification
from executions.ledger.trust import trusted_keys
from providers.errors import InvalidConfiguration
from providers.models import ConfigVersion

logger = logging.getLogger(__name__)


FORMAT = 1
_MOST_USED = 1000
_PIECE_BYTES = 65_536


class Document:
    """`pieces` is the file. `kept` is told each run; once all pieces are taken, `signed` is what
    was signed and `told` all that the report says beside its runs."""

    def __init__(
        self, report_id: str, reading: Reading, key: SigningKey, made_by: str, made_at: datetime
    ) -> None:
        self.reading = reading
        self.key = key
        holds, more_holds = holds_of(reading)
        self.told: dict[str, Any] = {
            "asked": reading.scope.stated(),
            "domain": DOMAIN.decode().strip(),
            "format": FORMAT,
            "holds": holds,
            "id": report_id,
            "keys": [
                {"key_id": each.key_id, "algorithm": "Ed25519", "public_key": each.public_key}
                for each in keyring().values()
            ],
            "made_at": moment(made_at),
            "made_by": to_canonical(made_by),
            "more_holds": more_holds,
        }
        self.signed: Signed | None = None

    def pieces(self, keep: Callable[[str, dict[str, Any]], None]) -> Iterator[bytes]:
        """The whole file. `keep` is called with "gone", "runs" or "runs_gone", and each."""
        digest = hashlib.sha256()
        buffer: list[bytes] = []
        size = 0
        yield JSON_START
        for text in self._report(keep):
            data = text.encode()
            digest.update(data)
            buffer.append(data)
            size += len(data)
            if size > _PIECE_BYTES:
                yield b"".join(buffer)
                buffer.clear()
                size = 0
        yield b"".join(buffer)
        self.signed = sign(self.key, JSON_SUBJECT, self.told["id"], digest.hexdigest())
        yield json_end(self.signed)

    def _report(self, keep: Callable[[str, dict[str, Any]], None]) -> Iterator[str]:
        """Its members in the order of their names, which the canonical form has; what is known at
        the end alone is named so that it stands there."""
        reading = self.reading
        lists = {"gone": reading.gone, "runs": reading.runs, "runs_gone": reading.gone}
        separator = "{"
        for name in sorted((*self.told, *lists)):
            yield f"{separator}{canonical(name)}:"
            separator = ","
            if name in lists:
                yield from _listed(lists[name](), partial(keep, name))
            else:
                yield canonical(self.told[name])
        verification = reading.verification()
        end = {
            "summary": {
                "runs": reading.read - reading.gone_read,
                "gone": reading.gone_read,
                "statuses": dict(reading.statuses),
                "bodies": dict(reading.bodies),
            },
            "truncated": scopes.MOST_RUNS if reading.truncated else None,
            "unknown": reading.unknown(),
            "used": _used(reading),
            "verification": _verification(verification, reading),
        }
        self.told.update(end)
        for name in sorted(end):
            yield f",{canonical(name)}:{canonical(end[name])}"
        yield "}"


def _listed(values: Iterable[Told], keep: Callable[[dict[str, Any]], None]) -> Iterator[str]:
    separator = "["
    for value, text in values:
        keep(value)
        yield separator + text
        separator = ","
    yield "[]" if separator == "[" else "]"


def _verification(found: Verification, reading: Reading) -> Mapping[str, Any]:
    first, last = reading.span
    return {
        "intact": found.is_intact,
        "entries": found.entries,
        "first_entry": first,
        "last_entry": last,
        "head": found.head or None,
        "executions": found.executions,
        "findings": [
            {"kind": each.kind, "entry": each.sequence, "detail": to_canonical(each.detail)}
            for each in found.findings
        ],
        "more_findings": found.omitted,
    }


def _used(reading: Reading) -> dict[str, Any]:
    """The configuration and policy versions that runs name, as their rows are now."""
    pairs = sorted(reading.configurations)[:_MOST_USED]
    versions = ConfigVersion.objects.defer("content").filter(
        subject__in={provider for provider, _ in pairs},
        version__in={version for _, version in pairs},
    )
    rows = {(row.subject, row.version): row for row in versions}
    named = sorted(reading.policies)[:_MOST_USED]
    policies = {str(row.pk): row for row in Policy.objects.filter(pk__in={pk for pk, _ in named})}
    return {
        "configurations": [
            _configuration(provider, version, rows.get((provider, version)))
            for provider, version in pairs
        ],
        "policies": [
            {
                "id": pk,
                "version": version,
                "name": to_canonical(str(policies[pk])) if pk in policies else None,
            }
            for pk, version in named
        ],
        "more_configurations": len(reading.configurations) - len(pairs),
        "more_policies": len(reading.policies) - len(named),
    }


def _configuration(provider: str, version: int, row: ConfigVersion | None) -> dict[str, Any]:
    said: dict[str, Any] = {"provider": to_canonical(provider), "version": to_canonical(version)}
    if row is None:
        return {**said, "hash": None}
    return {
        **said,
        "hash": row.content_hash,
        "made_at": moment(row.created_at),
        "made_by": to_canonical(row.author),
        "approved_by": to_canonical(row.approved_by) or None,
        "reason": to_canonical(row.reason) or None,
    }


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
    report = claim(
        _to_make().filter(pk=pk),
        _CLAIM,
        state=Report.State.MAKING,
        started_at=Now(),
        tries=F("tries") + 1,
        progress="",
    )
    if report is None:
        return False
    if report.tries > MOST_TRIES:
        _fail(
            report,
            f"It was started {MOST_TRIES} times and never completed. Request a smaller report.",
        )
        return False
    try:
        return _make(report)
    except Superseded:
        logger.warning("report %s is made by another process", pk)
    except LedgerUnavailable as error:
        _fail(report, error.message)
    except OSError as error:
        logger.exception("report %s could not be written", pk)
        _fail(report, f"The report could not be written: {error.strerror or type(error).__name__}")
    except Exception:
        logger.exception("report %s could not be made", pk)
        _fail(report, "The report could not be made; see the log.")
    return False


def _make(report: Report) -> bool:
    storage = file_store(REPORTS)
    last = monotonic() - _SAY_EVERY

    def said(progress: str) -> None:
        nonlocal last
        now = monotonic()
        if now - last < _SAY_EVERY:
            return
        last = now
        if not by_claim(report).update(progress=progress, claimed_until=Now() + _CLAIM):
            raise Superseded

    def confirm() -> None:
        # Whoever claims it now waits until it is entered.
        if not by_claim(report).update(claimed_until=Now() + _CLAIM):
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
    return end(
        report,
        state=Report.State.READY,
        finished_at=timezone.now(),
        runs=made.runs,
        truncated=made.truncated,
        findings=made.findings,
        json_hash=made.json_hash,
        pdf_hash=made.pdf_hash,
        ledger_sequence=made.ledger_sequence,
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
    states = (Report.State.WAITING, Report.State.MAKING)
    return Report.objects.filter(is_free(), state__in=states).order_by("pk")


def _fail(report: Report, problem: str) -> None:
    end(
        report,
        state=Report.State.FAILED,
        problem=problem[:500],
        finished_at=timezone.now(),
    )
