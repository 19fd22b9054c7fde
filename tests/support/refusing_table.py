"""A table that takes no new rows, as on a full disk, on every database we support."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from django.db import connection

_MADE = {
    "sqlite": (
        "CREATE TRIGGER refusing BEFORE INSERT ON {table} WHEN {where}"
        " BEGIN SELECT RAISE(ABORT, '{says}'); END",
    ),
    "postgresql": (
        "CREATE FUNCTION refuse_row() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN RAISE EXCEPTION '{says}'; END $$",
        "CREATE TRIGGER refusing BEFORE INSERT ON {table} FOR EACH ROW WHEN ({where})"
        " EXECUTE FUNCTION refuse_row()",
    ),
}
_REMOVED = {
    "sqlite": ("DROP TRIGGER refusing",),
    "postgresql": ("DROP FUNCTION refuse_row() CASCADE",),
}


@contextmanager
def refusing_rows(table: str, says: str, where: str = "1 = 1") -> Iterator[None]:
    """`where` is a condition on NEW: only such rows are refused."""
    _run(*(made.format(table=table, says=says, where=where) for made in _MADE[connection.vendor]))
    try:
        yield
    finally:
        _run(*_REMOVED[connection.vendor])


def _run(*statements: str) -> None:
    with connection.cursor() as cursor:
        for statement in statements:
            cursor.execute(statement)
