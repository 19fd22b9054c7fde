"""Reading several numbers that have to fit together, while others go on writing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from django.db import connection, transaction


@contextmanager
def one_moment() -> Iterator[None]:
    """All that is read within is of one moment, and nobody waits for it. Only for reading.

    Within a transaction that is open already it is that one's.
    """
    if connection.in_atomic_block:
        yield
        return
    if connection.vendor != "sqlite":
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
            yield
        return
    # Django's own transactions begin as writers (see sandbox_site.database).
    connection.ensure_connection()
    connection.connection.execute("BEGIN DEFERRED")
    try:
        yield
    finally:
        connection.connection.execute("COMMIT")
