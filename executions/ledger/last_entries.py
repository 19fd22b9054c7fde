"""Finding the entry that spoke of a row last, by an index.

The index is a column, `bound_row`, which repeats the signed statement. Whoever changes it can hide
an entry from here for a time. `verify_ledger` compares it with the statement. What was entered
meanwhile is a finding for good: each entry names the hash of the row before, and that is not the
one of the hidden entry.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from executions.ledger.bindings import ALTERED, BASELINE, BINDINGS, DELETED
from executions.ledger.entry_format import bound_row_of, column_of, parse, row_name
from executions.ledger.erasures import authentic
from executions.ledger.models import LedgerEntry
from executions.ledger.trust import configured_keys, trusted_keys

_MOST_KEPT = 2000


@dataclass(frozen=True)
class LastEntry:
    """What an entry says of a row. `problem` says why it cannot be believed, "" where it can;
    `is_forged` whether it is not what one of our keys signed."""

    sequence: int
    stated: Mapping[str, Any]
    problem: str = ""
    is_forged: bool = False

    @property
    def is_there(self) -> bool:
        """Whether the row is there, by this entry."""
        return self.stated["action"] != DELETED and self.stated["row_hash"] is not None

    @property
    def columns(self) -> list[str]:
        return cast("list[str]", self.stated["columns"])

    @property
    def row_hash(self) -> str | None:
        return cast("str | None", self.stated["row_hash"])

    @property
    def altered_at(self) -> int | None:
        """The entry that tells of an alteration which nobody has accepted since."""
        if self.stated["action"] == ALTERED:
            return self.sequence
        return cast("int | None", self.stated.get("altered_at"))


def last_entry(label: str, row: str) -> LastEntry | None:
    """The newest entry of a row, None where there is none. Raises LedgerUnavailable.

    It is only then the newest for long when the caller's transaction holds the row.
    """
    of_row = LedgerEntry.objects.filter(bound_row=row_name(label, row))
    found = of_row.order_by("-sequence").first()
    return None if found is None else _read(found, label, row)


def _read(entry: LedgerEntry, label: str, row: str) -> LastEntry:
    keys = configured_keys()
    if entry.key_id not in keys:
        keys = trusted_keys()
    stated = authentic(entry, keys)
    if stated is not None and bound_row_of(stated) == row_name(label, row):
        return LastEntry(entry.sequence, stated)
    nothing: dict[str, Any] = {"action": "", "row_hash": None, "columns": []}
    if entry.key_id not in keys:
        problem = f"no key of LEDGER_KEYS vouches for entry {entry.sequence}"
        return LastEntry(entry.sequence, nothing, problem)
    problem = f"its entry {entry.sequence} is not what was signed"
    return LastEntry(entry.sequence, nothing, problem, is_forged=True)


def rows_called(label: str, subject: str) -> list[str]:
    """The rows of a model that some entry calls by this subject. They may be called otherwise by
    now, or be gone."""
    entries = LedgerEntry.objects.filter(kind=BINDINGS[label].kind, subject=column_of(subject))
    stated = filter(None, (parse(entry.statement) for entry in entries))
    said = (label, subject)
    return sorted(
        {str(each["row"]) for each in stated if (each.get("model"), each.get("subject")) == said}
    )


def has_adopted(label: str) -> bool:
    """Whether stock was taken of the rows of this model, so that each must have an entry."""
    baselines = LedgerEntry.objects.filter(kind=BASELINE).order_by("-sequence")
    if not (entries := list(baselines)):
        return False
    keys = trusted_keys()
    return any(label in (authentic(entry, keys) or {"models": ()})["models"] for entry in entries)


class _Written(threading.local):
    """The newest entry of each row that this thread has written, which may be undone by now, and
    how many it had written then."""

    def __init__(self) -> None:
        self.number = 0
        self.entries: dict[tuple[str, str], tuple[int, LedgerEntry]] = {}


_written = _Written()


def number_written() -> int:
    """How many entries of rows this thread has written."""
    return _written.number


def note_written(label: str, row: str, entry: LedgerEntry) -> None:
    if len(_written.entries) >= _MOST_KEPT:
        _written.entries.clear()
    _written.number += 1
    _written.entries[label, row] = (_written.number, entry)


def written_since(label: str, row: str, number: int) -> LedgerEntry | None:
    """The newest entry of the row, if this thread has written it after `number` others and it was
    not undone."""
    written, entry = _written.entries.get((label, row), (0, None))
    if entry is None or written <= number:
        return None
    there = LedgerEntry.objects.filter(sequence=entry.sequence, digest=entry.digest)
    return entry if there.exists() else None
