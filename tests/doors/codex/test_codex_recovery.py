"""A client whose web process is gone, or that comes to another one, finds its processes there."""

from __future__ import annotations

import os
import signal
from base64 import b64decode, b64encode
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import require
from tests.doors.codex.test_codex_approvals import approval_of, decide, stored_events
from tests.support.codex_door import Client, Refused, capability_path, make_key
from tests.support.codex_model import scripted
from tests.support.codex_program import make_home, run_codex
from tests.support.processes import command_line
from tests.support.raw_http import ask
from tests.support.site import EXECUTIONS, Site, running_site
from tests.support.waiting import wait_until

_ASKS = {"ask_always": True, "draft": False}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """One with two web processes."""
    require("bwrap")
    with running_site(tmp_path_factory.mktemp("site"), WEB_CONCURRENCY="2") as made:
        yield made


@pytest.fixture(scope="module")
def path(site: Site) -> str:
    return capability_path(site)


def elsewhere(site: Site, path: str, session_id: str) -> Client:
    """The same client at the other web process: where it is attached, it is refused."""
    made: list[Client] = []

    def resumed() -> bool:
        client = Client(site.service, path)
        try:
            client.initialize(resumeSessionId=session_id)
        except Refused:
            client.close()
            return False
        made.append(client)
        return True

    wait_until(resumed, 60)
    return made[0]


def text_of(read: dict[str, Any]) -> str:
    return b"".join(b64decode(each["chunk"]) for each in read["chunks"]).decode()


def write(client: Client, process_id: str, text: str, write_id: str) -> None:
    chunk = b64encode(text.encode()).decode()
    wanted = {"processId": process_id, "chunk": chunk, "writeId": write_id}
    assert client.call("process/write", **wanted) == {"status": "accepted"}


def begun(site: Site, path: str, two: str) -> tuple[Client, str, int]:
    """A process that has put out two pieces, which are where another process finds them, and reads;
    its session, and the last number."""
    client = Client(site.service, path)
    session_id = client.initialize()
    script = f"echo one; read a; echo {two}; read b; echo got $b; exit 7"
    client.start("reads", "bash", "-c", script, pipeStdin=True)
    client.wait_for("process/output", "reads")
    write(client, "reads", "x\n", "1")

    def has_both() -> bool:
        return f"{two}\n" in text_of(client.call("process/read", processId="reads"))

    wait_until(has_both, 60)
    wait_until(lambda: any(two in bodies for bodies in stored_events(site)), 60)
    last = client.call("process/read", processId="reads")["nextSeq"] - 1
    return client, session_id, last


def test_another_web_process_goes_on_where_the_first_stopped(site: Site, path: str) -> None:
    first, session_id, last = begun(site, path, "first")
    other = elsewhere(site, path, session_id)
    read = other.call("process/read", processId="reads", afterSeq=last)
    assert (read["chunks"], read["nextSeq"], read["exited"]) == ([], last + 1, False)
    assert text_of(other.call("process/read", processId="reads")) == "one\nfirst\n"
    write(other, "reads", "again\n", "2")
    assert other.output("reads") == "got again\n"
    told = [each["params"]["seq"] for each in other.told]
    assert told == list(range(last + 1, last + len(told) + 1))
    assert other.wait_for("process/exited", "reads")["exitCode"] == 7
    # Where it was before, nothing more starts, its client is missed, and nothing of it is ended.
    with pytest.raises(Refused, match="another connection"):
        first.start("late", "true")
    first.close()
    assert other.run("more", "echo alive") == (0, "alive\n")
    other.close()


