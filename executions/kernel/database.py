"""The database: its failures and clock, consistent reads, writes in batches, online migrations.

SQLite has one lock for all who write, and gives it to whoever looks for it first. So a transaction
of many rows is short, and after each the lock stays free for a while: whoever waits for it looks
for it only now and then.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, Generic, TypeVar
from uuid import UUID

from django.db import NotSupportedError, connection, transaction
from django.db.backends.base.schema import BaseDatabaseSchemaEditor
from django.db.migrations import AddIndex, RemoveIndex
from django.db.migrations.state import ProjectState
from django.db.models import (
    BooleanField,
    CharField,
    FloatField,
    Index,
    Model,
    QuerySet,
    TextField,
)
from django.db.utils import Error, InterfaceError, InternalError, OperationalError

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


def is_refusal(error: Error) -> bool:
    """Whether PostgreSQL said why it does not do it: then nothing of the transaction is kept."""
    return getattr(error.__cause__, "sqlstate", None) in _POSTGRES


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


T = TypeVar("T")
Row = TypeVar("Row", bound=Model)


# The values that a database takes as they are, by the type of their column.
_AS_IT_IS = {CharField: str, TextField: str, FloatField: float, BooleanField: bool}


class Columns(Generic[Row]):
    """The columns of a model's table, for statements that are written out.

    The ORM compiles each query anew, and converts each value of a new row. On the path of every run
    that takes longer than the database.
    """

    def __init__(self, model: type[Row], *, leave_out: Sequence[str] = ()) -> None:
        """`leave_out` names columns that are read when an object is asked for them."""
        fields = {each.attname: each for each in model._meta.concrete_fields}
        self._model = model
        self._fields = {name: each for name, each in fields.items() if name not in leave_out}
        self.names = tuple(self._fields)
        self._as_it_is = {
            name: _AS_IT_IS[type(each)]
            for name, each in self._fields.items()
            if type(each) in _AS_IT_IS
        }
        # The converters belong to a connection, which belongs to a thread.
        self._kept = threading.local()

    def select(self, table: str) -> str:
        """What stands behind SELECT; `table` is the name that the statement has for the table."""
        return ", ".join(f"{table}.{each.column}" for each in self._fields.values())

    def read(self, values: Sequence[Any]) -> Row:
        """The object of the values of one row, in the order of `select`."""
        found = list(values)
        for place, expression, convert in self._converters():
            found[place] = convert(found[place], expression, connection)
        return self._model.from_db(connection.alias, self.names, found)

    def write(self, name: str, value: Any) -> Any:
        """The value of a column as the database takes it, which that of most types is already."""
        if value is None or type(value) is self._as_it_is.get(name):
            return value
        return self._fields[name].get_db_prep_save(value, connection)

    def _converters(self) -> list[tuple[int, Any, Callable[[Any, Any, Any], Any]]]:
        if getattr(self._kept, "operations", None) is not connection.ops:
            self._kept.operations = connection.ops
            self._kept.converters = [
                (place, each.cached_col, convert)
                for place, each in enumerate(self._fields.values())
                for convert in (
                    *connection.ops.get_db_converters(each.cached_col),
                    *each.get_db_converters(connection),
                )
            ]
        converters: list[tuple[int, Any, Callable[[Any, Any, Any], Any]]] = self._kept.converters
        return converters


# Of one transaction: the most rows, and the seconds after which it writes no more of them.
MOST_ROWS = 500
MOST_SECONDS = 0.025
# Rows of one statement. Between two statements it is seen how long the transaction took.
STATEMENT_ROWS = 50
# The lock stays free for as long as it was held, and no shorter than this.
_LEAST_PAUSE_SECONDS = 0.01
_MOST_PAUSE_SECONDS = 0.25


def in_batches(
    items: Iterable[T],
    write: Callable[[Sequence[T]], object],
    *,
    statement_rows: int = STATEMENT_ROWS,
) -> None:
    """Have `write` called with all items, so many at a time, in short transactions.

    `write` takes one statement or two. `items` are read between the transactions. What `write`
    raises ends it; the batches before are written.
    """
    left = iter(items)
    while batch := list(islice(left, MOST_ROWS)):
        while batch:
            with transaction.atomic():
                began = time.monotonic()
                written = 0
                while written < len(batch) and time.monotonic() - began < MOST_SECONDS:
                    write(batch[written : written + statement_rows])
                    written += statement_rows
            batch = batch[written:]
            let_others_write(time.monotonic() - began)


def delete_in_batches(rows: QuerySet[Row], *, key: str = "pk") -> int:
    """Delete these rows in short transactions. How many there were, without what goes with them.

    `key` is a unique column by which they are found in order, with an index. A row that is none of
    them any more when its turn comes stays.
    """
    deleted = 0

    def delete(keys: Sequence[Any]) -> None:
        nonlocal deleted
        gone = rows.filter(**{f"{key}__in": keys}).delete()[1]
        deleted += gone.get(rows.model._meta.label, 0)

    in_batches(keys_of(rows, key), delete)
    return deleted


def keys_of(rows: QuerySet[Row], key: str = "pk") -> Iterable[Any]:
    """The keys of these rows in order, a page at a time: no reading is open while others are
    written.
    """
    ordered = rows.order_by(key).values_list(key, flat=True)
    page = list(ordered[:MOST_ROWS])
    while page:
        yield from page
        page = list(ordered.filter(**{f"{key}__gt": page[-1]})[:MOST_ROWS])


def let_others_write(seconds_held: float = 0.0) -> None:
    """Leave SQLite's write lock free for a moment, after it was held for so long."""
    if connection.vendor == "sqlite" and not connection.in_atomic_block:
        pause = max(_LEAST_PAUSE_SECONDS, seconds_held)
        time.sleep(min(pause, _MOST_PAUSE_SECONDS))


class RemoveIndexOnline(RemoveIndex):
    """RemoveIndex that locks out nobody on PostgreSQL, where it needs `atomic = False`."""

    def database_forwards(
        self,
        app_label: str,
        schema_editor: BaseDatabaseSchemaEditor,
        from_state: ProjectState,
        to_state: ProjectState,
    ) -> None:
        if schema_editor.connection.vendor != "postgresql":
            super().database_forwards(app_label, schema_editor, from_state, to_state)
            return
        model = from_state.apps.get_model(app_label, self.model_name)
        if self.allow_migrate_model(schema_editor.connection.alias, model):
            index = from_state.models[app_label, self.model_name_lower].get_index_by_name(self.name)
            editor: Any = schema_editor
            editor.remove_index(model, index, concurrently=True)


class AddIndexOnline(AddIndex):
    """AddIndex that locks out nobody on PostgreSQL, where it needs `atomic = False`.

    One that was broken off there leaves an index that serves nothing; it is made anew.
    """

    def __init__(self, model_name: str, index: Index) -> None:
        super().__init__(model_name, index)

    def database_forwards(
        self,
        app_label: str,
        schema_editor: BaseDatabaseSchemaEditor,
        from_state: ProjectState,
        to_state: ProjectState,
    ) -> None:
        if schema_editor.connection.vendor != "postgresql":
            super().database_forwards(app_label, schema_editor, from_state, to_state)
            return
        if schema_editor.connection.in_atomic_block:
            raise NotSupportedError(
                f"{self.index.name}: a migration of AddIndexOnline is not atomic."
            )
        model = to_state.apps.get_model(app_label, self.model_name)
        if self.allow_migrate_model(schema_editor.connection.alias, model):
            editor: Any = schema_editor
            editor.remove_index(model, self.index, concurrently=True)
            editor.add_index(model, self.index, concurrently=True)
