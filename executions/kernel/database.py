"""The database: failures told apart from everything else, its clock, and consistent reads."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any
from uuid import UUID

from django.db import connection, transaction
from django.db.utils import Error, InterfaceError, InternalError, OperationalError
from django.utils import timezone

from providers.errors import ProviderUnavailable

RETRY_SECONDS = 5.0

_AWAY = "The database cannot be reached."
_LOCKED = "The database is locked by another writer."
_FULL = "The disk of the database is full."
_READ_ONLY = "The database can only be read."

# https://www.sqlite.org/rescode.html: the lower eight bits say what kind of failure it is.
_SQLITE = {
    sqlite3.SQLITE_BUSY: _LOCKED,
    sqlite3.SQLITE_LOCKED: _LOCKED,
    sqlite3.SQLITE_FULL: _FULL,
    sqlite3.SQLITE_READONLY: _READ_ONLY,
    sqlite3.SQLITE_PERM: _READ_ONLY,
    sqlite3.SQLITE_IOERR: "The disk of the database cannot be read or written.",
    sqlite3.SQLITE_CANTOPEN: "The database's file cannot be opened.",
    sqlite3.SQLITE_CORRUPT: "The database's file is damaged.",
    sqlite3.SQLITE_NOTADB: "The database's file is damaged.",
}
# https://www.postgresql.org/docs/current/errcodes-appendix.html
_POSTGRES = {
    "25006": _READ_ONLY,
    "40P01": _LOCKED,
    "53100": _FULL,
    "55P03": _LOCKED,
    "57014": _LOCKED,
}


class DatabaseUnavailable(ProviderUnavailable):
    """Nothing can be recorded now.

    `ran` says whether any code ran, None where that is not known; `record_id` is the execution's,
    where there is or may be a row of it. `kept` says that its result waits in the journal.
    """

    def __init__(
        self,
        message: str,
        *,
        ran: bool | None = False,
        record_id: UUID | None = None,
        kept: bool = False,
    ) -> None:
        super().__init__(message, started=ran is not False, retry_after=RETRY_SECONDS)
        self.ran = ran
        self.record_id = record_id
        self.kept = kept


def problem_of(error: BaseException | None) -> str:
    """What is wrong with the database, in a sentence; "" for every other error.

    A missing table or a broken rule is a fault of the program or of its installation, and no
    reason to come again.
    """
    if not isinstance(error, Error):
        return ""
    cause: Any = error.__cause__
    if isinstance(cause, sqlite3.Error):
        code = getattr(cause, "sqlite_errorcode", None)
        return "" if code is None else _SQLITE.get(code & 0xFF, "")
    known = _POSTGRES.get(getattr(cause, "sqlstate", None) or "")
    if isinstance(error, OperationalError | InterfaceError):
        return known or _AWAY
    return known or "" if isinstance(error, InternalError) else ""


def nothing_ran(problem: str) -> DatabaseUnavailable:
    """What is told before anything was recorded or run."""
    return DatabaseUnavailable(f"{problem} Nothing was run or recorded. Send the request again.")


def database_problem() -> str:
    """Why the database cannot serve now, "" when it answers. Asks it."""
    try:
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1")
            cursor.fetchone()
    except Error as error:
        return problem_of(error) or _AWAY
    return ""


# As Django's `Now()` has it, for statements that are written out.
NOW = {
    "sqlite": "STRFTIME('%%Y-%%m-%%d %%H:%%M:%%f', 'NOW')",
    "postgresql": "STATEMENT_TIMESTAMP()",
}


@contextmanager
def snapshot_read() -> Iterator[None]:
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


@contextmanager
def limit_lock_wait(seconds: float) -> Iterator[None]:
    """Wait for SQLite's write lock for so long only, with what can be left undone."""
    if connection.vendor != "sqlite":
        yield
        return
    _set_busy_timeout(int(seconds * 1000))
    try:
        yield
    finally:
        _set_busy_timeout(int(connection.settings_dict["OPTIONS"].get("timeout", 5)) * 1000)


def _set_busy_timeout(milliseconds: int) -> None:
    # Within every request that only reads: past the layers of a cursor, it costs a tenth.
    connection.ensure_connection()
    connection.connection.execute(f"PRAGMA busy_timeout = {milliseconds}")


def hour_of(moment: datetime) -> datetime:
    """When its hour began, by UTC."""
    return timezone.localtime(moment, timezone.get_fixed_timezone(0)).replace(
        minute=0, second=0, microsecond=0
    )
