"""Giving back what a SQLite database has no use for any more. Other databases do so themselves.

A deleted row leaves free pages in the file, and a long transaction a long log beside it; neither
becomes smaller by itself. Pages are given back in slices, so that writers wait for none of it.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass

from django.db import connection

from sandbox_site.database import JOURNAL_BYTES

logger = logging.getLogger(__name__)

# A slice of 256 KiB takes some milliseconds. In between, others write.
SLICE_PAGES = 64
PAUSE_SECONDS = 0.02
MOST_SECONDS = 20.0
# Left for what is written next, which would only make the file larger again.
SPARE_PAGES = 2048


@dataclass(frozen=True)
class Sizes:
    """Of the database: its pages, how many of them are free, and its log in bytes."""

    page_bytes: int
    pages: int
    free_pages: int
    log_bytes: int


def sizes() -> Sizes:
    """As they are now. For SQLite only."""
    with connection.cursor() as cursor:

        def pragma(name: str) -> int:
            cursor.execute(f"PRAGMA {name}")
            return int(cursor.fetchone()[0])

        log = f"{connection.settings_dict['NAME']}-wal"
        return Sizes(
            pragma("page_size"),
            pragma("page_count"),
            pragma("freelist_count"),
            os.path.getsize(log) if os.path.exists(log) else 0,
        )


def give_space_back(most_seconds: float = MOST_SECONDS) -> int:
    """Shorten the database and its log, as far as `most_seconds` allow. Bytes that were freed."""
    if connection.vendor != "sqlite" or connection.in_atomic_block:
        return 0
    before = sizes()
    deadline = time.monotonic() + most_seconds
    free = before.free_pages
    while free > SPARE_PAGES and time.monotonic() < deadline:
        pages = min(SLICE_PAGES, free - SPARE_PAGES)
        # As a script, which is stepped to its end: each step gives back one page.
        connection.connection.executescript(f"PRAGMA incremental_vacuum({pages})")
        free -= pages
        time.sleep(PAUSE_SECONDS)
    if before.log_bytes > JOURNAL_BYTES or before.free_pages > SPARE_PAGES:
        _shorten_log()
    after = sizes()
    pages_freed = max(0, before.pages - after.pages)
    return pages_freed * before.page_bytes + max(0, before.log_bytes - after.log_bytes)


def _shorten_log() -> None:
    """Have the log written into the database and cut off, unless somebody reads or writes."""
    with connection.cursor() as cursor:
        cursor.execute("PRAGMA busy_timeout")
        patience = int(cursor.fetchone()[0])
        # It would keep writers out while it waits for readers.
        cursor.execute("PRAGMA busy_timeout = 50")
        try:
            # Most of it is written beside writers; cutting it off keeps them out for the rest.
            cursor.execute("PRAGMA wal_checkpoint(PASSIVE)")
            cursor.fetchall()
            cursor.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            cursor.fetchall()
        finally:
            cursor.execute(f"PRAGMA busy_timeout = {patience}")
