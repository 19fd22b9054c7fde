"""Reading the whole ledger again, and saying where it is not what it was."""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

from django.db import connection, transaction

from executions.kernel.ordered_work import map_in_order
from executions.ledger import checkpoints, marks
from executions.ledger.bindings import RowsRead
from executions.ledger.entry import (
    FIRST_PREVIOUS,
    LedgerUnavailable,
    digest,
    is_signed_by,
    lock_ledger,
    parse,
    signed_bytes,
    write,
)
from executions.ledger.examination import Examined, ExaminedChunk, Examiner, SealedRecords
from executions.ledger.models import Finding, LedgerEntry, Mark, Verification
from executions.ledger.trust import trusted_keys

logger = logging.getLogger(__name__)

__all__ = (
    "Finding",
    "Verification",
    "check_receipt",
    "verify",
    "verify_entries",
    "verify_entry",
)


_records: list[SealedRecords] = []


def register_records(records: SealedRecords) -> None:
    """Have verifications compare these records with their entries."""
    _records[:] = [records]


CHUNK = 500


def verify(
    *,
    records: bool = True,
    artifact_bytes: bool = True,
    processes: int = 1,
    since_verified: bool = False,
    keeps_mark: bool = True,
    report: Callable[[Verification], None] = lambda verification: None,
) -> Verification:
    """Check signatures, sequence and checkpoints; with `records` all that the ledger binds too.

    With `artifact_bytes` every artifact's file is read. Entries are read by so many `processes`,
    each of which holds one chunk in memory; by this one alone within a transaction or beside other
    threads. `report` is called after each chunk. Raises LedgerUnavailable when
    LEDGER_KEYS holds no key: without one, nothing can be trusted.

    Unless `keeps_mark` is false, a complete verification that finds nothing leaves a mark, and one
    that finds something makes an earlier one inactive. With `since_verified` entries are read
    from the mark on, and all of them where none is active or where what is before it is not what
    was verified; `Verification.mark` says which it was.
    """
    public_keys = trusted_keys()
    known, problem = _known_mark(public_keys, is_wanted=since_verified)
    begin = known if since_verified else None
    # What this transaction wrote, no other process sees. A fork has the locks of other threads as
    # they are at that moment: where one is within SQLite, the fork waits forever.
    if connection.in_atomic_block or threading.active_count() > 1:
        processes = 1
    with ExitStack() as stack:

        def new_reading() -> _Reading:
            rows = stack.enter_context(RowsRead())
            return _Reading(public_keys, rows, records, artifact_bytes, known)

        reading = new_reading()
        if begin is not None and not reading.skip_to(begin):
            reading, begin = new_reading(), None
        if problem:
            reading.found.add(Finding("altered checkpoint", 1, problem))
        reading.found.mark = begin
        ranges = _ranges(reading.expected - 1)
        for chunk in map_in_order(reading.examiner.examine_between, ranges, processes):
            reading.read(chunk)
            report(reading.found)
        made = reading.make_mark()
        found = reading.finish()
    is_complete = records and artifact_bytes and begin is None
    if keeps_mark and is_complete:
        if not found.is_intact:
            marks.withdraw(public_keys)
        elif made is not None:
            marks.keep(made)
    return found


def _known_mark(public_keys: Mapping[str, str], *, is_wanted: bool) -> tuple[Mark | None, str]:
    """The mark, and what is wrong with it, "" for nothing. Where it is not wanted it is only one
    more checkpoint, and what is wrong with it is logged.

    Raises LedgerUnavailable where it is wanted and cannot be read.
    """
    try:
        return marks.newest(public_keys), ""
    except marks.MarkAltered:
        problem = (
            "no trusted key signed verified.json, so all entries were read. A verification without "
            "--since-verified that finds nothing writes it anew"
        )
        if is_wanted:
            return None, problem
        logger.critical("the ledger's verified.json was not written by this service")
    except LedgerUnavailable as error:
        if is_wanted:
            raise
        logger.error("%s", error.message)
    return None, ""


