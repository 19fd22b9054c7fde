"""What a policy has a person approve waits at Codex's door, and runs once, as it was approved."""

from __future__ import annotations

import re
import sqlite3
from base64 import b64decode, b64encode
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.support.codex_door import Client, capability_path, make_key, manage, opened, refused
from tests.support.codex_model import scripted
from tests.support.codex_program import make_home, run_codex
from tests.support.raw_http import ask
from tests.support.site import EXECUTIONS, Site
from tests.support.waiting import wait_until

DECIDE = """
from django.contrib.auth.models import User
from executions.capabilities.policies.approvals import decide
from executions.runs.models import Approval
person = User.objects.get_or_create(username="ada", is_superuser=True, is_staff=True)[0]
approval = Approval.objects.get(pk={pk})
decide(approval, person, approve={approve}, request_hash=approval.request_hash)
"""


@pytest.fixture(scope="module")
def key(streaming_site: Site) -> str:
    return make_key(streaming_site, "asking", "asking", {"ask_always": True, "draft": False})


@pytest.fixture(scope="module")
def client(streaming_site: Site, key: str) -> Iterator[Client]:
    with opened(streaming_site, capability_path(streaming_site, "asking", "asking")) as made:
        yield made


def decide(site: Site, pk: int, *, approve: bool) -> None:
    manage(site, "shell", "-c", DECIDE.format(pk=pk, approve=approve))


def approval_of(client: Client, process_id: str) -> int:
    """The approval that a process says it waits for."""
    client.wait_for("process/output", process_id)
    found = re.search(r"Waiting for approval (\d+) .*: (\S+)\n", said(client, process_id))
    assert found is not None
    assert found[2].endswith(f"/admin/executions/approval/{found[1]}/change/")
    return int(found[1])


def said(client: Client, process_id: str, stream: str = "stderr") -> str:
    answer = client.call("process/read", processId=process_id)
    chunks = [each for each in answer["chunks"] if each["stream"] == stream]
    return b"".join(b64decode(each["chunk"]) for each in chunks).decode()


def rows(site: Site, columns: str) -> list[Any]:
    with closing(sqlite3.connect(site.data_dir / "cofferdam.sqlite3", timeout=20)) as database:
        query = f"SELECT {columns} FROM executions_execution ORDER BY created_at DESC"
        return database.execute(query).fetchall()


def newest(site: Site, key: str) -> dict[str, Any]:
    (found,) = ask(site.service, "GET", f"{EXECUTIONS}?limit=1", key=key).json["results"]
    answer: dict[str, Any] = ask(site.service, "GET", f"{EXECUTIONS}/{found['id']}", key=key).json
    return answer


def test_an_approved_command_runs_once_with_what_was_written_to_it_meanwhile(
    streaming_site: Site, client: Client, key: str
) -> None:
    script = "pwd; read line; echo got $line $ONE; exit 4"
    started = client.start(
        "waits", "bash", "-c", script, env={"ONE": "1"}, pipeStdin=True, cwd="file:///tmp"
    )
    assert started["processId"] == "waits"
    approval = approval_of(client, "waits")
    line = b64encode(b"hello\n").decode()
    wanted = {"processId": "waits", "chunk": line, "writeId": "w1"}
    assert client.call("process/write", **wanted) == {"status": "accepted"}
    assert client.call("process/write", **wanted) == {"status": "accepted"}
    waiting = newest(streaming_site, key)
    assert waiting["status"] == "queued"
    seen = client.call("process/read", processId="waits")
    assert (seen["exited"], seen["closed"]) == (False, False)
    decide(streaming_site, approval, approve=True)
    assert client.output("waits") == "/tmp\ngot hello 1\n"
    assert client.wait_for("process/exited", "waits")["exitCode"] == 4
    record = newest(streaming_site, key)
    assert (record["id"], record["exit_code"]) == (waiting["id"], 4)
    assert record["policy"]["approved"]["by"] == "user:ada"
    assert record["receipt"]["approved"]["by"] == "user:ada"


def test_a_rejected_command_ends_with_the_reason_and_never_ran(
    streaming_site: Site, client: Client, key: str
) -> None:
    client.start("no", "touch", "/workspace/rejected")
    decide(streaming_site, approval_of(client, "no"), approve=False)
    assert client.wait_for("process/exited", "no")["exitCode"] == 126
    assert "rejected the request" in client.output("no", "stderr")
    assert newest(streaming_site, key)["status"] == "blocked"
    missing = client.call("fs/readDirectory", path="file:///workspace")["entries"]
    assert "rejected" not in [each["fileName"] for each in missing]


