"""Entries examined each by itself, and executions compared with their entries.

Nothing here needs the entry before, so several processes can examine one ledger. What needs it is
in `verification`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol
from uuid import UUID

from executions.ledger.entry import (
    bound_row_of,
    digest,
    is_signed_by,
    moment,
    parse,
    signed_bytes,
    subject_of,
)
from executions.ledger.erasures import Erasures
from executions.ledger.models import Finding, LedgerEntry

# Each may hold several hundred kilobytes.
RECORDS_AT_ONCE = 50


class SealedRecords(Protocol):
    """The records whose ends the entries of the kind `execution` seal. The package that has them
    registers itself with `verification.register_records`."""

    def find(self, ids: Sequence[UUID]) -> Mapping[UUID, Any]:
        """Return the records of these ids that exist, by id."""

    def alteration_of(
        self, record: Any, stated: Mapping[str, Any], erasures: Erasures, *, artifact_bytes: bool
    ) -> str:
        """Return what of the record differs from its entry; "" for nothing."""

    def missing_entries(self) -> Iterator[UUID]:
        """Yield the ids of records that have ended and have no entry."""


class Examined(NamedTuple):
    """An entry as far as it shows by itself.

    `digest` is its statement's, None where that cannot be believed, for which `finding` says why.
    `untrusted` is the key that signed it, where none vouches for that. `previous` is the digest
    that it names. `stated` is what it states, None where it cannot be believed and for an
    execution, which is compared already and whose id is `execution_id`. `finding` may also be
    about a column. `head` is the column `digest`.
    """

    sequence: int
    head: str
    digest: str | None = None
    previous: str = ""
    stated: Mapping[str, Any] | None = None
    execution_id: str = ""
    finding: Finding | None = None
    untrusted: str = ""


@dataclass
class ExaminedChunk:
    """Entries that follow each other, how many executions were compared with theirs, and what was
    found of these."""

    entries: list[Examined]
    executions: int = 0
    findings: list[Finding] = field(default_factory=list)


class Examiner:
    """Examines entries with these keys; with `records` also the executions that they seal."""

    def __init__(
        self, public_keys: Mapping[str, str], records: SealedRecords | None, artifact_bytes: bool
    ) -> None:
        self._public_keys = public_keys
        self._records = records
        self._artifact_bytes = artifact_bytes
        self._erasures = Erasures(public_keys, thorough=True)

    def examine_between(self, ends: tuple[int, int]) -> ExaminedChunk:
        """Read and examine the entries from the first of these numbers to the second."""
        rows = LedgerEntry.objects.filter(sequence__gte=ends[0], sequence__lte=ends[1])
        return self.examine(list(rows.order_by("sequence")))

    def examine(self, entries: Sequence[LedgerEntry]) -> ExaminedChunk:
        """Examine these entries."""
        chunk = ExaminedChunk([])
        executions: list[tuple[int, Mapping[str, Any]]] = []
        for entry in entries:
            examined = self._examine(entry)
            # As it states: its column is anybody's to write.
            if examined.stated is not None and examined.stated["kind"] == "execution":
                executions.append((entry.sequence, examined.stated))
                examined = examined._replace(stated=None, execution_id=examined.stated["subject"])
            chunk.entries.append(examined)
        if self._records is not None:
            for start in range(0, len(executions), RECORDS_AT_ONCE):
                self._compare(executions[start : start + RECORDS_AT_ONCE], self._records, chunk)
        return chunk

    def _examine(self, entry: LedgerEntry) -> Examined:
        sequence, head = entry.sequence, entry.digest

        def unbelievable(kind: str, detail: str) -> Examined:
            return Examined(sequence, head, finding=Finding(kind, sequence, detail))

        stated = parse(entry.statement)
        if stated is None:
            return unbelievable("altered", "its statement is not canonical JSON")
        key_id = str(stated.get("key_id"))
        public_key = self._public_keys.get(key_id)
        if public_key is None:
            return Examined(sequence, head, untrusted=key_id)
        if not is_signed_by(public_key, signed_bytes(stated, entry.statement), entry.signature):
            return unbelievable("altered", "its signature does not fit its statement")
        if stated["sequence"] != sequence:
            was = stated["sequence"]
            return unbelievable("reordered", f"in its place is what was entry {was}")
        statement_digest = digest(entry.statement)
        column = _altered_column(entry, stated, statement_digest)
        finding = Finding("altered", sequence, f"its column {column} was changed")
        return Examined(
            sequence,
            head,
            statement_digest,
            stated["previous"],
            stated,
            finding=finding if column else None,
        )

    def _compare(
        self,
        executions: Sequence[tuple[int, Mapping[str, Any]]],
        records: SealedRecords,
        chunk: ExaminedChunk,
    ) -> None:
        found = records.find([UUID(stated["subject"]) for _, stated in executions])
        for sequence, stated in executions:
            record = found.get(UUID(stated["subject"]))
            chunk.executions += 1
            if record is None and self._was_erased(stated):
                continue
            if record is None:
                detail = f"the record of execution {stated['subject']} was removed"
                chunk.findings.append(Finding("missing record", sequence, detail))
            elif self._alteration_of(records, record, stated) and (
                difference := self._compare_again(records, record.pk, stated)
            ):
                detail = f"in the record of execution {record.pk}, {difference}"
                chunk.findings.append(Finding("altered record", sequence, detail))

    def _was_erased(self, stated: Mapping[str, Any]) -> bool:
        """Before we began, or since."""
        if self._erasures.covers_record(stated):
            return True
        self._erasures.read_on()
        return self._erasures.covers_record(stated)

    def _compare_again(self, records: SealedRecords, pk: UUID, stated: Mapping[str, Any]) -> str:
        """As it is now: bodies may have been erased, and tenants deleted, since we began."""
        record = records.find([pk]).get(pk)
        self._erasures.read_on()
        if record is None:
            return "" if self._erasures.covers_record(stated) else "all of it was removed"
        return self._alteration_of(records, record, stated)

    def _alteration_of(self, records: SealedRecords, record: Any, stated: Mapping[str, Any]) -> str:
        return records.alteration_of(
            record, stated, self._erasures, artifact_bytes=self._artifact_bytes
        )


def _altered_column(
    entry: LedgerEntry, stated: Mapping[str, Any], statement_digest: str
) -> str | None:
    """The first column that is not what the statement says."""
    # Entries of other kinds have none: with one, they would pass for a made-up execution's.
    execution_id = stated["subject"] if stated["kind"] == "execution" else None
    columns = (
        ("kind", entry.kind, stated.get("kind")),
        ("key_id", entry.key_id, stated.get("key_id")),
        ("at", moment(entry.at), stated.get("at")),
        ("execution_id", str(entry.execution_id) if entry.execution_id else None, execution_id),
        ("bound_row", entry.bound_row, bound_row_of(stated)),
        ("subject", entry.subject, subject_of(stated)),
        ("digest", entry.digest, statement_digest),
    )
    return next((name for name, found, said in columns if found != said), None)