def verify_entries(
    first: int, last: int, report: Callable[[Verification], None] = lambda verification: None
) -> Verification:
    """Check the entries from `first` to `last`, with the one before and the one after, which show
    whether any was removed at an end: signatures, sequence and checkpoints, and no records.

    Raises LedgerUnavailable when LEDGER_KEYS holds no key.
    """
    with RowsRead() as rows:
        reading = _Reading(trusted_keys(), rows)
        reading.begin_at(max(1, first - 1))
        entries = LedgerEntry.objects.order_by("sequence")
        after = reading.expected - 1
        while chunk := list(entries.filter(sequence__gt=after, sequence__lte=last)[:CHUNK]):
            reading.read(reading.examiner.examine(chunk))
            report(reading.found)
            after = chunk[-1].sequence
        following = list(entries.filter(sequence__gt=last)[:1])
        reading.read(reading.examiner.examine(following))
        return reading.finish(is_end=not following)


def verify_entry(entry: LedgerEntry, public_keys: Mapping[str, str] | None = None) -> str:
    """What is wrong with this entry by itself, "" when nothing is. Its place is not looked at."""
    stated = parse(entry.statement)
    if stated is None:
        return "the entry's statement is not canonical JSON"
    trusted = trusted_keys() if public_keys is None else public_keys
    public_key = trusted.get(str(stated.get("key_id")))
    if public_key is None:
        return f"no key of LEDGER_KEYS vouches for the key {stated.get('key_id')!r} it names"
    if not is_signed_by(public_key, signed_bytes(stated, entry.statement), entry.signature):
        return "the entry's signature does not fit"
    return ""


def check_receipt(receipt: Mapping[str, Any]) -> Finding | None:
    """Whether the ledger still says what a receipt says that was given out; None when it does.

    Raises ValueError for what is no receipt, or none that a trusted key signed: it then tells
    nothing about the ledger.
    """
    stated = {name: value for name, value in receipt.items() if name != "signature"}
    sequence, signature = stated.get("sequence"), receipt.get("signature")
    if not isinstance(sequence, int) or not isinstance(signature, str):
        raise ValueError("it is not a receipt")
    statement = write(stated)
    public_key = trusted_keys().get(str(stated.get("key_id")), "")
    if not is_signed_by(public_key, signed_bytes(stated, statement), signature):
        raise ValueError("no key that LEDGER_KEYS vouches for signed it")
    entry = LedgerEntry.objects.filter(sequence=sequence).first()
    if entry is None:
        return Finding("missing", sequence, "a receipt was given out for it")
    if entry.statement != statement:
        return Finding("replaced", sequence, "a receipt was given out that says something else")
    return None


def _ranges(after: int) -> Iterator[tuple[int, int]]:
    """The first and the last number of each chunk of entries."""
    rows = LedgerEntry.objects.order_by("sequence").values_list("sequence", flat=True)
    while numbers := list(rows.filter(sequence__gt=after)[:CHUNK]):
        yield numbers[0], numbers[-1]
        after = numbers[-1]


def _place_bytes(sequence: int, execution_id: str) -> bytes:
    return f"{sequence} {execution_id}\n".encode()


