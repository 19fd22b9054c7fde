"""Comparing bound rows with what the ledger said of them last."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping
from typing import Any

from django.db.models import Model

from executions.models import LedgerEntry
from executions.services.ledger.bindings import (
    BINDINGS,
    encrypted_columns,
    model_of,
    row_hash,
)
from executions.services.ledger.marks import Problem
from providers.fields import DecryptionError

BASELINE = "baseline"
DELETED = "deleted"
_AT_ONCE = 200


def has_taken_stock() -> bool:
    """Whether rows were ever taken into this ledger as a whole, so that each must have an entry."""
    return LedgerEntry.objects.filter(kind=BASELINE).exists()


class RowsRead:
    """What the entries read so far say of each row, in a temporary file: rows may be many."""

    def __init__(self) -> None:
        self.compared = 0
        # Rows that were never entered, of models that were never taken into the ledger as a whole.
        self.unproven = 0
        self.adopted: dict[str, list[str]] = {}
        # "" is a file that SQLite keeps to itself and removes.
        self._said = sqlite3.connect("")
        self._said.execute(
            "CREATE TABLE said (model TEXT, row TEXT, sequence INTEGER, columns TEXT, hash TEXT,"
            " PRIMARY KEY (model, row)) WITHOUT ROWID"
        )

    def __enter__(self) -> RowsRead:
        return self

    def __exit__(self, *_: object) -> None:
        self._said.close()

    def read(self, stated: Mapping[str, Any]) -> None:
        """Take in what an authentic entry says of a row."""
        if stated["kind"] == BASELINE:
            self.adopted.update(stated["models"])
        if "row_hash" not in stated:
            return
        if stated["action"] == DELETED:
            place = (stated["model"], stated["row"])
            self._said.execute("DELETE FROM said WHERE model = ? AND row = ?", place)
            return
        self._said.execute(
            "INSERT OR REPLACE INTO said VALUES (?, ?, ?, ?, ?)",
            (
                *(stated["model"], stated["row"], stated["sequence"]),
                *(json.dumps(stated["columns"]), stated["row_hash"]),
            ),
        )

    def keep(self) -> None:
        self._said.commit()

    def compare(self, end: int) -> Iterator[Problem]:
        """What is not as it was entered: rows changed, removed, and at `end` rows added."""
        for label in BINDINGS:
            model = model_of(label)
            if model is not None:
                yield from self._compare_model(label, model, end)
        for label, row, sequence in self._said.execute("SELECT model, row, sequence FROM said"):
            if label in BINDINGS:
                yield "missing record", sequence, f"{label} {row} was removed"

    def _compare_model(self, label: str, model: type[Model], end: int) -> Iterator[Problem]:
        after: Any = None
        while True:
            # A lost key must not end the reading: what is encrypted is read row by row.
            rows = model._base_manager.order_by("pk").defer(*encrypted_columns(model))
            chunk = list((rows if after is None else rows.filter(pk__gt=after))[:_AT_ONCE])
            if not chunk:
                return
            for row in chunk:
                self.compared += 1
                yield from self._compare_row(label, row, end)
            after = chunk[-1].pk

    def last_said(self, label: str, row: str) -> tuple[int, list[str], str] | None:
        """The entry that spoke of a row last, the columns it binds, and their hash."""
        said = self._said.execute(
            "SELECT sequence, columns, hash FROM said WHERE model = ? AND row = ?", (label, row)
        ).fetchone()
        return None if said is None else (said[0], json.loads(said[1]), said[2])

    def _compare_row(self, label: str, row: Model, end: int) -> Iterator[Problem]:
        place = (label, str(row.pk))
        said = self.last_said(*place)
        if said is None and label not in self.adopted:
            self.unproven += 1
            return
        if said is None:
            yield "missing", end, f"{label} {row.pk} has no entry: it was added behind our back"
            return
        self._said.execute("DELETE FROM said WHERE model = ? AND row = ?", place)
        sequence, columns, expected = said
        try:
            found = row_hash(row, columns)
        except (DecryptionError, AttributeError, ValueError) as error:
            yield "altered record", sequence, f"{label} {row.pk} cannot be compared: {error}"
            return
        if found != expected:
            yield "altered record", sequence, f"{label} {row.pk} was changed"
        elif problem := BINDINGS[label].check(row):
            yield "altered record", sequence, f"{label} {row.pk}: {problem}"
