"""What each transaction of this process writes: a tool for tests that bound it.

Rows are counted, and not seconds: how long a transaction takes is up to the machine.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.utils import CursorWrapper

from executions.kernel.postgresql import DeferredStatement

_WRITES = re.compile(r"\s*(INSERT|UPDATE|DELETE|REPLACE)\b", re.IGNORECASE)


@dataclass
class Written:
    """What one transaction wrote: rows, statements that wrote some, and the largest of these."""

    rows: int = 0
    statements: int = 0
    largest: tuple[int, str] = (0, "")

    def add(self, sql: str, rows: int) -> None:
        self.rows += rows
        self.statements += 1
        self.largest = max(self.largest, (rows, sql[:120]))


@dataclass
class Transactions:
    """Those that ended while they were recorded, in all threads of this process."""

    ended: list[Written] = field(default_factory=list)

    @property
    def most(self) -> Written:
        """The one that wrote the most rows."""
        return max(self.ended, key=lambda each: each.rows, default=Written())

    @property
    def rows(self) -> int:
        return sum(each.rows for each in self.ended)


@contextmanager
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Transactions]:
    """Record all transactions within it. What is rolled back held the lock too, and counts."""
    found = Transactions()
    now = threading.local()
    execute, executemany = CursorWrapper.execute, CursorWrapper.executemany
    commit, rollback = BaseDatabaseWrapper.commit, BaseDatabaseWrapper.rollback

    def note(cursor: CursorWrapper, sql: Any) -> None:
        text = str(sql)
        if not _WRITES.match(text):
            return
        rows = max(cursor.cursor.rowcount, 0)
        if not cursor.db.in_atomic_block:
            found.ended.append(Written(rows, 1, (rows, text[:120])))
            return
        if getattr(now, "open", None) is None:
            now.open = Written()
        now.open.add(text, rows)

    def end() -> None:
        if getattr(now, "open", None) is not None:
            found.ended.append(now.open)
            now.open = None

    def execute_noted(cursor: CursorWrapper, sql: Any, params: Any = None) -> Any:
        # Sent at once, so that its rows are counted.
        sql = str(sql) if isinstance(sql, DeferredStatement) else sql
        answer = execute(cursor, sql, params)
        note(cursor, sql)
        return answer

    def executemany_noted(cursor: CursorWrapper, sql: Any, params: Any) -> Any:
        answer = executemany(cursor, sql, params)
        note(cursor, sql)
        return answer

    def commit_noted(database: BaseDatabaseWrapper) -> None:
        commit(database)
        end()

    def rollback_noted(database: BaseDatabaseWrapper) -> None:
        rollback(database)
        end()

    with monkeypatch.context() as patch:
        patch.setattr(CursorWrapper, "execute", execute_noted)
        patch.setattr(CursorWrapper, "executemany", executemany_noted)
        patch.setattr(BaseDatabaseWrapper, "commit", commit_noted)
        patch.setattr(BaseDatabaseWrapper, "rollback", rollback_noted)
        yield found
