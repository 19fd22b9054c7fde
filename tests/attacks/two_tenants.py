"""The real service with two tenants: the greedy one, and the other who must not notice."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tests.support.processes import ROOT, Service, clean_environment, free_port, started

# Far more than anything here takes, on a machine that does much else.
PATIENCE_SECONDS = 240


@dataclass(frozen=True)
class Answer:
    status: int
    body: Any
    headers: Any
    seconds: float


@dataclass(frozen=True)
class Party:
    """A tenant's key, and where to."""

    url: str
    key: str

    def post(self, code: str, **body: Any) -> Answer:
        content = json.dumps({"code": code, **body}).encode()
        return self._ask("/api/v1/executions", content)

    def get(self, execution_id: str) -> Any:
        return self._ask(f"/api/v1/executions/{execution_id}", None).body

    def how_many(self, status: str) -> int:
        """Of the tenant's executions, 200 at most."""
        listed = self._ask(f"/api/v1/executions?limit=200&status={status}", None).body
        return len(listed["results"])

    def _ask(self, path: str, content: bytes | None) -> Answer:
        headers = {"X-API-Key": self.key, "Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}{path}", content, headers)
        began = time.monotonic()
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as response:
                body, status, answered = response.read(), response.status, response.headers
        except urllib.error.HTTPError as error:
            body, status, answered = error.read(), error.code, error.headers
        return Answer(status, json.loads(body), answered, time.monotonic() - began)


@dataclass(frozen=True)
class Scene:
    service: Service
    greedy: Party
    other: Party
    data_dir: Path


@cache
def _prepared() -> tuple[Path, list[str]]:
    """A data directory with both tenants, made once for all tests, and a key of each."""
    folder = Path(tempfile.mkdtemp(prefix="cofferdam-two-tenants-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    environment = clean_environment(folder / "data", PORT=str(free_port()))
    _manage(environment, "bootstrap")
    keys = []
    for slug in ("greedy", "other"):
        _manage(environment, "create_tenant", slug)
        keys.append(_manage(environment, "create_api_key", slug, "--name", "attack"))
    return folder / "data", keys


def _manage(environment: dict[str, str], *arguments: str) -> str:
    command = [sys.executable, "manage.py", *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


@contextmanager
def two_tenants(
    tmp_path: Path, *, data_dir: Path | None = None, bounds: str = "", **extra: str
) -> Iterator[Scene]:
    """`manage.py up` with the local provider. `bounds` are the greedy tenant's own, as Python's
    keyword arguments; `extra` are settings."""
    prepared, keys = _prepared()
    folder = data_dir or tmp_path / "data"
    shutil.copytree(prepared, folder)
    environment = clean_environment(folder, PORT=str(free_port()), **extra)
    if bounds:
        change = "from executions.models import Tenant; "
        change += f"Tenant.objects.filter(slug='greedy').update({bounds})"
        _manage(environment, "shell", "-c", change)
    command = [sys.executable, "manage.py", "up"]
    with started(command, environment, ROOT, tmp_path / "log") as service:
        service.wait_until_ready()
        greedy, other = (Party(service.url, key) for key in keys)
        for party in (greedy, other):  # the first run waits for the first sandboxes
            assert party.post("pass").status == 200, service.output
        yield Scene(service, greedy, other, folder)
        service.process.terminate()
        service.process.wait(30)


@contextmanager
def at_once(party: Party, number: int, code: str, **body: Any) -> Iterator[list[Future[Answer]]]:
    """So many requests under way at the same time; all have been answered afterwards."""
    with ThreadPoolExecutor(number) as threads:
        yield [threads.submit(party.post, code, **body) for _ in range(number)]


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def bytes_below(folder: Path) -> int:
    """Of all its files, as far as they are still there."""
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(path, name)).st_blocks * 512
            except FileNotFoundError:
                continue
    return total
