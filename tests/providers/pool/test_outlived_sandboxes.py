"""Files of a conversation in real sandboxes: there after whatever was killed."""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from executions.kernel import background
from executions.ledger.verification import verify
from executions.sessions import capacity
from executions.sessions.maintenance import maintain
from executions.sessions.models import Workspace, WorkspaceFile
from providers.leases import close_all
from providers.manager import manager
from tests.conftest import Caller, require
from tests.support.kept_service import kept_by, sessions_service
from tests.support.raw_http import ask
from tests.support.running import LOCAL, activate
from tests.support.saved_files import saved
from tests.support.sessions import URL, aged, cell, opened, row
from tests.support.site import prepare, serving

pytest_plugins = ["tests.support.kept_service"]

pytestmark = pytest.mark.one_database


class Pool:
    """The service of kept sandboxes, which can be killed and started anew."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._held = ExitStack()
        self.process: Any = None

    def start(self) -> None:
        service = self._held.enter_context(sessions_service(self._folder, self._folder / "log"))
        self.process = service.process

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._held.close()

    def close(self) -> None:
        self._held.close()


@pytest.fixture
def pool(transactional_db: None, tmp_path: Path, settings: Any) -> Iterator[Pool]:
    require("bwrap")
    settings.DATA_DIR = tmp_path
    found = Pool(tmp_path)
    found.start()
    activate("local", LOCAL)
    manager.close()
    yield found
    assert background.wait_for_keyed_work(60)
    close_all()
    manager.close()
    found.close()


@pytest.fixture
def kept_files(
    transactional_db: None, tmp_path: Path, settings: Any, shared_service: Path
) -> Iterator[None]:
    """The service for tests that leave it as it is."""
    settings.DATA_DIR = tmp_path
    with kept_by(shared_service, tmp_path):
        yield


def stdout_of(answer: Any) -> str:
    assert answer.status_code == 200, answer.content
    text: str = answer.json()["stdout"]
    return text


def test_a_session_sleeps_and_wakes_as_it_was(kept_files: None, alice: Caller) -> None:
    session = opened(alice, saves="answer")
    code = """
import os
os.makedirs('deep/er', mode=0o750)
open('deep/er/data', 'wb').write(bytes(range(256)) * 4000)
open(b'\\xff name', 'w').write('raw')
open('run', 'w').write('#!/bin/sh\\necho ran\\n')
os.chmod('run', 0o755)
os.symlink('deep', 'link')
os.symlink('/etc/passwd', 'out')
os.utime('run', (1e9, 1e9))
os.mkfifo('pipe')
secret = 1
"""
    assert cell(alice, session, code).json()["files_saved"] is True
    assert set(saved(session)) == {
        *("artifacts", "deep", "deep/er", "deep/er/data", "\udcff name", "run", "link", "out")
    }
    aged(session, used_at=700)
    maintain()
    assert row(session).state == "asleep"
    look = """
import os, hashlib
print(hashlib.sha256(open('deep/er/data', 'rb').read()).hexdigest())
print(os.readlink('link'), os.readlink('out'), open(b'\\xff name').read())
print(oct(os.stat('run').st_mode & 0o777), int(os.stat('run').st_mtime), 'secret' in globals())
print(sorted(os.listdir()))
"""
    ran = cell(alice, session, look)
    digest = hashlib.sha256(bytes(range(256)) * 4000).hexdigest()
    assert stdout_of(ran).splitlines() == [
        digest,
        "deep /etc/passwd raw",
        "0o755 1000000000 False",
        "['artifacts', 'deep', 'link', 'out', 'run', '\\udcff name']",
    ]
    assert (ran.json()["restored"], ran.json()["files_saved"]) == (True, True)
    assert [str(finding) for finding in verify().findings] == []


def test_what_was_acknowledged_is_there_after_the_pool_was_killed(
    pool: Pool, alice: Caller
) -> None:
    session = opened(alice, saves="answer")
    shell = alice.client.post(f"{URL}/{session['id']}/contexts", {"language": "bash"}).json()["id"]
    for number in range(3):
        ran = cell(alice, session, f"open('f{number}', 'w').write('x' * {number})").json()
        assert ran["files_saved"] is True
    pool.kill()
    pool.start()
    ran = cell(alice, session, "ls", context=shell)
    assert stdout_of(ran) == "artifacts\nf0\nf1\nf2\n"
    assert ran.json()["restored"] is True
    assert row(session).wakes == 1
    assert stdout_of(cell(alice, session, "print(open('f2').read())")) == "xx\n"


def test_a_file_is_read_after_the_pool_was_killed(pool: Pool, alice: Caller) -> None:
    session = opened(alice, saves="answer")
    content = os.urandom(3_000_000)
    url = f"{URL}/{session['id']}/files/content?path=data"
    put = alice.client.put(url, content, content_type="application/octet-stream")
    assert put.status_code == 200
    pool.kill()
    pool.start()
    got = alice.client.get(url)
    assert b"".join(got.streaming_content) == content
    again = alice.client.put(url, b"new", content_type="application/octet-stream")
    assert again.status_code == 200
    assert saved(session) == {"artifacts": None, "data": b"new"}


def test_only_what_changed_is_fetched_again(
    kept_files: None, alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    from executions.sessions.storage import file_saves

    asked: list[list[str]] = []
    real = file_saves._take_batch

    def noted(look: Any, sandbox: Any, batch: Any, *rest: Any) -> int:
        asked.append(list(batch))
        return real(look, sandbox, batch, *rest)

    monkeypatch.setattr(file_saves, "_take_batch", noted)
    session = opened(alice, saves="answer")
    cell(alice, session, "for n in range(300): open(f'f{n}', 'w').write(str(n))")
    assert sum(map(len, asked)) == 300
    asked.clear()
    cell(alice, session, "open('f7', 'w').write('seven')")
    assert asked == [["f7"]]
    asked.clear()
    assert capacity.suspend(row(session).pk, "a test")
    assert asked == []
    cell(alice, session, "open('f8', 'w').write('eight')")
    assert asked == [["f8"]]
    assert Workspace.objects.get().files == 301
    assert WorkspaceFile.objects.filter(type="file").count() == 300


def test_a_killed_service_finds_the_conversation_where_it_was_acknowledged(tmp_path: Path) -> None:
    require("bwrap")
    prepared = prepare(tmp_path / "data")
    key = {"key": prepared.alice}
    with serving(prepared, tmp_path / "first") as site:
        answer = ask(site.service, "POST", URL, {"saves": "answer"}, **key)
        session = answer.json["id"]
        code = "open('f', 'w').write('acknowledged'); x = 1"
        ran = ask(site.service, "POST", f"{URL}/{session}/executions", {"code": code}, **key)
        assert ran.json["files_saved"] is True
        site.service.look()
        # Web, worker and pool at once, and nobody has time to save anything.
        for pid in site.service.look():
            # Some end by themselves with those before them.
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        os.killpg(site.service.process.pid, signal.SIGKILL)
        site.service.process.wait()
    with serving(prepared, tmp_path / "second") as site:
        look = "print(open('f').read(), 'x' in globals())"
        ran = ask(site.service, "POST", f"{URL}/{session}/executions", {"code": look}, **key)
        assert ran.status == 200, ran.body
        assert (ran.json["stdout"], ran.json["restored"]) == ("acknowledged False\n", True)
        closed = ask(site.service, "DELETE", f"{URL}/{session}", **key)
        assert closed.status == 204
    assert not [path for path in (tmp_path / "data/workspaces").rglob("*") if path.is_file()]
