"""Emptying the database behind a test that commits, in place of Django's `flush`.

That makes content types, permissions and roles anew each time, as behind a migration, which takes
longer than all else of it. They are left here, and made anew only where a test has changed them.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from django.contrib.auth.models import Group, Permission
from django.contrib.contenttypes.models import ContentType
from django.core.management import call_command
from django.db import connection, transaction

# What a migration fills.
FILLED = (ContentType, Permission, Group, Group.permissions.through)

_as_filled: list[Any] | None = None


def empty_database(*_: object) -> None:
    """Of all that a test has left there. In place of `TransactionTestCase._fixture_teardown`."""
    global _as_filled
    if _as_filled is not None:
        with transaction.atomic(), connection.cursor() as cursor:
            for statement in _deletions():
                cursor.execute(statement)
    if _as_filled is None or _rows() != _as_filled:
        call_command("flush", verbosity=0, interactive=False, reset_sequences=False)
        _as_filled = _rows()


@cache
def _deletions() -> list[str]:
    filled = {model._meta.db_table for model in FILLED}
    tables = connection.introspection.django_table_names(only_existing=True, include_views=False)
    emptied = [
        f"DELETE FROM {connection.ops.quote_name(name)}" for name in sorted(set(tables) - filled)
    ]
    # PostgreSQL takes them in one turn, SQLite one by one.
    return [";".join(emptied)] if connection.vendor == "postgresql" else emptied


def _rows() -> list[Any]:
    return [sorted(model._base_manager.values_list()) for model in FILLED]
