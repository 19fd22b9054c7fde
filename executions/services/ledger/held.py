"""Legal holds as the ledger has them: what was put on hold and not lifted, by signed entries alone.

An entry's columns are anybody's to write, so its own statement says what it is of.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

from django.db.models import Q, QuerySet

from executions.models.ledger_entry import LedgerEntry
from executions.services.ledger.formats import parse, signed_bytes
from executions.services.ledger.keyring import is_signed_by
from executions.services.ledger.rows import ACCEPTED, ALTERED, DELETED

_KIND, _MODEL = "legal_hold", "executions.legalhold"
# By the row of each hold, its tenant and its execution; None is all of the tenant's.
Holds = MutableMapping[str, tuple[str, str | None]]


def of_holds(*, thorough: bool) -> Q:
    """Entries of holds. `thorough` reads all of the ledger, for those whose columns were changed:
    what is erased in spite of a hold is gone before a verification finds such a column.
    """
    by_column = Q(kind=_KIND)
    return by_column | Q(statement__contains=f'"kind":"{_KIND}"') if thorough else by_column


def entries_of_holds(*, thorough: bool) -> QuerySet[LedgerEntry]:
    return LedgerEntry.objects.filter(of_holds(thorough=thorough))


def authentic(entry: LedgerEntry, public_keys: Mapping[str, str]) -> dict[str, Any] | None:
    """What an entry states that one of these keys signed, in its place; None for any other."""
    stated = parse(entry.statement)
    if stated is None or stated.get("sequence") != entry.sequence:
        return None
    public_key = public_keys.get(str(stated.get("key_id")), "")
    is_signed = is_signed_by(public_key, signed_bytes(stated, entry.statement), entry.signature)
    return stated if is_signed else None


def note_hold(holds: Holds, stated: Mapping[str, Any]) -> None:
    """Take in what an authentic entry says of a hold, if it is of one."""
    if (stated.get("kind"), stated.get("model")) != (_KIND, _MODEL):
        return
    is_removal = stated["action"] == ACCEPTED and stated["row_hash"] is None
    if stated["action"] == ALTERED or is_removal:
        # Nobody who may has placed or lifted it: to lift one takes two, and its row.
        return
    if stated["action"] == DELETED:
        holds.pop(stated["row"], None)
    else:
        # What it held first: a row that says something else by now is not as it was entered.
        holds.setdefault(stated["row"], (stated["tenant_slug"], stated["execution"]))
