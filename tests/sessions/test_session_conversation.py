"""A whole conversation over the API, in a real sandbox of the local provider's own service."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from executions.ledger.verification import verify
from executions.runs.models import Execution
from executions.sessions.models import Session
from providers.leases import close_all, lease_of_version
from providers.local.provider import LocalProvider, _pool_of
from providers.local.service import LocalSessions
from providers.manager import manager
from providers.services.configuration import save_config
from providers.values import Job, SandboxSpec
from tests.conftest import Caller, require
from tests.support.kept_service import kept_by, sessions_service
from tests.support.running import LOCAL
from tests.support.sessions import URL, cell, opened, wait_for

pytestmark = pytest.mark.one_database


@pytest.fixture
def served(
    transactional_db: None, tmp_path: Path, settings: Any, shared_service: Path
) -> Iterator[None]:
    settings.DATA_DIR = tmp_path
    with kept_by(shared_service, tmp_path):
        yield


def test_state_files_commands_and_a_reset(served: None, alice: Caller) -> None:
    session = opened(alice, env={"GREETING": "hello"})
    url = f"{URL}/{session['id']}"
    assert (session["runtime"], session["sharing"]) == ("bubblewrap", "session")

    cell(alice, session, "import os\nx = 41")
    told = cell(alice, session, "print(os.environ['GREETING'])\nx + 1").json()
    assert (told["stdout"], told["outputs"]) == ("hello\n", [{"text/plain": "42"}])
    late = cell(alice, session, "while True: pass", timeout=0.5).json()
    assert (late["status"], late["context_kept"]) == ("timed_out", True)
    assert cell(alice, session, "x").json()["outputs"] == [{"text/plain": "41"}]

    put = alice.client.put(
        f"{url}/files/content?path=in/data", b"x" * 300_000, content_type="application/octet-stream"
    )
    assert put.json()["size_bytes"] == 300_000
    counted = alice.client.post(f"{url}/processes", {"shell": "wc -c < in/data"}).json()
    assert (counted["stdout"].strip(), counted["exit_code"]) == ("300000", 0)
    part = alice.client.get(f"{url}/files/content?path=in/data", HTTP_RANGE="bytes=-5")
    assert (part.status_code, b"".join(part.streaming_content)) == (206, b"xxxxx")
    users = alice.client.get(f"{url}/files/content?path=/etc/passwd")
    assert b"root:" in b"".join(users.streaming_content)
    assert alice.client.get(f"{url}/files/content?path=../etc/passwd").status_code == 400

    shell = alice.client.post(f"{url}/contexts", {"language": "bash"}).json()["id"]
    cell(alice, session, "cd in", context=shell)
    assert cell(alice, session, "ls", context=shell).json()["stdout"] == "data\n"

    assert alice.client.post(f"{url}/reset").status_code == 200
    after = cell(alice, session, "import os\nprint('x' in globals(), os.listdir('in'))").json()
    assert after["stdout"] == "False ['data']\n"
    assert alice.client.delete(url).status_code == 204
    assert cell(alice, session, "1").status_code == 409
    assert [str(finding) for finding in verify().findings] == []


def test_a_cell_is_told_while_it_runs(served: None, alice: Caller) -> None:
    session = opened(alice)
    answer = alice.client.post(
        f"{URL}/{session['id']}/executions",
        {"code": "x = 3\nprint('seen')\nx"},
        headers={"Accept": "application/x-ndjson"},
    )
    events = [json.loads(line) for line in b"".join(answer.streaming_content).splitlines()]
    types = [event["type"] for event in events]
    assert (types[0], types[-1]) == ("started", "done")
    assert sorted(types[1:-1]) == ["output", "stdout"]
    assert events[-1]["execution"]["session"] == session["id"]
    assert cell(alice, session, "x").json()["outputs"] == [{"text/plain": "3"}]


def test_a_link_out_of_the_workspace_is_not_followed(served: None, alice: Caller) -> None:
    session = opened(alice)
    code = "import os\nos.symlink('/etc/passwd', 'out')\nos.symlink('/etc', 'folder')\nos.mkfifo('pipe')"
    assert cell(alice, session, code).json()["status"] == "succeeded"
    for path in ("out", "folder/passwd", "pipe"):
        answer = alice.client.get(f"{URL}/{session['id']}/files/content?path={path}")
        assert answer.status_code in (400, 404), path
    entries = alice.client.get(f"{URL}/{session['id']}/files").json()["entries"]
    links = {entry["path"]: entry.get("target") for entry in entries if entry["type"] == "symlink"}
    assert links == {"out": "/etc/passwd", "folder": "/etc"}


def test_another_configuration_leaves_open_sessions_as_they_were(
    served: None, alice: Caller
) -> None:
    save_config("local", {**LOCAL, "queue_timeout": 20})
    close_all()
    manager.close()
    session = opened(alice)
    cell(alice, session, "x = 41")
    save_config("local", {**LOCAL, "pool_size": 1})
    close_all()
    manager.close()

    assert cell(alice, session, "x + 1").json()["outputs"] == [{"text/plain": "42"}]
    with lease_of_version("local", version_of(session)) as lease:
        # Nothing is kept warm for single runs, which that version has no more.
        assert not lease.provider.health_check()


def version_of(session: dict[str, Any]) -> int:
    return Session.objects.get(pk=session["id"]).config_version or 0


def test_a_service_with_open_sessions_ends_without_a_complaint(
    tmp_path: Path, settings: Any
) -> None:
    require("bwrap")
    settings.DATA_DIR = tmp_path
    with sessions_service(tmp_path, tmp_path / "log") as service:
        sessions = LocalSessions(_pool_of(LocalProvider.check_config(LOCAL)), "bubblewrap")
        sandbox = sessions.keep(SandboxSpec(kept=True), "alice")
        assert sandbox.run(Job("print(1)")).stdout == "1\n"
        service.process.terminate()
        assert service.process.wait(60) == 0
        sessions.close()
    assert "Traceback" not in (tmp_path / "log").read_text()


# Each text is taken from its pipe before the next one is written.
IN_TURN = """
import array, fcntl, os, termios, time
for fd, text in ((1, b"ab"), (2, b"cd"), (1, b"e")):
    os.write(fd, text)
    left = array.array("i", [1])
    while left[0]:
        time.sleep(0.001)
        fcntl.ioctl(fd, termios.FIONREAD, left)
"""


def test_the_order_of_both_streams_is_sealed_of_all_that_runs(served: None, alice: Caller) -> None:
    session = opened(alice)
    command = ["python3", "-c", IN_TURN]
    cell(alice, session, IN_TURN)
    url = f"{URL}/{session['id']}/processes"
    alice.client.post(url, {"command": command})
    alice.client.post(url, {"command": command, "background": True})
    wait_for(lambda: not Execution.objects.filter(finished_at=None).exists())
    for execution in Execution.objects.all():
        assert (execution.stdout, execution.stderr) == ("abe", "cd")
        assert execution.output_order == [[1, 2], [2, 2], [1, 1]], execution.language
    assert [str(finding) for finding in verify().findings] == []
    Execution.objects.filter(background=True).update(output_order=[[2, 2], [1, 3]])
    assert len(verify().findings) == 1
