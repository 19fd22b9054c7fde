"""Sessions whose pool is ended and started again: over Docker they go on, elsewhere they are lost."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from signal import SIGKILL
from typing import Any

import docker
import pytest

from executions.ledger.models import LedgerEntry
from executions.ledger.verification import verify
from executions.runs.models import Execution
from executions.sessions.maintenance import maintain
from providers.leases import close_all
from providers.manager import manager
from tests.conftest import Caller, require
from tests.support.kept_service import sessions_service
from tests.support.outlived import Place, opened_place
from tests.support.running import LOCAL, activate
from tests.support.sessions import URL, cell, opened, row, wait_for

LONG = "import time\nprint('on', flush=True)\ntime.sleep(120)"
# Until it is told to end, whether the pool is there or not.
COUNTS = "n=0; until [ -e go ]; do n=$((n + 1)); echo $n; sleep 0.2; done; echo over"


@pytest.fixture(scope="module")
def pool(engine: docker.DockerClient, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with opened_place(tmp_path_factory.mktemp("pool"), "runc", engine) as made:
        yield made


@pytest.fixture
def place(transactional_db: None, pool: Place) -> Iterator[Place]:
    pool.clear()
    config = {
        "endpoint": f"http://127.0.0.1:{pool.port}",
        "pool_size": 1,
        "max_sandboxes": 10,
        "runtime": "runc",
    }
    activate("self_managed", config)
    manager.close()
    yield pool
    close_all()
    manager.close()


def end(session: dict[str, Any], caller: Caller, place: Place) -> None:
    assert caller.client.delete(f"{URL}/{session['id']}").status_code == 204
    wait_for(lambda: not place.kept_containers())


@pytest.fixture
def away_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for a service that may be restarting."""
    monkeypatch.setattr("providers.self_managed.client.WAIT_SECONDS", 0.0)


def test_a_conversation_goes_on_and_a_cell_that_ran_has_its_one_record(
    place: Place, alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("providers.self_managed.client.WAIT_SECONDS", 60.0)
    session = opened(alice, env={"NAME": "value"})
    assert session["runtime"] == "runc"
    cell(alice, session, "x = 41")
    started = alice.client.post(
        f"{URL}/{session['id']}/processes", {"shell": COUNTS, "background": True}
    ).json()
    answers: list[Any] = []
    running = threading.Thread(target=lambda: answers.append(cell(alice, session, LONG)))
    running.start()
    wait_for(lambda: Execution.objects.filter(status="running", background=False).exists())
    wait_for(lambda: place.described()[0]["busy"])

    place.stop(SIGKILL)
    running.join(60)
    place.start()

    (answer,) = answers
    assert answer.status_code == 503, answer.content
    told = answer.json()["error"]
    assert (told["code"], told["message"]) == (
        "SB009",
        "The connection to the pool service broke.",
    )
    after = cell(alice, session, "import os\nprint(x + 1, os.environ['NAME'])").json()
    assert (after["stdout"], after["status"]) == ("42 value\n", "succeeded")
    assert row(session).state == "open"
    broken = Execution.objects.get(code=LONG)
    assert (broken.status, broken.error_code) == ("error", "SB009")
    assert LedgerEntry.objects.filter(execution_id=broken.pk).count() == 1

    assert cell(alice, session, "open('go', 'w').close()").json()["status"] == "succeeded"
    counted = Execution.objects.filter(pk=started["execution"], finished_at__isnull=False)
    wait_for(counted.exists, seconds=90)
    background = counted.get()
    assert background.status == "succeeded"
    *numbers, last = background.stdout.split()
    assert last == "over"
    assert len(numbers) > 1
    assert numbers == [str(number) for number in range(1, len(numbers) + 1)]
    assert [str(finding) for finding in verify().findings] == []

    end(session, alice, place)


def test_a_pool_that_is_away_is_no_loss(place: Place, alice: Caller, away_at_once: None) -> None:
    session = opened(alice)
    cell(alice, session, "x = 1")
    place.stop(SIGKILL)

    refused = cell(alice, session, "x")
    assert refused.status_code == 502, refused.content
    assert (refused.json()["error"]["code"], refused.headers["Retry-After"]) == ("SB003", "5")
    listed = alice.client.get(f"{URL}/{session['id']}/files")
    assert (listed.status_code, listed.headers["Retry-After"]) == (502, "5")
    maintain()
    assert row(session).state == "open"

    place.start()
    assert cell(alice, session, "x").json()["outputs"] == [{"text/plain": "1"}]
    end(session, alice, place)


def test_what_bubblewrap_keeps_is_lost_and_says_so(
    transactional_db: None, tmp_path: Path, settings: Any, alice: Caller, away_at_once: None
) -> None:
    require("bwrap")
    settings.DATA_DIR = tmp_path
    with sessions_service(tmp_path, tmp_path / "first") as first:
        activate("local", LOCAL)
        manager.close()
        session = opened(alice)
        cell(alice, session, "x = 1")
        first.process.kill()
        first.process.wait()
        assert cell(alice, session, "x").status_code == 502
        assert row(session).state == "open"
        with sessions_service(tmp_path, tmp_path / "second"):
            lost = cell(alice, session, "x")
            assert lost.status_code == 409
            assert "was restarted" in lost.json()["error"]["message"]
            assert row(session).state == "lost"
        close_all()
        manager.close()
