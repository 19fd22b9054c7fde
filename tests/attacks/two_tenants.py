"""The real service with two tenants: the greedy one, and the other who must not notice."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.processes import ROOT, Service, clean_environment, free_port, started, web_server
from tests.support.site import bootstrapped, kept_folder

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
        return len(self.ids(status))

    def ids(self, status: str) -> list[str]:
        """Of the tenant's executions, 200 at most."""
        listed = self._ask(f"/api/v1/executions?limit=200&status={status}", None).body
        return [each["id"] for each in listed["results"]]

    def cancel_all(self) -> None:
        """Whatever is running or queued, which may end meanwhile."""
        for status in ("queued", "running"):
            for each in self.ids(status):
                self.cancel(each)

    def cancel(self, execution_id: str) -> Answer:
        return self._ask(f"/api/v1/executions/{execution_id}/cancel", b"{}")

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
    """`raised` and `narrow` are tenants whose bounds an administrator has changed."""

    service: Service
    greedy: Party
    other: Party
    raised: Party
    narrow: Party
    data_dir: Path


TENANTS: dict[str, dict[str, int]] = {
    "greedy": {},
    "other": {},
    "raised": {"max_running": 64},
    "narrow": {"max_running": 1, "max_queued": 5},
}
MAKE_TENANTS = """
from executions.models import Tenant
from executions.tenants.keys import create_api_key
for slug, bounds in {tenants}.items():
    tenant = Tenant.objects.create(slug=slug, name=slug, **bounds)
    print(create_api_key(tenant, "attack")[1])
"""


def _prepare(folder: Path) -> None:
    bootstrapped(folder / "data")
    environment = clean_environment(folder / "data")
    make = MAKE_TENANTS.format(tenants=TENANTS)
    (folder / "keys").write_text(_manage(environment, "shell", "-v", "0", "-c", make))


def _manage(environment: dict[str, str], *arguments: str) -> str:
    command = [sys.executable, "manage.py", *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


@contextmanager
def two_tenants(
    tmp_path: Path,
    *,
    data_dir: Path | None = None,
    local: Mapping[str, int] | None = None,
    has_worker: bool = True,
    **extra: str,
) -> Iterator[Scene]:
    """`manage.py up` with the local provider, or the web server alone. `local` is the provider's
    configuration, `extra` are settings."""
    made = kept_folder("attacked-tenants", _prepare, Path(__file__))
    keys = (made / "keys").read_text().split()
    folder = data_dir or tmp_path / "data"
    shutil.copytree(made / "data", folder)
    environment = clean_environment(folder, PORT=str(free_port()), **extra)
    if local:
        change = "from providers.services import save_config; "
        change += f"save_config('local', {dict(local)})"
        _manage(environment, "shell", "-c", change)
    command = [sys.executable, "manage.py", "up"]
    if not has_worker:
        command = web_server(environment["PORT"])
    with started(command, environment, ROOT, tmp_path / "log") as service:
        service.wait_until_ready()
        parties = {name: Party(service.url, key) for name, key in zip(TENANTS, keys, strict=True)}
        # The first run waits for the first sandboxes.
        for party in (parties["greedy"], parties["other"]):
            assert party.post("pass").status == 200, service.output
        yield Scene(service, **parties, data_dir=folder)
        service.process.terminate()
        service.process.wait(60)


@contextmanager
def at_once(party: Party, number: int, code: str, **body: Any) -> Iterator[list[Future[Answer]]]:
    """So many requests under way at the same time; all have been answered afterwards."""
    with ThreadPoolExecutor(number) as threads:
        yield [threads.submit(party.post, code, **body) for _ in range(number)]


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


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
