"""Django's PostgreSQL engine, which waits no longer than it was told for a server's answer.

A server that is paused, or whose host hangs, takes every byte and says nothing. No setting of the
server and no keep-alive notices that: the kernel there still acknowledges. So the client keeps the
time, as psycopg does itself while it connects (`connect_timeout`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import psycopg
from django.db.backends.postgresql import base

from executions.kernel.postgresql import answer_within


class DatabaseWrapper(base.DatabaseWrapper):
    def get_new_connection(self, conn_params: dict[str, Any]) -> Any:
        connection = super().get_new_connection(conn_params)
        # Whatever psycopg asks of the server goes through this method, commits included.
        connection.wait = partial(_wait, connection, connection.wait)
        return connection


def _wait(
    connection: psycopg.Connection[Any],
    wait: Callable[..., Any],
    *args: Any,
    timeout: float | None = None,
    **options: Any,
) -> Any:
    seconds = answer_within()
    if timeout is not None or seconds is None:
        return wait(*args, timeout=timeout, **options)
    try:
        return wait(*args, timeout=seconds, **options)
    except psycopg.errors._WaitTimeout:
        # What the server makes of the statement is not known, so nothing more can be said here.
        connection.pgconn.finish()
        raise psycopg.OperationalError(
            f"the server did not answer within {seconds:g} s; the connection was closed"
        ) from None