def test_what_a_killed_web_process_had_is_found_again(site: Site, path: str) -> None:
    client, session_id, last = begun(site, path, "second")
    client.start("sleeps", "sleep", "300")
    assert client.run("done", "echo over; exit 5") == (5, "over\n")
    for pid in web_processes(site):
        os.kill(pid, signal.SIGKILL)
    client.close()
    wait_until(lambda: answers(site), 60)
    other = elsewhere(site, path, session_id)
    read = other.call("process/read", processId="reads", afterSeq=last)
    assert (read["chunks"], read["exited"]) == ([], False)
    write(other, "reads", "again\n", "2")
    assert other.output("reads") == "got again\n"
    assert other.call("process/terminate", processId="sleeps") == {"running": True}
    other.call("process/read", processId="sleeps")
    assert other.wait_for("process/exited", "sleeps")["exitCode"] == 137
    ended = other.call("process/read", processId="done")
    assert (ended["exited"], ended["exitCode"], ended["closed"]) == (True, 5, True)
    assert text_of(ended) == "over\n"
    other.close()


def test_one_that_waits_for_its_approval_waits_on_elsewhere(site: Site) -> None:
    make_key(site, "asking", "asking", _ASKS)
    path = capability_path(site, "asking", "asking")
    client = Client(site.service, path)
    session_id = client.initialize()
    client.start("waits", "bash", "-c", "read a; echo got $a", pipeStdin=True)
    approval = approval_of(client, "waits")
    other = elsewhere(site, path, session_id)
    write(other, "waits", "it\n", "1")
    read = other.call("process/read", processId="waits", afterSeq=1)
    assert (read["chunks"], read["nextSeq"], read["exited"]) == ([], 2, False)
    decide(site, approval, approve=True)
    assert other.output("waits") == "got it\n"
    client.close()
    other.close()


def test_what_ran_in_a_session_that_was_lost_has_ended_with_the_reason(
    site: Site, path: str
) -> None:
    client = Client(site.service, path)
    session_id = client.initialize()
    client.start("lost", "sleep", "300")
    closing = f"/api/v1/sessions/{session_id}"
    assert ask(site.service, "DELETE", closing, key=site.alice).status < 300
    other = elsewhere(site, path, session_id)
    read = other.call("process/read", processId="lost")
    assert (read["exited"], read["closed"], read["exitCode"]) == (True, True, 137)
    assert "session ended" in text_of(read)
    assert "session ended" in read["failure"]
    client.close()
    other.close()


def web_processes(site: Site) -> list[int]:
    """The processes that serve: those of gunicorn below its own."""
    found = []
    for pid in site.service.look():
        parent, command = described(pid)
        if "gunicorn" in command and "gunicorn" in described(parent)[1]:
            found.append(pid)
    assert len(found) == 2
    return found


def described(pid: int) -> tuple[int, str]:
    """Its parent and its command; nothing where it has ended meanwhile."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0, ""
    return int(stat[1]), command_line(pid).decode()


def answers(site: Site) -> bool:
    try:
        return ask(site.service, "GET", "/healthz").status == 200
    except OSError:
        return False


def test_codex_itself_has_all_output_of_a_command_whose_web_process_was_killed(
    site: Site, tmp_path: Path
) -> None:
    script = "echo begun; until test -e go; do sleep 0.1; done; echo ended"
    call = ("exec_command", {"cmd": script, "yield_time_ms": 30_000})
    home = make_home(site, tmp_path, site.service.port)
    with ThreadPoolExecutor(1) as threads, scripted(call) as model:
        running = threads.submit(run_codex, home, model)
        wait_until(lambda: any("begun" in bodies for bodies in stored_events(site)), 60)
        found = ask(site.service, "GET", f"{EXECUTIONS}?limit=1", key=site.alice).json
        for pid in web_processes(site):
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: answers(site), 60)
        url = f"{site.service.url}/api/v1/sessions/{found['results'][0]['session']}"
        headers = {"X-API-Key": site.alice}
        put = httpx.put(f"{url}/files/content?path=go", content=b"", headers=headers)
        assert put.status_code < 300
        running.result(120)
    assert "begun\nended\n" in model.outputs[0]