@pytest.mark.parametrize(
    ("name", "how"),
    [("ended", ("process/terminate", {})), ("left", ("process/signal", {"signal": "interrupt"}))],
)
def test_what_is_withdrawn_cannot_be_approved_any_more(
    streaming_site: Site, client: Client, key: str, name: str, how: tuple[str, dict[str, str]]
) -> None:
    client.start(name, "touch", f"/workspace/{name}", tty=name == "left")
    client.wait_for("process/output", name)
    method, more = how
    client.call(method, processId=name, **more)
    assert client.wait_for("process/exited", name)["exitCode"] == 126
    client.wait_for("process/closed", name)
    assert client.call("process/terminate", processId=name) == {"running": False}
    line = b64encode(b"x").decode()
    written = client.call("process/write", processId=name, chunk=line, writeId="1")
    assert written == {"status": "stdinClosed"}
    assert newest(streaming_site, key)["status"] == "cancelled"
    entries = client.call("fs/readDirectory", path="file:///workspace")["entries"]
    assert name not in [each["fileName"] for each in entries]


def test_input_for_one_that_waits_has_a_bound(client: Client) -> None:
    client.start("full", "cat", pipeStdin=True)
    piece = b64encode(bytes(40_000)).decode()
    first = client.call("process/write", processId="full", chunk=piece, writeId="1")
    assert first == {"status": "accepted"}
    problem = refused(client, "process/write", processId="full", chunk=piece, writeId="2")
    assert "65536 bytes" in problem.message
    assert client.call("process/terminate", processId="full") == {"running": True}
    client.wait_for("process/closed", "full")


def test_one_that_waits_ends_with_its_session(streaming_site: Site, key: str) -> None:
    path = capability_path(streaming_site, "asking", "asking")
    with opened(streaming_site, path) as other:
        other.start("with", "true")
        other.wait_for("process/output", "with")
        session = newest(streaming_site, key)["session"]
        closing_it = f"/api/v1/sessions/{session}"
        assert ask(streaming_site.service, "DELETE", closing_it, key=key).status < 300
        assert other.wait_for("process/exited", "with")["exitCode"] == 126
        assert "session ended" in other.output("with", "stderr")


def test_a_key_that_was_revoked_meanwhile_starts_nothing(streaming_site: Site, key: str) -> None:
    make_key(streaming_site, "asking", "lost")
    with opened(streaming_site, capability_path(streaming_site, "asking", "lost")) as other:
        other.start("late", "true")
        pk = approval_of(other, "late")
        revoke = "from executions.tenants.keys import revoke\n"
        revoke += "from executions.tenants.models import ApiKey\n"
        revoke += "revoke(ApiKey.objects.get(tenant__slug='asking', name='lost'))\n"
        # Past the page, which would refuse it: only what starts it is left to refuse.
        forced = "from executions.runs.models import Approval, Execution\n"
        forced += "from django.utils import timezone\n"
        forced += f"Approval.objects.filter(pk={pk}).update(status='approved', decided_by='x', "
        forced += "decided_at=timezone.now())"
        manage(streaming_site, "shell", "-c", revoke + forced)
        other.socket.wait_until_closed()
    wait_until(lambda: rows(streaming_site, "status, pid")[0] == ("cancelled", None), 60)


def test_codex_itself_waits_for_a_person_and_has_the_output(
    streaming_site: Site, key: str, tmp_path: Path
) -> None:
    script = "echo by $((6 * 7))"
    first = ("exec_command", {"cmd": script, "yield_time_ms": 1000})
    second = ("write_stdin", {"session_id": "{session}", "chars": "", "yield_time_ms": 60_000})
    home = make_home(streaming_site, tmp_path, streaming_site.service.port, "asking", "asking")
    with ThreadPoolExecutor(1) as threads, scripted(first, second) as model:
        running = threads.submit(run_codex, home, model)
        wait_until(lambda: bool(model.outputs), 60)
        assert script in [code for (code,) in rows(streaming_site, "code")]
        found = re.search(r"Waiting for approval (\d+)", model.outputs[0])
        assert found is not None
        decide(streaming_site, int(found[1]), approve=True)
        running.result(120)
    assert "by 42" in model.outputs[1]
    assert [code for (code,) in rows(streaming_site, "code")].count(script) == 1


def stored_events(site: Site) -> list[str]:
    """The events that are written for other processes."""
    with closing(sqlite3.connect(site.data_dir / "cofferdam.sqlite3", timeout=20)) as database:
        query = "SELECT bodies FROM executions_executionevent"
        return [bodies for (bodies,) in database.execute(query).fetchall()]