class _Reading:
    """How far it was read, and what is known by then."""

    def __init__(
        self,
        public_keys: dict[str, str],
        rows: RowsRead,
        records: bool = False,
        artifact_bytes: bool = False,
        mark: Mark | None = None,
    ) -> None:
        self.found = Verification()
        self.rows = rows
        self.untrusted: set[str] = set()
        # Without its records no verification may call the ledger whole.
        [sealed] = _records
        self.records = sealed if records else None
        self.examiner = Examiner(public_keys, self.records, artifact_bytes)
        self.checkpoints = checkpoints.CheckpointComparison(public_keys, mark)
        self.found.checkpoints = len(self.checkpoints.known)
        self.expected = 1
        self.previous: str | None = FIRST_PREVIOUS
        # Over which entries are of which executions.
        self._executions = hashlib.sha256()

    def read(self, chunk: ExaminedChunk) -> None:
        for entry in chunk.entries:
            self._read_entry(entry)
            if self.records is None or entry.stated is None:
                continue
            if problem := self.rows.read(entry.stated):
                self._find("altered outside", entry.sequence, problem)
        self.rows.keep()
        self.found.executions += chunk.executions
        for finding in chunk.findings:
            self.found.add(finding)

    def begin_at(self, sequence: int) -> None:
        """Leave out the entries before; what the first one follows is then not looked at."""
        if sequence > 1:
            self.expected, self.previous = sequence, None

    def skip_to(self, mark: Mark) -> bool:
        """Go on behind a mark, with what the entries before it say of other rows than executions.

        Returns False where it is not active, or where the entries before are not those that were
        verified, as far as that shows without reading those of executions: of which execution each
        is, what the last one states, and all other entries.
        """
        if not mark.is_active:
            return False
        before = LedgerEntry.objects.filter(sequence__lte=mark.sequence)
        last = before.filter(sequence=mark.sequence).first()
        if last is None or digest(last.statement) != mark.digest:
            return False
        places = before.order_by("sequence").values_list("sequence", "execution_id")
        for sequence, execution_id in places.iterator():
            self._executions.update(_place_bytes(sequence, str(execution_id or "")))
        if self._executions.hexdigest() != mark.executions:
            return False
        # Those of executions are most of them.
        others = before.filter(execution_id=None).order_by("sequence")
        after = 0
        while chunk := list(others.filter(sequence__gt=after)[:CHUNK]):
            after = chunk[-1].sequence
            for entry in self.examiner.examine(chunk).entries:
                if entry.stated is None or entry.finding is not None:
                    return False
                self.checkpoints.read(entry.stated)
                if self.rows.read(entry.stated):
                    return False
            self.rows.keep()
        self.expected, self.previous = mark.sequence + 1, mark.digest
        self.found.head = mark.digest
        return self.rows.fingerprint() == mark.rows

    def make_mark(self) -> Mark | None:
        """The mark of what was read so far; None where the last entry cannot be believed. Call it
        before `finish`, which forgets what was said of rows."""
        if self.expected == 1 or self.previous is None:
            return None
        return marks.sign(
            self.expected - 1,
            self.previous,
            self.rows.fingerprint(),
            self._executions.hexdigest(),
        )

    def finish(self, *, is_end: bool = True) -> Verification:
        if is_end:
            for kind, sequence, detail in self.checkpoints.problems(self.expected - 1):
                self._find(kind, sequence, detail)
        if self.records is not None:
            for execution_id in self.records.missing_entries():
                self._find("missing", self.expected, f"execution {execution_id} has no entry")
            if self.rows.look():
                self._look_again()
            self.found.rows = self.rows.compared - self.rows.unproven
            self.found.unproven = self.rows.unproven
        self.found.sort()
        return self.found

    def _look_again(self) -> None:
        """While nothing can be entered: rows may have been changed honestly since we read."""
        with transaction.atomic():
            lock_ledger()
            for ends in _ranges(self.expected - 1):
                self.read(self.examiner.examine_between(ends))
            for kind, sequence, detail in self.rows.problems(self.expected):
                self._find(kind, sequence, detail)

    def _find(self, kind: str, sequence: int, detail: str) -> None:
        self.found.add(Finding(kind, sequence, detail))

    def _read_entry(self, entry: Examined) -> None:
        sequence = entry.sequence
        if sequence > self.expected:
            last = sequence - 1
            until = f" to {last}" if last > self.expected else ""
            self._find("missing", self.expected, f"entry {self.expected}{until} was removed")
            self.previous = None
        if entry.untrusted and entry.untrusted not in self.untrusted:
            self.untrusted.add(entry.untrusted)
            self._find(
                "untrusted key",
                sequence,
                f"no key of LEDGER_KEYS vouches for the key {entry.untrusted}, which it and "
                "perhaps later ones are signed with. If it is a former key of this service, put "
                "its public key into LEDGER_TRUSTED_KEYS",
            )
        if entry.finding is not None:
            self.found.add(entry.finding)
        if entry.digest is not None:
            self._check_place(entry, entry.digest)
        self._executions.update(_place_bytes(sequence, entry.execution_id))
        self.expected = sequence + 1
        self.previous = entry.digest
        self.found.entries += 1
        self.found.head = entry.head

    def _check_place(self, entry: Examined, statement_digest: str) -> None:
        if self.previous is not None and entry.previous != self.previous:
            self._find(
                "altered",
                entry.sequence,
                f"it does not follow entry {entry.sequence - 1} as that is now",
            )
        if entry.stated is not None:
            self.checkpoints.read(entry.stated)
        if self.checkpoints.contradict(entry.sequence, statement_digest):
            self._find(
                "replaced",
                entry.sequence,
                "it is signed, but another entry was committed here: the ledger was continued "
                "from an older copy of the database",
            )
