"""A running service with two tenants, for tests of what many callers see of it.

Preparing a data directory costs four seconds of a processor, most of them migrations. It is done
once for the code as it is, and kept beside pytest's own cache; a test gets a copy.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from subprocess import PIPE
from typing import IO

from sandbox_site import keys
from tests.support.processes import ROOT, Service, clean_environment, free_port, started
from tests.support.raw_http import ask

EXECUTIONS = "/api/v1/executions"
CACHE = ROOT / ".pytest_cache" / "d" / "data-directories"
KEPT_SECONDS = 24 * 3600
MANAGE = (sys.executable, "manage.py")
# A pool service may have listened there.
NO_SOCKETS = shutil.ignore_patterns("*.sock")

CONFIGURE = """
from executions.models import Tenant
from executions.tenants.keys import create_api_key
from providers.services import activate, save_config
save_config({provider!r}, {config!r})
activate({provider!r})
for slug in ("wonderland", "elsewhere"):
    print(create_api_key(Tenant.objects.create(slug=slug, name=slug), "attack")[1])
"""


_LISTS = """
from executions.capabilities.network.models import NetworkList
NetworkList.objects.create(mode="allowlist", rules={rules!r})
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
        assert ask(self.service, "GET", "/admin/login/").status == 200
        self.assert_serves_tenants()

    def assert_serves_tenants(self) -> None:
        """Health and another tenant's run, which have no bound on how often they are asked for."""
        assert ask(self.service, "GET", "/healthz").status == 200
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


def migrated(data_dir: Path) -> None:
    """Make `data_dir` one in which `manage.py bootstrap` finds its keys and its tables, as after
    a start that was cut off. It has everything else to do."""
    shutil.copytree(migrated_folder(), data_dir, dirs_exist_ok=True, ignore=NO_SOCKETS)


def migrated_folder() -> Path:
    """What `migrated` copies."""
    return kept_folder("migrated", _migrate) / "data"


def _migrate(folder: Path) -> None:
    data_dir = folder / "data"
    data_dir.mkdir(mode=0o700)
    keys.create(data_dir)
    command = [*MANAGE, "migrate", "--verbosity", "0"]
    subprocess.run(command, env=clean_environment(data_dir), cwd=ROOT, check=True)


def bootstrapped(data_dir: Path) -> dict[str, str]:
    """Make `data_dir` what `manage.py bootstrap` leaves; its credentials by name.

    It has the tenant `demo` and the provider `local`, and nothing was ever started over it.
    """
    made = kept_folder("bootstrapped", lambda folder: _bootstrap(folder / "data"))
    shutil.copytree(made / "data", data_dir, dirs_exist_ok=True, ignore=NO_SOCKETS)
    return credentials(data_dir)


def credentials(data_dir: Path) -> dict[str, str]:
    lines = (data_dir / "credentials.txt").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines)


def prepare(
    data_dir: Path,
    log: IO[str] | None = None,
    provider: tuple[str, Mapping[str, object]] = LOCAL,
    **extra: str,
) -> Prepared:
    """`log` has what the commands say, which else is said here."""
    if provider is LOCAL and not extra:
        made = kept_folder("two-tenants", _prepare_locally)
        shutil.copytree(made / "data", data_dir, dirs_exist_ok=True, ignore=NO_SOCKETS)
        return Prepared(data_dir, *(made / "keys").read_text().split())
    _bootstrap(data_dir, log, **extra)
    return Prepared(data_dir, *_configure(data_dir, log, provider, extra))


def _prepare_locally(folder: Path) -> None:
    bootstrapped(folder / "data")
    (folder / "keys").write_text(" ".join(_configure(folder / "data", None, LOCAL, {})))


def _bootstrap(data_dir: Path, log: IO[str] | None = None, **extra: str) -> None:
    environment = clean_environment(data_dir, **extra)
    command = [*MANAGE, "bootstrap"]
    subprocess.run(command, env=environment, cwd=ROOT, check=True, stdout=log, stderr=log)


def _configure(
    data_dir: Path,
    log: IO[str] | None,
    provider: tuple[str, Mapping[str, object]],
    extra: Mapping[str, str],
) -> tuple[str, str]:
    """The tenants' keys."""
    environment = clean_environment(data_dir, **extra)
    configure = CONFIGURE.format(provider=provider[0], config=dict(provider[1]))
    command = [*MANAGE, "shell", "-c", configure]
    done = subprocess.run(command, env=environment, cwd=ROOT, check=True, stdout=PIPE, stderr=log)
    # Django says first what it has imported.
    alice, charlie = done.stdout.decode().split()[-2:]
    return alice, charlie


def kept_folder(name: str, make: Callable[[Path], None], *sources: Path) -> Path:
    """A folder that `make` fills once for the code as it is, whoever asks first.

    `sources` are the files that say how it is filled, beside this one. Nobody writes to it.
    """
    folder = CACHE / _digest_of_the_code(*sources) / name
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (folder.parent / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            draft = folder.with_name(f"{name}.draft")
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir()
            make(draft)
            draft.rename(folder)
            _forget_former(folder.parent)
    os.utime(folder.parent)
    return folder


def _forget_former(current: Path) -> None:
    """Remove what was made for other states of the code and was not used for a day."""
    for other in CACHE.iterdir():
        if other != current and other.stat().st_mtime < time.time() - KEPT_SECONDS:
            shutil.rmtree(other, ignore_errors=True)


@cache
def _digest_of_the_code(*sources: Path) -> str:
    """Of all that decides what is in a data directory."""
    digest = hashlib.sha256(sys.version.encode())
    files = [ROOT / "requirements.txt", Path(__file__), *sources]
    for package in ("executions", "providers", "sandbox_site"):
        files += sorted((ROOT / package).rglob("*.py"))
    for path in files:
        digest.update(f"{path.relative_to(ROOT)} {path.stat().st_size}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


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


@contextmanager
def site_with_network(folder: Path, rules: str, **extra: str) -> Iterator[Site]:
    """One whose sandboxes reach servers of this machine, where the rules have them."""
    prepared = prepare(folder / "data")
    command = [sys.executable, "manage.py", "shell", "-c", _LISTS.format(rules=rules)]
    environment = clean_environment(prepared.data_dir)
    subprocess.run(command, env=environment, cwd=ROOT, check=True, timeout=60)
    extra = {"NETWORK_ALLOWED_ADDRESSES": "127.0.0.0/8", **extra}
    with serving(prepared, folder / "log", **extra) as site:
        yield site


def sleeper(seconds: float) -> dict[str, object]:
    return {"code": f"import time; time.sleep({seconds})", "timeout": seconds + 10}
