"""Writes in numbers that a tenant, or time, decides: a few rows in each transaction.

SQLite has one lock for all who write, and gives it to whoever looks for it first. So a transaction
is short, and after each the lock stays free for a while: whoever waits for it looks for it only now
and then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any, TypeVar

from django.db import connection, transaction
from django.db.models import Model, QuerySet

T = TypeVar("T")
Row = TypeVar("Row", bound=Model)

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
