"""Reading the whole ledger again, and saying where it is not what it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol
from uuid import UUID

from django.db import transaction

from executions.ledger import checkpoints
from executions.ledger.bindings import RowsRead
from executions.ledger.entry import (
    FIRST_PREVIOUS,
    bound_row_of,
    digest,
    is_signed_by,
    lock_ledger,
    moment,
    parse,
    signed_bytes,
    subject_of,
    write,
)
from executions.ledger.erasures import Erasures
from executions.ledger.models import Finding, LedgerEntry, Verification
from executions.ledger.trust import trusted_keys

__all__ = (
    "Finding",
    "Verification",
    "check_receipt",
    "verify",
    "verify_entries",
    "verify_entry",
)


class SealedRecords(Protocol):
    """The records whose ends the entries of the kind `execution` seal. The package that has them
    registers itself with `register_records`."""

    def find(self, ids: Sequence[UUID]) -> Mapping[UUID, Any]:
        """Return the records of these ids that exist, by id."""

    def alteration_of(
        self, record: Any, stated: Mapping[str, Any], erasures: Erasures, *, artifact_bytes: bool
    ) -> str:
        """Return what of the record differs from its entry; "" for nothing."""

    def missing_entries(self) -> Iterator[UUID]:
        """Yield the ids of records that have ended and have no entry."""


_records: list[SealedRecords] = []


def register_records(records: SealedRecords) -> None:
    """Have verifications compare these records with their entries."""
    _records[:] = [records]


CHUNK = 500
# Each may hold several hundred kilobytes.
RECORDS_AT_ONCE = 25


def verify(
    *,
    records: bool = True,
    artifact_bytes: bool = True,
    report: Callable[[Verification], None] = lambda verification: None,
) -> Verification:
    """Check signatures, sequence and checkpoints; with `records` all that the ledger binds too.

    With `artifact_bytes` every artifact's file is read. Holds one chunk in memory. `report` is
    called after each chunk. Raises LedgerUnavailable when LEDGER_KEYS holds no key: without one,
    nothing can be trusted.
    """
    with RowsRead() as rows:
        reading = _Reading(records, artifact_bytes, rows)
        for chunk in _chunks():
            reading.read(chunk)
            report(reading.found)
        return reading.finish()


def verify_entries(
    first: int, last: int, report: Callable[[Verification], None] = lambda verification: None
) -> Verification:
    """Check the entries from `first` to `last`, with the one before and the one after, which show
    whether any was removed at an end: signatures, sequence and checkpoints, and no records.

    Raises LedgerUnavailable when LEDGER_KEYS holds no key.
    """
    with RowsRead() as rows:
        reading = _Reading(False, False, rows)
        reading.begin_at(max(1, first - 1))
        entries = LedgerEntry.objects.order_by("sequence")
        after = reading.expected - 1
        while chunk := list(entries.filter(sequence__gt=after, sequence__lte=last)[:CHUNK]):
            reading.read(chunk)
            report(reading.found)
            after = chunk[-1].sequence
        following = list(entries.filter(sequence__gt=last)[:1])
        reading.read(following)
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


def _chunks(after: int | None = None) -> Iterator[list[LedgerEntry]]:
    while True:
        rows = LedgerEntry.objects.order_by("sequence")
        chunk = list((rows if after is None else rows.filter(sequence__gt=after))[:CHUNK])
        if not chunk:
            return
        yield chunk
        after = chunk[-1].sequence


class _Reading:
    """How far it was read, and what is known by then."""

    def __init__(self, records: bool, artifact_bytes: bool, rows: RowsRead) -> None:
        self.found = Verification()
        self.rows = rows
        self.artifact_bytes = artifact_bytes
        self.public_keys = trusted_keys()
        self.untrusted: set[str] = set()
        self.erasures = Erasures(self.public_keys, thorough=True) if records else None
        # Without its records no verification may call the ledger whole.
        [self.records] = _records
        self.marks = checkpoints.CheckpointComparison(self.public_keys)
        self.found.checkpoints = len(self.marks.known)
        self.expected = 1
        self.previous: str | None = FIRST_PREVIOUS

    def read(self, chunk: Sequence[LedgerEntry]) -> None:
        executions: list[tuple[LedgerEntry, dict[str, Any]]] = []
        for entry in chunk:
            stated = self._read_entry(entry)
            if stated is None or self.erasures is None:
                continue
            # As it states: its column is anybody's to write.
            if stated["kind"] == "execution":
                executions.append((entry, stated))
            elif problem := self.rows.read(stated):
                self._find("altered outside", entry.sequence, problem)
        self.rows.keep()
        if self.erasures is not None:
            for start in range(0, len(executions), RECORDS_AT_ONCE):
                self._compare(executions[start : start + RECORDS_AT_ONCE], self.erasures)

    def begin_at(self, sequence: int) -> None:
        """Leave out the entries before; what the first one follows is then not looked at."""
        if sequence > 1:
            self.expected, self.previous = sequence, None

    def finish(self, *, is_end: bool = True) -> Verification:
        if is_end:
            for kind, sequence, detail in self.marks.problems(self.expected - 1):
                self._find(kind, sequence, detail)
        if self.erasures is not None:
            for execution_id in self.records.missing_entries():
                self._find("missing", self.expected, f"execution {execution_id} has no entry")
            if self.rows.look():
                self._look_again()
            self.found.rows = self.rows.compared - self.rows.unproven
            self.found.unproven = self.rows.unproven
        self.found.sort()
        return self.found

    def _was_erased(self, stated: Mapping[str, Any], erasures: Erasures) -> bool:
        """Before we began, or since."""
        if erasures.covers_record(stated):
            return True
        erasures.read_on()
        return erasures.covers_record(stated)

    def _compare_again(self, pk: UUID, stated: Mapping[str, Any], erasures: Erasures) -> str:
        """As it is now: bodies may have been erased, and tenants deleted, since we began."""
        execution = self.records.find([pk]).get(pk)
        erasures.read_on()
        if execution is None:
            return "" if erasures.covers_record(stated) else "all of it was removed"
        return self.records.alteration_of(
            execution, stated, erasures, artifact_bytes=self.artifact_bytes
        )

    def _look_again(self) -> None:
        """While nothing can be entered: rows may have been changed honestly since we read."""
        with transaction.atomic():
            lock_ledger()
            for chunk in _chunks(self.expected - 1):
                self.read(chunk)
            for kind, sequence, detail in self.rows.problems(self.expected):
                self._find(kind, sequence, detail)

    def _find(self, kind: str, sequence: int, detail: str) -> None:
        self.found.add(Finding(kind, sequence, detail))

    def _read_entry(self, entry: LedgerEntry) -> dict[str, Any] | None:
        """What the entry states, None when it cannot be believed."""
        if entry.sequence > self.expected:
            last = entry.sequence - 1
            until = f" to {last}" if last > self.expected else ""
            self._find("missing", self.expected, f"entry {self.expected}{until} was removed")
            self.previous = None
        stated = self._authentic(entry)
        if stated is not None and stated["sequence"] != entry.sequence:
            self._find(
                "reordered", entry.sequence, f"in its place is what was entry {stated['sequence']}"
            )
            stated = None
        elif stated is not None:
            self._check_place(entry, stated)
            self.marks.read(stated)
        known = self.marks.known.get(entry.sequence)
        if stated is not None and known not in (None, digest(entry.statement)):
            self._find(
                "replaced",
                entry.sequence,
                "it is signed, but another entry was committed here: the ledger was continued "
                "from an older copy of the database",
            )
        self.expected = entry.sequence + 1
        self.previous = None if stated is None else digest(entry.statement)
        self.found.entries += 1
        self.found.head = entry.digest
        return stated

    def _authentic(self, entry: LedgerEntry) -> dict[str, Any] | None:
        """The statement, if a trusted key signed it."""
        stated = parse(entry.statement)
        if stated is None:
            self._find("altered", entry.sequence, "its statement is not canonical JSON")
            return None
        key_id = str(stated.get("key_id"))
        public_key = self.public_keys.get(key_id)
        if public_key is None:
            if key_id not in self.untrusted:
                self.untrusted.add(key_id)
                self._find(
                    "untrusted key",
                    entry.sequence,
                    f"no key of LEDGER_KEYS vouches for the key {key_id}, which it and perhaps "
                    "later ones are signed with. If it is a former key of this service, put its "
                    "public key into LEDGER_TRUSTED_KEYS",
                )
            return None
        if not is_signed_by(public_key, signed_bytes(stated, entry.statement), entry.signature):
            self._find("altered", entry.sequence, "its signature does not fit its statement")
            return None
        return stated

    def _check_place(self, entry: LedgerEntry, stated: Mapping[str, Any]) -> None:
        repeated = {
            "kind": entry.kind,
            "key_id": entry.key_id,
            "at": moment(entry.at),
        }
        differing = [name for name, value in repeated.items() if stated.get(name) != value]
        # Entries of other kinds have none: with one, they would pass for a made-up execution's.
        named = stated["subject"] if stated["kind"] == "execution" else None
        if named != (str(entry.execution_id) if entry.execution_id else None):
            differing.append("execution_id")
        if entry.bound_row != bound_row_of(stated):
            differing.append("bound_row")
        if entry.subject != subject_of(stated):
            differing.append("subject")
        if entry.digest != digest(entry.statement):
            differing.append("digest")
        if differing:
            self._find("altered", entry.sequence, f"its column {differing[0]} was changed")
        if self.previous is not None and stated["previous"] != self.previous:
            self._find(
                "altered",
                entry.sequence,
                f"it does not follow entry {entry.sequence - 1} as that is now",
            )

    def _compare(
        self, entries: Sequence[tuple[LedgerEntry, dict[str, Any]]], erasures: Erasures
    ) -> None:
        wanted = [UUID(stated["subject"]) for _, stated in entries]
        executions = self.records.find(wanted)
        for entry, stated in entries:
            execution = executions.get(UUID(stated["subject"]))
            self.found.executions += 1
            if execution is None and self._was_erased(stated, erasures):
                continue
            if execution is None:
                detail = f"the record of execution {stated['subject']} was removed"
                self._find("missing record", entry.sequence, detail)
            elif self.records.alteration_of(
                execution, stated, erasures, artifact_bytes=self.artifact_bytes
            ) and (difference := self._compare_again(execution.pk, stated, erasures)):
                detail = f"in the record of execution {execution.pk}, {difference}"
                self._find("altered record", entry.sequence, detail)
