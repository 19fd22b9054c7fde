"""Reading the whole ledger again, and saying where it is not what it was."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from executions.models import Execution, LedgerEntry
from executions.services.ledger import checkpoints
from executions.services.ledger.append import FIRST_PREVIOUS
from executions.services.ledger.canonical import canonical, digest, moment
from executions.services.ledger.keyring import is_signed_by, keyring, public_key_id
from executions.services.ledger.records import Erasures, compare, unentered

CHUNK = 500


@dataclass(frozen=True)
class Finding:
    """What is wrong, at which entry. `kind` is what was probably done."""

    kind: str
    sequence: int
    detail: str

    def __str__(self) -> str:
        return f"entry {self.sequence}: {self.kind}: {self.detail}"


@dataclass
class Verification:
    """What was read, and what was found wrong with it, in the order of the entries."""

    entries: int = 0
    executions: int = 0
    head: str = ""
    checkpoints: int = 0
    findings: list[Finding] = field(default_factory=list)

    @property
    def is_intact(self) -> bool:
        return not self.findings


def verify(
    *,
    records: bool = True,
    report: Callable[[Verification], None] = lambda verification: None,
) -> Verification:
    """Check every signature, the sequence, the checkpoints and, with `records`, every execution.

    Holds one chunk in memory. `report` is called after each chunk. Raises LedgerUnavailable when
    LEDGER_KEYS holds no key: without one, nothing can be trusted.
    """
    reading = _Reading(records)
    for chunk in _chunks():
        reading.read(chunk)
        report(reading.found)
    return reading.finish()


def verify_entry(entry: LedgerEntry) -> str:
    """What is wrong with this entry by itself, "" when nothing is. Its place is not looked at."""
    stated = _parsed(entry.statement)
    if stated is None:
        return "the entry's statement is not canonical JSON"
    key = keyring().get(stated.get("key_id", ""))
    if key is None:
        return f"LEDGER_KEYS does not hold the key {stated.get('key_id')!r} it names"
    if not is_signed_by(key.public_key, entry.statement, entry.signature):
        return "the entry's signature does not fit"
    return ""


def check_receipt(receipt: Mapping[str, Any]) -> Finding | None:
    """Whether the ledger still says what a receipt says that was given out; None when it does.

    Raises ValueError for what is no receipt, or none that a key of LEDGER_KEYS signed: it then
    tells nothing about the ledger.
    """
    stated = {name: value for name, value in receipt.items() if name != "signature"}
    sequence, statement = stated.get("sequence"), canonical(stated)
    key = keyring().get(str(stated.get("key_id")))
    signature = receipt.get("signature")
    if not isinstance(sequence, int) or not isinstance(signature, str):
        raise ValueError("it is no receipt")
    if key is None or not is_signed_by(key.public_key, statement, signature):
        raise ValueError("no key of LEDGER_KEYS signed it")
    entry = LedgerEntry.objects.filter(sequence=sequence).first()
    if entry is None:
        return Finding("missing", sequence, "a receipt was given out for it")
    if entry.statement != statement:
        return Finding("replaced", sequence, "a receipt was given out that says something else")
    return None


def _chunks() -> Iterator[list[LedgerEntry]]:
    after: int | None = None
    while True:
        rows = LedgerEntry.objects.order_by("sequence")
        chunk = list((rows if after is None else rows.filter(sequence__gt=after))[:CHUNK])
        if not chunk:
            return
        yield chunk
        after = chunk[-1].sequence


class _Reading:
    """How far it was read, and what is known by then."""

    def __init__(self, records: bool) -> None:
        self.found = Verification()
        self.trusted = {key.key_id: key.public_key for key in keyring().values()}
        self.public_keys = dict(self.trusted)
        self.erasures = Erasures.entered() if records else None
        self.marks, damaged = _checkpoints(self.found)
        self.found.checkpoints = len(self.marks)
        self.damaged_history = damaged
        self.expected = 1
        self.previous: str | None = FIRST_PREVIOUS
        self.last_key_id = ""
        self.began_at: Any = None

    def read(self, chunk: Sequence[LedgerEntry]) -> None:
        intact: list[tuple[LedgerEntry, dict[str, Any]]] = []
        for entry in chunk:
            stated = self._read_entry(entry)
            if stated is not None:
                intact.append((entry, stated))
        if self.erasures is not None:
            self._read_executions(intact, self.erasures)

    def finish(self) -> Verification:
        found = self.found
        if self.last_key_id and self.last_key_id not in self.trusted:
            self._find(
                "untrusted key",
                self.expected - 1,
                f"LEDGER_KEYS does not hold the key {self.last_key_id} of the newest entry",
            )
        beyond = [sequence for sequence in self.marks if sequence >= self.expected]
        if beyond:
            self._find(
                "truncated",
                self.expected,
                f"the checkpoints know entries up to {max(beyond)}: the end was cut off, or an "
                "older copy of the database is in use",
            )
        if self.erasures is not None:
            for execution_id in unentered(self.began_at):
                self._find(
                    "missing", self.expected, f"execution {execution_id} ended without an entry"
                )
        for number in self.damaged_history:
            self._find(
                "altered checkpoint", self.expected, f"line {number} of the checkpoints is not ours"
            )
        found.findings.sort(key=lambda finding: finding.sequence)
        return found

    def _find(self, kind: str, sequence: int, detail: str) -> None:
        self.found.findings.append(Finding(kind, sequence, detail))

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
        known = self.marks.get(entry.sequence)
        if stated is not None and known not in (None, digest(entry.statement)):
            self._find(
                "replaced",
                entry.sequence,
                "it is signed, but another entry was committed here: the ledger was continued "
                "from an older copy of the database",
            )
        self.expected = entry.sequence + 1
        self.previous = None if stated is None else digest(entry.statement)
        self.last_key_id = entry.key_id
        self.found.entries += 1
        self.found.head = entry.digest
        return stated

    def _authentic(self, entry: LedgerEntry) -> dict[str, Any] | None:
        """The statement, if a known key signed it."""
        stated = _parsed(entry.statement)
        if stated is None:
            self._find("altered", entry.sequence, "its statement is not canonical JSON")
            return None
        key_id = stated.get("key_id")
        if stated["sequence"] == 1:
            # Nobody could have introduced the first key. The trusted end commits to this one.
            self._learn_key(stated)
        public_key = self.public_keys.get(key_id) if isinstance(key_id, str) else None
        if public_key is None:
            self._find("altered", entry.sequence, f"no known key {key_id!r} can have signed it")
            return None
        if not is_signed_by(public_key, entry.statement, entry.signature):
            self._find("altered", entry.sequence, "its signature does not fit its statement")
            return None
        self._learn_key(stated)
        return stated

    def _learn_key(self, stated: Mapping[str, Any]) -> None:
        """Believe the key that an entry introduces."""
        if stated.get("kind") != "ledger_key":
            return
        public_key, subject = stated.get("public_key"), stated.get("subject")
        try:
            if isinstance(public_key, str) and public_key_id(public_key) == subject:
                self.public_keys.setdefault(subject, public_key)
        except ValueError:
            return

    def _check_place(self, entry: LedgerEntry, stated: Mapping[str, Any]) -> None:
        if self.began_at is None:
            self.began_at = entry.at
        repeated = {
            "kind": entry.kind,
            "key_id": entry.key_id,
            "at": moment(entry.at),
        }
        if entry.kind == "execution":
            repeated["subject"] = str(entry.execution_id)
        differing = [name for name, value in repeated.items() if stated.get(name) != value]
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

    def _read_executions(
        self, intact: Sequence[tuple[LedgerEntry, dict[str, Any]]], erasures: Erasures
    ) -> None:
        wanted = {entry.execution_id: entry for entry, _ in intact if entry.kind == "execution"}
        rows = (
            Execution.objects.filter(pk__in=list(wanted))
            .defer("pending")
            .prefetch_related("artifacts")
        )
        executions = {execution.pk: execution for execution in rows}
        for entry, stated in intact:
            if entry.kind != "execution":
                continue
            execution = executions.get(UUID(stated["subject"]))
            self.found.executions += 1
            if execution is None:
                detail = f"the record of execution {entry.execution_id} was removed"
                self._find("missing record", entry.sequence, detail)
            elif difference := compare(execution, stated, erasures):
                detail = f"in the record of execution {execution.pk}, {difference}"
                self._find("altered record", entry.sequence, detail)


def _parsed(statement: str) -> dict[str, Any] | None:
    try:
        stated = json.loads(statement)
        if not isinstance(stated, dict) or canonical(stated) != statement:
            return None
    except (ValueError, RecursionError):
        return None
    return stated if isinstance(stated.get("sequence"), int) else None


def _checkpoints(found: Verification) -> tuple[dict[int, str], list[int]]:
    history, damaged = checkpoints.history()
    marks = {point.sequence: point.digest for point in history}
    try:
        head = checkpoints.head()
    except ValueError:
        found.findings.append(Finding("altered checkpoint", 1, "head.json is damaged"))
        return marks, damaged
    if head is not None:
        marks.setdefault(head.sequence, head.digest)
    return marks, damaged
