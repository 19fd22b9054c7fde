"""Two web instances and two workers of one installation: every answer and link works from each."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import ROOT, Service, clean_environment, free_port, started

CODE = """
import os
os.makedirs("artifacts", exist_ok=True)
open("artifacts/left.txt", "w").write("left behind")
print("done")
"""

EACH_IN_TURN = """
from django.core.management import call_command
for command in ("checkpoint_ledger", "verify_ledger", "check_storage"):
    try:
        call_command(command)
    except SystemExit as ended:
        assert not ended.code, command
print("each has succeeded")
"""


class Host:
    """One host: its own DATA_DIR, the installation's database, keys and storage."""

    def __init__(self, folder: Path, shared: dict[str, str]) -> None:
        self.environment = clean_environment(folder, PORT=str(free_port())) | shared
        self.folder = folder

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.environment['PORT']}"

    def manage(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "manage.py", *arguments],
            env=self.environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
            stdin=subprocess.DEVNULL,
        )

    def web(self) -> AbstractContextManager[Service]:
        command = [
            sys.executable,
            "-m",
            "gunicorn",
            "--config",
            "python:sandbox_site.gunicorn_conf",
        ]
        command += ["--bind", f"127.0.0.1:{self.environment['PORT']}"]
        environment = self.environment | {"DJANGO_SETTINGS_MODULE": "sandbox_site.settings"}
        log = self.folder / "web.log"
        return started([*command, "sandbox_site.asgi:application"], environment, ROOT, log)

    def worker(self) -> AbstractContextManager[Service]:
        command = [sys.executable, "manage.py", "qcluster"]
        environment = self.environment | {"Q_WORKERS": "1"}
        return started(command, environment, ROOT, self.folder / "worker.log")


class Installation:
    def __init__(self, first: Host, second: Host) -> None:
        self.first, self.second = first, second
        for host in (first, second):
            done = host.manage("bootstrap")
            assert done.returncode == 0, done.stdout + done.stderr
        lines = (first.folder / "credentials.txt").read_text().splitlines()
        self.key = dict(line.split("=", 1) for line in lines)["API_KEY"]
        assert not (second.folder / "credentials.txt").exists()

    def ask(self, host: Host, path: str, body: Any = None) -> tuple[int, bytes]:
        request = urllib.request.Request(
            path if path.startswith("http") else host.url + path,
            None if body is None else json.dumps(body).encode(),
            {"X-API-Key": self.key, "Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def run(self, host: Host, **body: Any) -> Any:
        status, answer = self.ask(host, "/api/v1/executions", body)
        assert status in (200, 202), answer
        return json.loads(answer)

    def ended(self, host: Host, execution_id: str) -> Any:
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline:
            found = json.loads(self.ask(host, f"/api/v1/executions/{execution_id}")[1])
            if found["status"] not in ("queued", "running"):
                return found
            time.sleep(0.1)
        raise AssertionError(f"{execution_id} did not end")


# The second is what the first is, on servers that other tests are about.
@pytest.fixture(
    params=[
        "sqlite and a directory",
        pytest.param("postgres and a bucket", marks=pytest.mark.slow),
    ]
)
def installation(request: pytest.FixtureRequest, tmp_path: Path) -> Installation:
    database, _, storage = request.param.partition(" and a ")
    shared = {
        "SECRET_KEY": secrets.token_urlsafe(50),
        "FERNET_KEYS": secrets.token_urlsafe(32),
        "LEDGER_KEYS": secrets.token_urlsafe(32),
        "DEBUG": "false",
        "ALLOWED_HOSTS": "127.0.0.1",
        "STORAGE_URL": str(tmp_path / "shared"),
        "DATABASE_URL": f"sqlite:///{tmp_path}/database/db.sqlite3",
    }
    (tmp_path / "database").mkdir()
    (tmp_path / "shared").mkdir()
    if storage == "bucket":
        shared |= request.getfixturevalue("s3").environment
    if database == "postgres":
        shared["DATABASE_URL"] = request.getfixturevalue("postgres_url")
    hosts = [Host(tmp_path / name, shared) for name in ("first", "second")]
    for host in hosts:
        host.folder.mkdir()
    return Installation(*hosts)


def test_every_answer_and_every_link_works_from_each(installation: Installation) -> None:
    first, second = installation.first, installation.second
    with ExitStack() as running:
        for host in (first, second):
            running.enter_context(host.web()).wait_until_ready()
        here = installation.run(first, code=CODE)
        assert here["status"] == "succeeded", here

        there = json.loads(installation.ask(second, f"/api/v1/executions/{here['id']}")[1])
        assert there["receipt"] == here["receipt"]
        assert there["stdout"] == "done\n"
        for answer in (here, there):
            (artifact,) = answer["artifacts"]
            path = artifact["url"].replace(first.url, "").replace(second.url, "")
            for host in (first, second):
                assert installation.ask(host, path) == (200, b"left behind")

        # Taken by the worker of the other host, whose request is too large for its row.
        for asked, worker in ((first, second), (second, first)):
            with worker.worker():
                queued = installation.run(asked, code=f"{CODE}#{'x' * 100_000}", mode="async")
                ended = installation.ended(asked, queued["id"])
            assert ended["status"] == "succeeded", ended
            path = ended["artifacts"][0]["url"].replace(asked.url, "")
            assert installation.ask(worker, path) == (200, b"left behind")
    for host in (second, first):
        done = host.manage("shell", "--command", EACH_IN_TURN)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.endswith("each has succeeded\n"), done.stdout
        assert not (host.folder / "artifacts").exists()
        assert not (host.folder / "ledger").exists()

    alone = Host(first.folder.parent / "third", second.environment)
    alone.folder.mkdir()
    alone.environment = {**second.environment, "DATA_DIR": str(alone.folder), "STORAGE_URL": ""}
    refused = alone.manage("qcluster")
    assert refused.returncode != 0
    assert "STORAGE_URL: the location in DATA_DIR is empty" in refused.stdout + refused.stderr
