"""Entering what happened to a bound row, with one hash over all that is bound of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from decimal import Decimal
from typing import Any, cast

from django.db.models import Model

from executions.models import LedgerEntry
from executions.services.ledger.append import append
from executions.services.ledger.bindings import BINDINGS, columns_of, row_hash
from executions.services.ledger.canonical import moment
from executions.services.ledger.rows import DELETED
from executions.text import storable_value


def enter_row(row: Model, action: str, said: Mapping[str, Any] | None = None) -> None:
    """Enter the row as the database has it now, in the transaction that made it so.

    `said` is what the entry tells beside its columns. Raises LedgerUnavailable.
    """
    label = row._meta.label_lower
    binding = BINDINGS[label]
    columns: list[str] = []
    found = None
    if action != DELETED:
        columns = columns_of(type(row))
        # Read again: what was saved may be a text for a date, or a number not yet rounded.
        found = row_hash(type(row)._base_manager.get(pk=row.pk), columns)
        if binding.only_if_changed and found == _last_hash(binding.kind, label, row.pk):
            return
    content = {
        **_facts(row, binding.shown),
        **(said or {}),
        "action": action,
        "model": label,
        "row": str(row.pk),
        "columns": columns,
        "row_hash": found,
    }
    append(binding.kind, _subject(row), content)


def _subject(row: Model) -> str:
    binding = BINDINGS[row._meta.label_lower]
    if binding.subject == "pk":
        return f"{row._meta.model_name} {row.pk}"
    return str(getattr(row, binding.subject) or "")


def _facts(row: Model, shown: tuple[str, ...] | None) -> dict[str, Any]:
    facts = {}
    for column in row._meta.concrete_fields:
        if column.attname in shown if shown is not None else not column.primary_key:
            value = getattr(row, column.attname)
            if isinstance(value, datetime):
                value = moment(value)
            facts[column.attname] = format(value, "f") if isinstance(value, Decimal) else value
    return cast("dict[str, Any]", storable_value(facts))


def _last_hash(kind: str, label: str, pk: Any) -> str | None:
    named = f'"row":{json.dumps(str(pk))}'
    newest = LedgerEntry.objects.filter(kind=kind, statement__contains=named).order_by("-sequence")
    for entry in newest.iterator():
        stated = entry.stated
        if (stated["model"], stated["row"]) == (label, str(pk)):
            return cast("str | None", stated["row_hash"])
    return None
