"""Who holds one row and waits for another never meets somebody who does it the other way round.

PostgreSQL ends one of two such transactions, after a second. SQLite lets one write at a time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from django.db import connection, transaction

from executions.models import Session, StoredTotal, Workspace
from executions.services.ledger.entering import enter_row
from executions.services.workspaces import saving, snapshots
from tests.conftest import Caller
from tests.sessions import cell, in_thread, opened, row, wait_for
from tests.test_snapshots import taken


@pytest.fixture
def _storage(tmp_path: Path, settings: Any) -> None:
    settings.DATA_DIR = tmp_path


pytestmark = [
    pytest.mark.usefixtures("_storage", "kept_here"),
    pytest.mark.only_on("postgresql"),
]


def somebody_waits() -> bool:
    """For what this transaction holds."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT EXISTS (SELECT 1 FROM pg_locks WHERE NOT granted"
            " AND pg_backend_pid() = ANY (pg_blocking_pids(pid)))"
        )
        return bool(cursor.fetchone()[0])


def test_a_save_waits_for_its_session_and_holds_no_workspace(alice: Caller) -> None:
    session = opened(alice, saves="answer")
    assert cell(alice, session, "open('f', 'w').close()").json()["files_saved"] is True
    found: list[saving.Saved] = []
    with transaction.atomic():
        Session.objects.select_for_update().get(pk=session["id"])
        thread = in_thread(lambda: found.append(saving.save(row(session))))
        wait_for(somebody_waits)
        assert Workspace.objects.filter(session=session["id"]).update(problem="held by both") == 1
    thread.join()
    assert found[0].is_complete


def test_a_removed_snapshot_waits_for_its_tenants_total_and_holds_no_ledger(alice: Caller) -> None:
    session = opened(alice, saves="answer")
    assert cell(alice, session, "open('f', 'w').close()").json()["files_saved"] is True
    snapshot = snapshots.snapshot_of(alice.tenant, taken(alice, session)["id"])
    removed: list[bool] = []
    with transaction.atomic():
        StoredTotal.objects.select_for_update().get(tenant=alice.tenant)
        thread = in_thread(lambda: removed.append(snapshots.remove(snapshot, "alice")))
        wait_for(somebody_waits)
        enter_row(row(session), "cleaned", {"files": 0})
    thread.join()
    assert removed == [True]
