"""Snapshots by the real pool service: what is in one, and sessions that begin with it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from executions.kernel import background
from executions.sessions import capacity
from providers.leases import close_all
from providers.manager import manager
from tests.conftest import Caller, require
from tests.support.kept_service import sessions_service
from tests.support.outlived import opened_place
from tests.support.running import LOCAL, activate
from tests.support.sessions import URL, cell, opened, row

MAKE = """
import os
os.makedirs('d/empty')
for name, content in ((b'd/data', bytes(range(256)) * 4000), (b'n\\xff\\n', b'odd'), (b'd/run', b'#!')):
    open(name, 'wb').write(content)
os.chmod('d/run', 0o750)
os.mkdir('ro'); open('ro/f', 'w').close(); os.mkdir('group')
for name, mode in (('ro/f', 0o400), ('ro', 0o500), ('group', 0o2775), ('d/empty', 0o1777)):
    os.utime(name, (1_000_000_000, 1_000_000_000))
    os.chmod(name, mode)
os.symlink('data', 'd/link'); os.symlink('/etc/passwd', 'out')
x = 'a variable'
"""
LOOK = """
import hashlib, os
for folder, folders, files in sorted(os.walk(b'.')):
    folders[:] = sorted(set(folders) - {b'artifacts'})
    for name in sorted(folders + files):
        path = os.path.join(folder, name)
        seen = os.lstat(path)
        what = os.readlink(path) if os.path.islink(path) else oct(seen.st_mode)
        old = seen.st_mtime == 1_000_000_000
        print(path, what, old, hashlib.sha256(open(path, 'rb').read()).hexdigest()[:8]
              if os.path.isfile(path) and not os.path.islink(path) else '')
print('x' in globals())
"""


@pytest.fixture(params=["bubblewrap", pytest.param("docker", marks=pytest.mark.slow)])
def service(
    request: pytest.FixtureRequest, transactional_db: None, tmp_path: Path, settings: Any
) -> Iterator[None]:
    settings.DATA_DIR = tmp_path
    with ExitStack() as held:
        if request.param == "bubblewrap":
            require("bwrap")
            held.enter_context(sessions_service(tmp_path, tmp_path / "log"))
            activate("local", LOCAL)
        else:
            engine = request.getfixturevalue("engine")
            place = held.enter_context(opened_place(tmp_path, "runc", engine))
            endpoint = f"http://127.0.0.1:{place.port}"
            activate("self_managed", {"endpoint": endpoint, "pool_size": 1, "max_sandboxes": 10})
        manager.close()
        yield
        close_all()
        manager.close()


def seen(caller: Caller, session: dict[str, Any]) -> str:
    ran = cell(caller, session, LOOK).json()
    assert ran["status"] == "succeeded", ran
    return str(ran["stdout"])


def test_a_session_begins_with_all_files_of_a_snapshot_and_changes_only_its_own(
    service: None, alice: Caller, bob: Caller, charlie: Caller
) -> None:
    source = opened(alice)
    assert cell(alice, source, MAKE).json()["status"] == "succeeded"
    made = seen(alice, source)
    assert made.endswith("\nTrue\n")
    # It says which files are meant, whatever is saved by then and comes later.
    answer = alice.client.post(f"{URL}/{source['id']}/snapshot", {"name": "begun"})
    assert answer.status_code == 201, answer.content
    snapshot = answer.json()["id"]
    cell(alice, source, "open('d/data', 'w').write('later'); os.remove('d/run')")
    expected = made.replace("\nTrue\n", "\nFalse\n")

    assert charlie.client.post(URL, {"from": snapshot}).status_code == 404
    begun = opened(bob, **{"from": snapshot})
    assert (begun["files"]["count"], begun["files"]["unsaved_since"]) == (
        answer.json()["files"],
        None,
    )
    assert seen(bob, begun) == expected
    cell(bob, begun, "import shutil; shutil.rmtree('d/empty'); open('mine', 'w').write('own')")
    assert background.wait_for_keyed_work()
    assert capacity.suspend(row(begun).pk, "a test")
    woken = seen(bob, begun)
    assert "mine" in woken
    assert "d/empty" not in woken
    # One that sleeps is a source as well, and is not woken for it.
    assert capacity.suspend(row(begun).pk, "a test")
    second = alice.client.post(f"{URL}/{begun['id']}/snapshot").json()["id"]
    assert row(begun).state == "asleep"
    for pk in (source["id"], begun["id"]):
        assert alice.client.delete(f"{URL}/{pk}").status_code == 204
    assert seen(alice, opened(alice, **{"from": snapshot})) == expected
    assert seen(alice, opened(alice, **{"from": second})) == woken
