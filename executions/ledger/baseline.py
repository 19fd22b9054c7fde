"""Taking stock, once: what was there before the ledger bound it is entered as it is found.

After that, a row without an entry was added behind our back.
"""

from __future__ import annotations

from django.db import transaction
from django.db.models import Model

from executions.ledger.append import append
from executions.ledger.bindings import (
    BASELINE,
    BINDINGS,
    FOUND,
    NEVER_ENTERED,
    RowsRead,
    columns_of,
    model_of,
    row_hash,
)
from executions.ledger.bound_rows import Before, enter_row
from executions.ledger.entry import read_head
from executions.ledger.entry_format import parse
from executions.ledger.models import LedgerEntry
from executions.ledger.verification import verify_entry
from providers.fields import DecryptionError


def record_baseline() -> int:
    """Enter what was never entered, of models not taken into the ledger yet. How many there were.

    Safe to call at every start: each model, and each column of one, is taken in once. A row that
    is not as it was entered stays as it is, for the verifier to find, and so does one that was
    added behind our back to a model that was taken in before.
    """
    entered = 0
    with transaction.atomic(savepoint=False):
        read_head(lock=True)
        columns = {label: columns_of(model) for label, model in _models().items()}
        adopted = _adopted() or {}
        missing = [label for label in columns if not {*columns[label]} <= {*adopted.get(label, ())}]
        if not missing:
            return entered
        with RowsRead() as rows:
            kinds = {binding.kind for binding in BINDINGS.values()}
            for entry in LedgerEntry.objects.filter(kind__in=kinds).order_by("sequence").iterator():
                if (stated := parse(entry.statement)) is not None:
                    rows.read(stated)
            for label in missing:
                entered += sum(
                    _enter(rows, label, row, columns[label], label in adopted)
                    for row in _models()[label]._base_manager.order_by("pk")
                )
        append(BASELINE, "ledger", {"models": columns, "entered": entered})
    return entered


def _models() -> dict[str, type[Model]]:
    return {label: model for label in BINDINGS if (model := model_of(label)) is not None}


def _adopted() -> dict[str, list[str]] | None:
    """The columns of every model that was taken in; None before that was ever done."""
    adopted: dict[str, list[str]] | None = None
    for entry in LedgerEntry.objects.filter(kind=BASELINE).order_by("sequence"):
        if not verify_entry(entry):
            adopted = (adopted or {}) | entry.stated["models"]
    return adopted


def _enter(rows: RowsRead, label: str, row: Model, columns: list[str], was_adopted: bool) -> bool:
    said = rows.last_said(label, str(row.pk))
    if said is None and was_adopted:
        return False
    before = Before(NEVER_ENTERED)
    if said is not None:
        _, bound, expected = said
        before = Before(expected, rows.altered_at(label, str(row.pk)))
        if {*columns} <= {*bound}:
            return False
        try:
            if row_hash(row, bound) != expected:
                return False
        except (DecryptionError, AttributeError):
            return False
    enter_row(row, FOUND, before)
    return True
