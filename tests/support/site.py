"""A running service with two tenants, for tests of what many callers see of it."""

from __future__ import annotations

import atexit
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from subprocess import PIPE
from typing import IO

from tests.support.processes import ROOT, Service, clean_environment, free_port, started
from tests.support.raw_http import ask

EXECUTIONS = "/api/v1/executions"
MANAGE = (sys.executable, "manage.py")

CONFIGURE = """
from executions.models import Tenant
from executions.services.keys import create_api_key
from providers.services import activate, save_config
save_config({provider!r}, {config!r})
activate({provider!r})
for slug in ("wonderland", "elsewhere"):
    print(create_api_key(Tenant.objects.create(slug=slug, name=slug), "attack")[1])
"""


LOCAL = ("local", {"launcher": "bubblewrap", "pool_size": 2, "max_sandboxes": 64})


@dataclass
class Site:
    """A running service with two tenants, and where its data is."""

    service: Service
    data_dir: Path
    alice: str
    charlie: str

    def running(self) -> int:
        """How many run; what a worker has only taken from the queue does not yet."""
        with closing(sqlite3.connect(self.data_dir / "cofferdam.sqlite3", timeout=20)) as database:
            running = "status = 'running' AND pending IS NULL"
            query = f"SELECT count(*) FROM executions_execution WHERE {running}"
            return int(database.execute(query).fetchone()[0])

    def wait_for_running(self, count: int) -> None:
        deadline = time.monotonic() + 60
        while (found := self.running()) != count:
            assert time.monotonic() < deadline, f"{found} are running"
            time.sleep(0.1)

    def assert_serves_others(self) -> None:
        """Health, the admin and another tenant's run: in time, however busy the machine is."""
        assert ask(self.service, "GET", "/healthz").status == 200
        page = ask(self.service, "GET", "/admin/login/")
        # All that a test asks comes from one address, whose share of pages it may use up: a page
        # says so. A refusal for want of places is JSON.
        assert page.status in (200, 429), page.body
        assert page.headers["content-type"].startswith("text/html"), page.body
        answer = ask(self.service, "POST", EXECUTIONS, {"code": "print(1)"}, key=self.charlie)
        assert answer.status == 200, answer.body
        assert answer.json["stdout"] == "1\n"


@dataclass(frozen=True)
class Prepared:
    """A data directory with two tenants, over which services can be started one after another."""

    data_dir: Path
    alice: str
    charlie: str

    def environment(self, **extra: str) -> dict[str, str]:
        ports = {"PORT": str(free_port()), "POOL_PORT": str(free_port())}
        return clean_environment(self.data_dir, **{**ports, **extra})


def prepare(
    data_dir: Path,
    log: IO[str] | None = None,
    provider: tuple[str, Mapping[str, object]] = LOCAL,
    **extra: str,
) -> Prepared:
    """`log` has what the commands say, which else is said here."""
    if provider is LOCAL and not extra:
        folder, *keys = _prepared_locally()
        return Prepared(Path(shutil.copytree(folder, data_dir)), *keys)
    return Prepared(data_dir, *_prepare(data_dir, log, provider, extra))


@cache
def _prepared_locally() -> tuple[Path, str, str]:
    """One for all tests of this process, which get a copy each."""
    folder = Path(tempfile.mkdtemp(prefix="cofferdam-site-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    with (folder / "log").open("w") as log:
        return folder / "data", *_prepare(folder / "data", log, LOCAL, {})


def _prepare(
    data_dir: Path,
    log: IO[str] | None,
    provider: tuple[str, Mapping[str, object]],
    extra: Mapping[str, str],
) -> tuple[str, str]:
    """The tenants' keys."""
    environment = clean_environment(data_dir, **extra)
    configure = CONFIGURE.format(provider=provider[0], config=dict(provider[1]))
    first, second = [*MANAGE, "bootstrap"], [*MANAGE, "shell", "-c", configure]
    subprocess.run(first, env=environment, cwd=ROOT, check=True, stdout=log, stderr=log)
    done = subprocess.run(second, env=environment, cwd=ROOT, check=True, stdout=PIPE, stderr=log)
    # Django says first what it has imported.
    alice, charlie = done.stdout.decode().split()[-2:]
    return alice, charlie


@contextmanager
def serving(
    prepared: Prepared, log: Path, command: Sequence[str] = (*MANAGE, "up"), **extra: str
) -> Iterator[Site]:
    """`manage.py up` over what was prepared, or another command that listens on PORT."""
    environment = prepared.environment(**extra)
    with started(command, environment, ROOT, log) as service:
        service.wait_until_ready(120)
        site = Site(service, prepared.data_dir, prepared.alice, prepared.charlie)
        site.assert_serves_others()
        yield site


@contextmanager
def running_site(tmp_path: Path, **extra: str) -> Iterator[Site]:
    with serving(prepare(tmp_path / "data"), tmp_path / "log", **extra) as site:
        yield site


def sleeper(seconds: float) -> dict[str, object]:
    return {"code": f"import time; time.sleep({seconds})", "timeout": seconds + 10}
