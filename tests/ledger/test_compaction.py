"""SQLite's files become smaller again, in slices that hold up nobody."""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from contextlib import closing

import pytest
from django.db import connection

from executions.capabilities.retention import service as retention
from executions.capabilities.retention.service import SLICE_PAGES, give_space_back, sizes
from executions.runs.worker import ensure_schedules
from executions.tasks import give_space_back as scheduled
from sandbox_site.database import JOURNAL_BYTES
from tests.support.waiting import wait_until

# A mebibyte.
SPARE_PAGES = 256

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.only_on("sqlite"),
    pytest.mark.database,
]


@pytest.fixture(autouse=True)
def _few_pages_to_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that little has to be written to be given back."""
    monkeypatch.setattr(retention, "SPARE_PAGES", SPARE_PAGES)


def fill_and_empty(mebibytes: int) -> None:
    """Rows that are written and deleted, so that their pages are free."""
    with connection.cursor() as cursor:
        cursor.execute("CREATE TABLE ballast (content BLOB)")
        for _ in range(mebibytes):
            cursor.execute("INSERT INTO ballast VALUES (randomblob(1048576))")
        cursor.execute("DROP TABLE ballast")


def on_disk() -> int:
    name = str(connection.settings_dict["NAME"])
    return sum(os.path.getsize(f"{name}{end}") for end in ("", "-wal"))


def test_free_pages_are_given_back_and_the_log_is_cut() -> None:
    give_space_back()
    before = on_disk()
    fill_and_empty(16)
    assert on_disk() > before + 15 * 2**20

    freed = scheduled()

    assert freed > 13 * 2**20
    assert on_disk() < before + (SPARE_PAGES + SLICE_PAGES) * 4096 + JOURNAL_BYTES
    assert sizes().free_pages <= SPARE_PAGES


def test_it_stops_in_time_and_goes_on_the_next_time() -> None:
    fill_and_empty(16)
    give_space_back(most_seconds=0.05)
    assert sizes().free_pages > SPARE_PAGES

    give_space_back()
    assert sizes().free_pages <= SPARE_PAGES


def test_others_write_meanwhile() -> None:
    fill_and_empty(32)
    done = threading.Event()
    waits: list[float] = []
    path = str(connection.settings_dict["NAME"])

    def write() -> None:
        with closing(sqlite3.connect(path, timeout=20, isolation_level=None)) as other:
            other.execute("CREATE TABLE IF NOT EXISTS busy (number INTEGER)")
            while not done.is_set():
                began = time.monotonic()
                other.execute("INSERT INTO busy VALUES (1)")
                waits.append(time.monotonic() - began)
                time.sleep(0.001)
            other.execute("DROP TABLE busy")

    thread = threading.Thread(target=write)
    thread.start()
    wait_until(lambda: bool(waits), seconds=60)
    before = len(waits)
    began = time.monotonic()
    give_space_back()
    took = time.monotonic() - began
    meanwhile = waits[before:]
    done.set()
    thread.join()

    assert len(meanwhile) > 2
    assert max(meanwhile) < took  # no writer had to wait for all of it


def test_it_is_scheduled() -> None:
    from django_q.models import Schedule

    ensure_schedules()
    assert Schedule.objects.get(name=f"{scheduled.__module__}.{scheduled.__name__}").minutes == 5
