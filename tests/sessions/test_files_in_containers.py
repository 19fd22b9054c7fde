"""A conversation's files over Docker, with and without gVisor: they outlive their container."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docker
import pytest

from executions.kernel import background
from executions.sessions.maintenance import maintain
from providers.leases import close_all
from providers.manager import manager
from tests.conftest import Caller
from tests.support.outlived import Place, opened_place
from tests.support.running import activate
from tests.support.saved_files import counts_are_right, listed, saved, write
from tests.support.sessions import URL, aged, cell, opened, row, wait_for

FILL = (
    "import os\nos.makedirs('d/e'); open('d/e/f', 'w').write('kept'); os.chmod('d/e', 0o555)\n"
    "os.symlink('d/e/f', 'link'); open(b'n\\xff', 'w').write('of bytes'); x = 41"
)
LOOK = "print(open('link').read(), open(b'n\\xff').read(), 'x' in globals())"


@pytest.fixture(params=[pytest.param("runc", marks=pytest.mark.slow), "runsc"])
def place(
    request: pytest.FixtureRequest,
    transactional_db: None,
    engine: docker.DockerClient,
    tmp_path: Path,
    settings: Any,
) -> Iterator[Place]:
    settings.DATA_DIR = tmp_path / "ours"
    settings.DATA_DIR.mkdir()
    with opened_place(tmp_path, request.param, engine) as made:
        endpoint = f"http://127.0.0.1:{made.port}"
        activate("self_managed", {"endpoint": endpoint, "runtime": request.param})
        manager.close()
        yield made
        assert background.wait_for_keyed_work()
        close_all()
        manager.close()


def test_files_outlive_a_sleep_and_a_container_that_is_killed(place: Place, alice: Caller) -> None:
    session = opened(alice, saves="answer")
    assert session["runtime"] == {"runc": "runc", "runsc": "gvisor"}[place.runtime]
    assert cell(alice, session, FILL).json()["files_saved"] is True

    aged(session, used_at=601)
    maintain()
    assert row(session).state == "asleep"
    wait_for(lambda: not place.kept_containers())
    assert {"d", "link"} < set(listed(alice, session))
    sent = alice.client.put(
        f"{URL}/{session['id']}/files/content?path=d/sent",
        b"asleep",
        content_type="application/octet-stream",
    )
    assert sent.status_code == 200, sent.content

    woken = cell(alice, session, LOOK + "; print(open('d/sent').read())").json()
    assert (woken["stdout"], woken["restored"]) == ("kept of bytes False\nasleep\n", True)
    assert cell(alice, session, write("d/e/f", "changed")).json()["files_saved"] is True

    (container,) = place.kept_containers()
    container.kill()
    # One that may have begun there says so; one that has not runs in the next container.
    answers = [cell(alice, session, LOOK)]
    while answers[-1].status_code != 200 and len(answers) < 3:
        answers.append(cell(alice, session, LOOK))
    after = answers[-1].json()
    assert (after["stdout"], after["restored"]) == ("changed of bytes False\n", True)
    assert saved(session)["d/e/f"] == b"changed"
    counts_are_right(session)
    assert alice.client.delete(f"{URL}/{session['id']}").status_code == 204
    wait_for(lambda: not place.kept_containers())
