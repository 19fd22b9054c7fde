"""Callers whose data is large: what is done with it holds nobody up who writes to the database."""

from __future__ import annotations

import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from executions.kernel import background, database
from executions.sessions.models import StoredTotal, WorkspaceFile
from tests.conftest import Caller, require
from tests.support.processes import ROOT
from tests.support.raw_http import ask
from tests.support.saved_files import listed, sleeping
from tests.support.sessions import URL
from tests.support.site import EXECUTIONS, MANAGE, Site, prepare, serving
from tests.support.transactions import recorded

pytestmark = pytest.mark.database

# Of one that is served, so that its move takes longer than some runs; and of one that is counted.
FILES, COUNTED_FILES = 6000, 3 * database.MOST_ROWS
# Beside the rows of a batch: those of the session, its workspace, the total and the ledger.
OTHERS = 12

SLEEPING = """
from executions.models import Tenant
from tests.conftest import Caller
from tests.support.saved_files import sleeping
key = Tenant.objects.get(slug="wonderland").api_keys.get()
print("session", sleeping(Caller(key, ""), {files}).pk)
"""


def runs_meanwhile(site: Site, work: Any) -> list[Any]:
    """The answers to another tenant's runs that began and ended while `work` went on."""
    is_over, answers = threading.Event(), []

    def run() -> None:
        while not is_over.is_set():
            answer = ask(site.service, "POST", EXECUTIONS, {"code": "print(1)"}, key=site.charlie)
            if not is_over.is_set() or answer.status != 200:
                answers.append(answer)

    neighbour = threading.Thread(target=run)
    neighbour.start()
    try:
        work()
    finally:
        is_over.set()
        neighbour.join()
    return answers


def test_a_folder_of_thousands_of_files_holds_up_no_run_of_others(tmp_path: Path) -> None:
    require("bwrap")
    prepared = prepare(tmp_path / "data")
    command = [*MANAGE, "shell", "-c", SLEEPING.format(files=FILES)]
    made = subprocess.run(
        command, env=prepared.environment(), cwd=ROOT, check=True, capture_output=True, text=True
    )
    session = made.stdout.split("session ")[1].split()[0]
    with serving(prepared, tmp_path / "log") as site:
        files = f"/api/v1/sessions/{session}/files"

        def move() -> None:
            body = {"from": "d", "to": "e"}
            answer = ask(site.service, "POST", f"{files}/move", body, key=site.alice)
            assert answer.status == 200, answer.body

        def remove() -> None:
            answer = ask(site.service, "DELETE", f"{files}?path=e", key=site.alice)
            assert answer.status == 204, answer.body

        moving, removing = runs_meanwhile(site, move), runs_meanwhile(site, remove)
        assert {answer.status for answer in [*moving, *removing]} == {200}
        assert {answer.json["stdout"] for answer in [*moving, *removing]} == {"1\n"}
        # With the lock held for all of it, the first one would have waited for its end.
        assert len(moving) >= 3


@pytest.mark.usefixtures("kept_here")
def test_no_transaction_writes_more_than_a_batch_of_a_folder(
    alice: Caller, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, settings: Any
) -> None:
    settings.DATA_DIR = tmp_path
    session = sleeping(alice, COUNTED_FILES)
    files = f"{URL}/{session.pk}/files"
    for act in (
        lambda: alice.client.post(f"{files}/move", {"from": "d", "to": "e"}),
        lambda: alice.client.post(f"{URL}/{session.pk}/snapshot", {}),
        lambda: alice.client.delete(f"{files}?path=e"),
    ):
        with recorded(monkeypatch) as found:
            assert act().status_code < 300
            assert background.wait_for_keyed_work()
        assert found.rows >= COUNTED_FILES
        assert found.most.rows <= database.MOST_ROWS + OTHERS, found.most
    assert listed(alice, {"id": str(session.pk)}) == []
    # Those of the snapshot, and no more.
    assert WorkspaceFile.objects.count() == COUNTED_FILES + 1 == StoredTotal.objects.get().files
