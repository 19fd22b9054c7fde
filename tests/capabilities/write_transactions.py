"""What is written in one transaction, seen from the statements of this thread's connection."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from django.db import connection

_WRITES = ("INSERT", "UPDATE", "DELETE", "REPLACE")


@contextmanager
def write_transactions() -> Iterator[list[list[tuple[str, Any]]]]:
    """One list for each transaction that SQLite begins as a writer: its writing statements.

    For tests that are `only_on` SQLite: only there a BEGIN is a statement. A statement of its own is a transaction of its own.
    """
    found: list[list[tuple[str, Any]]] = []

    def note(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if sql.startswith("BEGIN IMMEDIATE"):
            found.append([])
        elif sql.startswith(_WRITES):
            if not connection.in_atomic_block:
                found.append([])
            found[-1].append((sql, params))
        return execute(sql, params, many, context)

    with connection.execute_wrapper(note):
        yield found
