"""A client that knows Agent Sandbox's documents alone holds a whole conversation with the service
that `make run` starts, over a socket and across a restart of it."""

from __future__ import annotations

import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from tests.conftest import require
from tests.doors.agent_sandbox.agent_sandbox_client import AgentSandbox
from tests.support.processes import ROOT, Service, started
from tests.support.site import MANAGE, prepare
from tests.support.web_server import WebServer, answer

KEY = "a-key-of-the-operators-own-choice"


class Installation:
    """A data directory with Agent Sandbox's own variables, and the service on it."""

    def __init__(self, folder: Path, pages: WebServer) -> None:
        self.log = folder / "log"
        self.environment = prepare(folder / "data").environment(
            SANDBOX_API_KEY=KEY,
            PRESIGN_EXPIRES_SECONDS="2",
            POOL_LAUNCHER="bubblewrap",
            URL_ALLOWED_NETWORKS=f"127.0.0.1:{pages.port}",
        )
        subprocess.run([*MANAGE, "bootstrap"], env=self.environment, cwd=ROOT, check=True)

    def serving(self) -> Any:
        return started([*MANAGE, "up"], self.environment, ROOT, self.log)


def client(service: Service, user_id: str = "alice", key: str = KEY) -> AgentSandbox:
    return AgentSandbox(service.url, key, user_id, "session123")


def fetched(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=30) as found:
        content: bytes = found.read()
        return content


def status_of(url: str) -> int:
    try:
        fetched(url)
    except urllib.error.HTTPError as error:
        return error.code
    return 200


def talk(service: Service, pages: WebServer) -> None:
    alice = client(service)
    assert alice.health() == {"status": "ok"}
    assert alice.execute("x = 5\nprint(x * 2)\nx") == {"output": "10\n5\n", "artifacts": []}
    assert alice.execute("x += 5\nx")["output"] == "10\n"
    made = alice.execute("open('output.txt', 'w').write('hello world!')", presign_expires_in=60)
    [artifact] = made["artifacts"]
    assert (artifact["path"], artifact["size_bytes"]) == ("output.txt", 12)
    assert fetched(artifact["download_url"]) == b"hello world!"
    sent = alice.upload("in/sent.bin", bytes(range(256)) * 1000, presign_expires_in=60)
    assert (sent["status"], sent["size_bytes"]) == ("success", 256_000)
    assert fetched(sent["download_url"]) == bytes(range(256)) * 1000
    pages.pages["/data.csv"] = answer(b"a,b\n")
    came = alice.upload_urls([pages.url("/data.csv"), pages.url("/missing")], dest_dir="data")
    assert (came["status"], came["uploaded"]) == ("partial_success", ["data/data.csv"])
    assert [each["source_url"] for each in came["errors"]] == [pages.url("/missing")]
    used = alice.execute("open('data/data.csv').read()", inputs=["data/data.csv"])
    assert (used["output"], used["artifacts"]) == ("'a,b\\n'\n", [])
    assert "error" in alice.execute("1", inputs=["nowhere.csv"])
    assert [each["path"] for each in alice.files()] == [
        "data/data.csv",
        "in/sent.bin",
        "output.txt",
    ]
    assert alice.download_url("nowhere")["http_status"] == 404
    assert client(service, key="wrong").execute("1") == {
        "http_status": 401,
        "detail": "Invalid API key",
    }
    assert client(service, "bob").files() == []


def go_on(service: Service) -> None:
    alice = client(service)
    # Without a time it lasts as long as PRESIGN_EXPIRES_SECONDS says.
    brief = alice.download_url("output.txt")
    assert brief["expires_in"] == 2
    link = alice.download_url("output.txt", expires_in=600)
    assert (link["status"], link["path"], link["expires_in"]) == ("success", "output.txt", 600)
    assert fetched(link["download_url"]) == b"hello world!"
    assert alice.execute("open('output.txt').read()")["output"] == "'hello world!'\n"
    alice.execute("y = 1")
    assert alice.execute("y")["output"] == "1\n"
    again = alice.reset()
    assert (again["status"], again["output"]) == ("success", "Kernel reset.\n")
    assert again["container_id"]
    assert "NameError" in alice.execute("y")["output"]
    assert "output.txt" in [each["path"] for each in alice.files()]
    until = time.monotonic() + 60
    while (answered := status_of(brief["download_url"])) == 200:
        assert time.monotonic() < until, "the link does not expire"
        time.sleep(0.1)
    assert answered == 404
    assert alice.stop() == {"status": "success"}
    assert alice.files() == []


def test_a_conversation_as_its_documents_have_it(tmp_path: Path) -> None:
    require("bwrap")
    with WebServer() as pages:
        installation = Installation(tmp_path, pages)
        with installation.serving() as service:
            service.wait_until_ready()
            talk(service, pages)
            service.process.terminate()
            service.process.wait(60)
        with installation.serving() as service:
            service.wait_until_ready()
            go_on(service)
