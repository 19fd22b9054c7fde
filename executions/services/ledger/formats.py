"""How an entry is written and signed: as RFC 8785 has it, by its number and digest.

So the signature alone, without the statement, is a checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from executions.services.ledger.canonical import canonical, digest

FORMAT = 1
# Characters of a subject that its column has.
_MOST_SUBJECT = 200

# What is signed starts with it, so that nothing else a key signs can pass for an entry.
DOMAIN = b"cofferdam-ledger-1\n"


def parse(statement: str) -> dict[str, Any] | None:
    """What a statement states; None when it is not written as the format it names has it."""
    try:
        stated = json.loads(statement)
        if not isinstance(stated, dict) or write(stated) != statement:
            return None
    except (ValueError, TypeError, RecursionError):
        return None
    sequence = stated.get("sequence")
    return stated if isinstance(sequence, int) and not isinstance(sequence, bool) else None


def bound_row_of(stated: Mapping[str, Any]) -> str | None:
    """What the column `bound_row` of this entry holds; None for an entry of an execution."""
    if stated["kind"] == "execution":
        return None
    return row_name(stated["model"], stated["row"]) if "row_hash" in stated else ""


def subject_of(stated: Mapping[str, Any]) -> str:
    """What the column `subject` of this entry holds. Of an execution it is the tenant: its id has
    a column of its own."""
    return column_of(stated["tenant" if stated["kind"] == "execution" else "subject"])


def column_of(subject: str) -> str:
    """A subject as the column `subject` has it."""
    return subject[:_MOST_SUBJECT]


def row_name(model: str, row: str) -> str:
    """A row as the column `bound_row` has it."""
    return f"{model} {row}"


def write(stated: Mapping[str, Any]) -> str:
    """The statement's text. Raises ValueError for a format that this version does not know."""
    if stated.get("ledger") != FORMAT:
        raise ValueError(f"format {stated.get('ledger')!r} is not known here")
    return canonical(stated)


def signed_bytes(stated: Mapping[str, Any], statement: str) -> bytes:
    """What the signature of this entry is over."""
    return place_bytes(stated["sequence"], digest(statement))


def place_bytes(sequence: int, statement_digest: str) -> bytes:
    """What is signed of an entry."""
    return DOMAIN + f"{sequence}\n{statement_digest}".encode()


def line_bytes(line: Mapping[str, Any]) -> bytes:
    """What is signed of a line of the checkpoints, its signature left out."""
    return DOMAIN + b"checkpoint\n" + canonical(line).encode()
