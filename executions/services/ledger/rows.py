"""Comparing bound rows with what the ledger said of them last."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping
from typing import Any

from django.conf import settings
from django.db.models import Model

from executions.models.ledger_entry import LedgerEntry
from executions.services.ledger.bindings import (
    BINDINGS,
    encrypted_columns,
    model_of,
    row_hash,
)
from executions.services.ledger.keyring import public_key_id
from executions.services.ledger.marks import Problem
from providers.fields import DecryptionError

BASELINE = "baseline"
DELETED = "deleted"
FOUND = "found"
# What a row is entered as that somebody changed past the service, and what somebody with the
# server's shell says of it later.
ALTERED = "altered outside"
ACCEPTED = "accepted"
# What an entry says of the row before, where it has no hash of it: nothing was ever entered of it;
# no key vouches for its last entry; it could not be compared.
NEVER_ENTERED = "never entered"
NOT_VOUCHED_FOR = "not vouched for"
NOT_COMPARED = "not compared"
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
            " former TEXT, altered INTEGER, key_id TEXT, PRIMARY KEY (model, row)) WITHOUT ROWID"
        )

    def __enter__(self) -> RowsRead:
        return self

    def __exit__(self, *_: object) -> None:
        self._said.close()

    def read(self, stated: Mapping[str, Any]) -> str:
        """Take in what an authentic entry says of a row. What it tells of an alteration, which no
        later entry makes good; "" where it tells of none."""
        if stated["kind"] == BASELINE:
            self.adopted.update(stated["models"])
        if "row_hash" not in stated:
            return ""
        place = (stated["model"], stated["row"])
        said = self._said.execute(
            "SELECT sequence, hash, former, key_id FROM said WHERE model = ? AND row = ?", place
        ).fetchone()
        problem = self._alteration(stated, said)
        if stated["action"] == DELETED or stated["row_hash"] is None:
            self._said.execute("DELETE FROM said WHERE model = ? AND row = ?", place)
            return problem
        # Taking stock enters a row that is as it was, and whoever changes it at that moment may
        # have compared it with the entry before.
        former = said[1] if said is not None and stated["action"] == FOUND else None
        is_altered = stated["action"] == ALTERED
        self._said.execute(
            "INSERT OR REPLACE INTO said VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (
                *(*place, stated["sequence"], json.dumps(stated["columns"]), stated["row_hash"]),
                *(former, stated["sequence"] if is_altered else stated.get("altered_at")),
                stated["key_id"],
            ),
        )
        return problem

    def _alteration(self, stated: Mapping[str, Any], said: tuple[int, str, str, str] | None) -> str:
        row = f"{stated['model']} {stated['row']}"
        if stated["action"] == ALTERED:
            return f"{row} was changed outside the service: {stated['because']}"
        before = stated["before"]
        if before == NOT_COMPARED:
            return ""
        if before == NEVER_ENTERED:
            is_right = said is None and stated["model"] not in self.adopted
        elif before == NOT_VOUCHED_FOR:
            # Somebody may have put its key into the settings since.
            named = {public_key_id(key) for key in settings.LEDGER_TRUSTED_KEYS}
            is_right = said is None or said[3] in named
        elif before is None:
            is_right = said is None
        else:
            is_right = said is not None and before in said[1:3]
        if is_right:
            return ""
        last = "no entry says it was" if said is None else f"entry {said[0]} left it"
        return f"{row} was changed outside the service: it was not as {last}"

    def keep(self) -> None:
        self._said.commit()

    def look(self) -> bool:
        """Compare every bound row; whether any is not as it was entered, as far as was read."""
        for label in BINDINGS:
            if (model := model_of(label)) is not None:
                self._look_at_model(label, model)
        return bool(self._said.execute("SELECT EXISTS (SELECT 1 FROM said)").fetchone()[0])

    def problems(self, end: int) -> Iterator[Problem]:
        """What is still not as it was entered, of what `look` left: rows changed or removed, and
        at `end` rows added. Call it while nothing can be entered, with all entries read.
        """
        for label, row, sequence in self._said.execute("SELECT model, row, sequence FROM said"):
            model = model_of(label) if label in BINDINGS else None
            if model is None:
                continue
            found = model._base_manager.filter(pk=row).defer(*encrypted_columns(model)).first()
            if found is not None:
                detail = self._difference(label, found)
                if detail and sequence:
                    yield "altered record", sequence, f"{label} {row} {detail}"
                elif detail:
                    yield "missing", end, f"{label} {row} {detail}"
            elif sequence:
                yield "missing record", sequence, f"{label} {row} was removed"

    def _look_at_model(self, label: str, model: type[Model]) -> None:
        """Forget the rows that are as they should be, and note those that nothing was said of."""
        after: Any = None
        while True:
            # A lost key must not end the reading: what is encrypted is read row by row.
            rows = model._base_manager.order_by("pk").defer(*encrypted_columns(model))
            chunk = list((rows if after is None else rows.filter(pk__gt=after))[:_AT_ONCE])
            if not chunk:
                return
            for row in chunk:
                self.compared += 1
                place = (label, str(row.pk))
                if not self._difference(label, row):
                    self._said.execute("DELETE FROM said WHERE model = ? AND row = ?", place)
                elif self.last_said(*place) is None:
                    self._said.execute(
                        "INSERT INTO said VALUES (?, ?, 0, '', '', NULL, NULL, NULL)", place
                    )
            after = chunk[-1].pk

    def last_said(self, label: str, row: str) -> tuple[int, list[str], str] | None:
        """The entry that spoke of a row last, the columns it binds, and their hash."""
        said = self._said.execute(
            "SELECT sequence, columns, hash FROM said WHERE model = ? AND row = ?", (label, row)
        ).fetchone()
        return None if said is None or not said[0] else (said[0], json.loads(said[1]), said[2])

    def altered_at(self, label: str, row: str) -> int | None:
        """The entry that tells of an alteration of the row which nobody has accepted since."""
        found = self._said.execute(
            "SELECT altered FROM said WHERE model = ? AND row = ?", (label, row)
        ).fetchone()
        return found[0] if found else None

    def _difference(self, label: str, row: Model) -> str:
        """How a row differs from what was said of it last; "" when it does not."""
        said = self.last_said(label, str(row.pk))
        if said is None and label not in self.adopted:
            self.unproven += 1
            return ""
        if said is None:
            return "has no entry: it was added outside the service"
        _, columns, expected = said
        try:
            if row_hash(row, columns) != expected:
                return "was changed"
        except (DecryptionError, AttributeError, ValueError) as error:
            return f"cannot be compared: {error}"
        return BINDINGS[label].check(row)
