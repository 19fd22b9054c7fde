"""Django's PostgreSQL engine, with fewer round trips and a bound for each.

A transaction's BEGIN is sent together with its first statement. So is a `DeferredStatement` with
the next statement, or with COMMIT. They are one message of several statements, which the server
executes in turn, each with a snapshot of its own; the first error ends it.

A server that is paused, or whose host hangs, takes every byte and says nothing. No setting of the
server and no keep-alive notices that: the kernel there still acknowledges. So the client keeps the
time, as psycopg does itself while it connects (`connect_timeout`).
"""

from __future__ import annotations

import math
import select
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import psycopg
from django.db.backends.postgresql import base
from django.db.backends.utils import debug_transaction
from psycopg._queries import PostgresQuery
from psycopg.pq import TransactionStatus

from executions.kernel.postgresql import DeferredStatement, answer_within

# A connection that answered within this time is looked at, and not asked, before it is used again.
TRUST_SECONDS = 10.0


class Cursor(base.CursorMixin, psycopg.ClientCursor[Any]):
    """Sends what its transaction has pending in front of its own statement.

    One without a `wrapper` is Django's, which sets up a connection or checks it.
    """

    wrapper: DatabaseWrapper | None = None

    def execute(self, query: Any, params: Any = None, **options: Any) -> Any:
        if self.wrapper is None:
            return super().execute(query, params, **options)
        if isinstance(query, DeferredStatement) and not self.wrapper.autocommit:
            # Django reads from here what was executed.
            self._query = self._merge(query, params)
            self.wrapper.pending.append(self._query.query)
            return self
        if not self.wrapper.has_pending:
            return super().execute(query, params, **options)
        # First: parameters that cannot be sent must not cost what is pending.
        own = self._merge(query, params)
        pending = self.wrapper.take_pending()
        super().execute(b";\n".join((*pending, own.query)), **options)
        self._query = own
        for _ in pending:
            self.nextset()
        return self

    def _merge(self, query: Any, params: Any) -> PostgresQuery:
        """The statement with its parameters in it, as `mogrify` returns it as a text."""
        self._tx = psycopg.adapt.Transformer(self)
        return self._convert_query(query, params)

    def executemany(self, *arguments: Any, **options: Any) -> Any:
        self._send_pending()
        return super().executemany(*arguments, **options)

    def copy(self, *arguments: Any, **options: Any) -> Any:
        self._send_pending()
        return super().copy(*arguments, **options)

    def stream(self, *arguments: Any, **options: Any) -> Any:
        self._send_pending()
        return super().stream(*arguments, **options)

    def _send_pending(self) -> None:
        if self.wrapper is not None:
            self.wrapper.send_pending()


class DatabaseWrapper(base.DatabaseWrapper):
    health_check_done: bool

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        # SQL of the open transaction that is not sent yet, its parameters merged.
        self.pending: list[bytes] = []
        self._answered_at = -math.inf

    def get_connection_params(self) -> dict[str, Any]:
        params: dict[str, Any] = super().get_connection_params()
        # Only client-side cursors send several statements at once, and BEGIN is sent as it is.
        if params["cursor_factory"] is base.Cursor and not self._has_isolation_level:
            params["cursor_factory"] = Cursor
        return params

    def get_new_connection(self, conn_params: dict[str, Any]) -> Any:
        self.pending.clear()
        connection = super().get_new_connection(conn_params)
        # Whatever psycopg asks of the server goes through this method, commits included.
        connection.wait = partial(self._wait, connection, connection.wait)
        return connection

    def create_cursor(self, name: str | None = None) -> Any:
        if name is not None:
            self.send_pending()
        cursor = super().create_cursor(name)
        if isinstance(cursor, Cursor):
            cursor.wrapper = self
        elif name is not None and self._sends_together:
            # Django takes psycopg's word for whether a transaction is open.
            cursor._withhold = self.autocommit
        return cursor

    @property
    def has_pending(self) -> bool:
        """Whether something must be sent in front of the next statement."""
        return bool(self.pending) or self._begins

    @property
    def _begins(self) -> bool:
        """Whether the next statement is the first of a transaction."""
        if self.connection is None or self.autocommit:
            return False
        return bool(self.connection.pgconn.transaction_status == TransactionStatus.IDLE)

    def take_pending(self) -> list[bytes]:
        """What must be sent in front of the next statement, which the caller sends."""
        if self.connection is None:
            return []
        begin = [b"BEGIN"] if self._begins else []
        pending, self.pending = self.pending, []
        return [*begin, *pending]

    def send_pending(self) -> None:
        """Send it now, for what cannot be sent together with other statements."""
        if self._sends_together and (pending := self.take_pending()):
            with self.connection.cursor() as cursor:
                cursor.execute(b";\n".join(pending))

    def close_if_health_check_failed(self) -> None:
        if self.connection is not None and not self.health_check_done:
            self.health_check_done = self._is_quiet()
        super().close_if_health_check_failed()

    @property
    def _has_isolation_level(self) -> bool:
        return "isolation_level" in self.settings_dict["OPTIONS"]

    @property
    def _sends_together(self) -> bool:
        return self.connection is not None and self.connection.cursor_factory is Cursor

    def _is_quiet(self) -> bool:
        """Whether the server answered a moment ago, and has closed or said nothing since."""
        if time.monotonic() - self._answered_at > TRUST_SECONDS or self.connection.closed:
            return False
        poll = select.poll()
        poll.register(self.connection.fileno(), select.POLLIN)
        return not poll.poll(0)

    def _set_autocommit(self, autocommit: bool) -> None:
        # psycopg would spend a round trip on a BEGIN of its own.
        super()._set_autocommit(autocommit or self._sends_together)  # type: ignore[misc]

    def _commit(self) -> None:
        if not self.pending:
            super()._commit()  # type: ignore[misc]
            return
        with debug_transaction(self, "COMMIT"), self.wrap_database_errors:
            self.create_cursor().execute("COMMIT")

    def _rollback(self) -> None:
        self.pending.clear()
        super()._rollback()  # type: ignore[misc]

    def _savepoint_rollback(self, sid: str) -> None:
        # The savepoint itself was sent, with all that came before it.
        self.pending.clear()
        super()._savepoint_rollback(sid)  # type: ignore[misc]

    def _wait(
        self,
        connection: psycopg.Connection[Any],
        wait: Callable[..., Any],
        *args: Any,
        timeout: float | None = None,
        **options: Any,
    ) -> Any:
        seconds = answer_within()
        if timeout is not None or seconds is None:
            answer = wait(*args, timeout=timeout, **options)
        else:
            try:
                answer = wait(*args, timeout=seconds, **options)
            except psycopg.errors._WaitTimeout:
                # What the server makes of the statement is not known, so nothing more can be said.
                connection.pgconn.finish()
                raise psycopg.OperationalError(
                    f"the server did not answer within {seconds:g} s; the connection was closed"
                ) from None
        self._answered_at = time.monotonic()
        return answer
