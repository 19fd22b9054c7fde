"""How often this process waits for an answer of PostgreSQL, whatever was asked with it."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from django.db.backends.utils import CursorWrapper

from executions.kernel.postgresql.base import DatabaseWrapper


@contextmanager
def round_trips() -> Iterator[list[str]]:
    """Note what is asked on connections that are opened within it: the latest statement of each
    round trip, "" before the first one."""
    found: list[str] = []
    latest = [""]
    wait, execute = DatabaseWrapper._wait, CursorWrapper.execute

    def wait_noted(database: Any, connection: Any, real: Any, asked: Any, **options: Any) -> Any:
        return wait(database, connection, real, _noted(asked, found, latest), **options)

    def execute_noted(cursor: Any, sql: Any, params: Any = None) -> Any:
        latest[0] = str(sql)
        return execute(cursor, sql, params)

    with (
        patch.object(DatabaseWrapper, "_wait", wait_noted),
        patch.object(CursorWrapper, "execute", execute_noted),
    ):
        yield found


def _noted(
    asked: Generator[Any, Any, Any], found: list[str], latest: list[str]
) -> Generator[Any, Any, Any]:
    """What psycopg asks of the connection: one exchange, unless nothing is waited for."""
    try:
        wanted = next(asked)
    except StopIteration as ended:
        return ended.value
    found.append(latest[0])
    while True:
        try:
            wanted = asked.send((yield wanted))
        except StopIteration as ended:
            return ended.value
