"""What is broken on purpose: two hosts of Cofferdam, and the servers that they share."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.support.processes import NO_DOCKER, ROOT, free_port
from tests.support.servers import Servers

RESTART_SECONDS = 1.0
STOP_SECONDS = 30.0
SKEW_SECONDS = 300

_SKEWED = Path(__file__).parent / "skewed"

_CONFIGURE = """
from executions.models import Tenant
from executions.tenants.keys import create_api_key
from providers.services import activate, save_config
import json
save_config(%r, %r)
activate(%r)
keys = {}
for number in range(%d):
    slug = f"tenant-{number}"
    bounds = {"max_running": %d, "max_queued": 1000, "max_requests_per_minute": 1_000_000}
    tenant = Tenant.objects.create(slug=slug, name=slug, **bounds)
    keys[slug] = create_api_key(tenant, "chaos")[1]
print(json.dumps(keys))
"""


@dataclass(frozen=True)
class Death:
    """A process that a fault ended: when, on which host, and what it was."""

    at: float
    host: str
    pid: int


@dataclass
class Host:
    """One machine: `manage.py up`, started again whenever it ends, as systemd does."""

    name: str
    environment: dict[str, str]
    log: Path
    deaths: list[Death] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.port = int(self.environment["PORT"])
        self.url = f"http://127.0.0.1:{self.port}"
        self._goes_on = True
        self._process: subprocess.Popen[bytes] | None = None
        self._keeper = threading.Thread(target=self._keep, name=f"host-{self.name}", daemon=True)

    def start(self) -> None:
        self._keeper.start()

    def stop(self) -> None:
        """In order, and for good."""
        self._goes_on = False
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
        if self._keeper.is_alive():
            self._keeper.join(STOP_SECONDS)
        if self._process is not None and self._process.poll() is None:
            self._process.kill()

    def processes(self) -> dict[str, list[int]]:
        """Process ids by what they are: up, master, web, cluster, worker."""
        if self._process is None:
            return {}
        found: dict[str, list[int]] = {}
        for pid, depth, command in _family(self._process.pid):
            if depth == 0:
                kind = "up"
            elif "gunicorn" in command:
                kind = "master" if depth == 1 else "web"
            elif "qcluster" in command:
                kind = "cluster" if depth == 1 else "worker"
            else:
                continue
            found.setdefault(kind, []).append(pid)
        return found

    def hit(self, kind: str, number: signal.Signals, chance: random.Random) -> str:
        """Send a signal to one process of a kind. What was hit, "" when there is none."""
        pids = self.processes().get(kind, [])
        if not pids:
            return ""
        pid = chance.choice(pids)
        before = _pids_below(pid)
        with suppress(ProcessLookupError):
            os.kill(pid, number)
            if number == signal.SIGKILL:
                now = time.time()
                self.deaths += [Death(now, self.name, each) for each in (pid, *before)]
        return f"{signal.Signals(number).name} {kind} of {self.name}"

    def pause(self, kind: str, seconds: float, chance: random.Random) -> str:
        """Stop a process for a while, as a machine that swaps or migrates does."""
        pids = self.processes().get(kind, [])
        if not pids:
            return ""
        pid = chance.choice(pids)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            time.sleep(seconds)
            os.kill(pid, signal.SIGCONT)
        return f"{kind} of {self.name} stopped for {seconds:g} s"

    def manage(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, str(ROOT / "manage.py"), *arguments],
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )

    def _keep(self) -> None:
        with self.log.open("ab") as stream:
            while self._goes_on:
                self._process = subprocess.Popen(
                    [sys.executable, str(ROOT / "manage.py"), "up"],
                    env=self.environment,
                    stdin=subprocess.DEVNULL,
                    stdout=stream,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                self._process.wait()
                if self._goes_on:
                    time.sleep(RESTART_SECONDS)


class Server:
    """PostgreSQL or Redis, which can be stopped and started as it was."""

    def __init__(self, name: str, servers: Servers) -> None:
        self.name = name
        self.pid = servers.pid(name)
        self._pid_file = servers.folder / f"{name}.pid"
        self.down: list[tuple[float, float]] = []
        self._command = _COMMANDS[name](servers)
        self._cwd = Path(f"/proc/{self.pid}/cwd").readlink()
        self._owner = Path(f"/proc/{self.pid}").stat()

    def stop(self, number: signal.Signals) -> None:
        self._down_at = time.time()
        os.kill(self.pid, number)
        while _is_running(self.pid):
            time.sleep(0.02)

    def start(self) -> None:
        process = subprocess.Popen(
            self._command,
            cwd=self._cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            user=self._owner.st_uid,
            group=self._owner.st_gid,
            start_new_session=True,
        )
        self.pid = process.pid
        # For whoever ends the servers after us.
        self._pid_file.write_text(f"{self.pid}\n")
        threading.Thread(target=process.wait, daemon=True).start()
        self.down.append((self._down_at, time.time()))

    def outage(self, number: signal.Signals, seconds: float) -> str:
        self.stop(number)
        time.sleep(seconds)
        self.start()
        return f"{self.name} away for {seconds:g} s"


def _postgres_command(servers: Servers) -> list[str]:
    """As it was started, but that a commit which was answered outlives it."""
    shown = Path(f"/proc/{servers.pid('postgres')}/cmdline").read_bytes().rstrip(b"\0")
    return [
        part.replace("synchronous_commit=off", "synchronous_commit=on")
        for part in shown.decode().split("\0")
    ]


def _redis_command(servers: Servers) -> list[str]:
    """As .ci/start-servers has it. The process itself shows its title only."""
    url = urlsplit(servers.environment["REDIS_URL"])
    return [
        *("redis-server", "--port", str(url.port), "--bind", str(url.hostname)),
        *("--requirepass", str(url.password), "--save", "", "--appendonly", "no"),
    ]


_COMMANDS = {"postgres": _postgres_command, "redis": _redis_command}


def environment_of(
    name: str, folder: Path, shared: Mapping[str, str], *, skewed: bool
) -> dict[str, str]:
    """Of one host. Its PATH has no isolation tool: what runs must be able to say so outside."""
    tools = folder.parent / "bin"
    tools.mkdir(exist_ok=True)
    environment = {
        **shared,
        "PATH": str(tools),
        "HOME": str(folder),
        "LANG": "C.UTF-8",
        "DOCKER_HOST": NO_DOCKER,
        "DATA_DIR": str(folder),
        "PORT": str(free_port()),
        "POOL_PORT": str(free_port()),
        "INSTANCE": name,
        "SANDBOX_LOCAL_UNISOLATED": "true",
        "MINIMUM_ISOLATION": "none",
        "LOG_LEVEL": "WARNING",
    }
    if skewed:
        environment |= {"PYTHONPATH": str(_SKEWED), "CLOCK_AHEAD_SECONDS": str(SKEW_SECONDS)}
    return environment


LOCAL = ("local", {"launcher": "auto", "pool_size": 2, "max_sandboxes": 16})


def configure(
    host: Host, provider: tuple[str, dict[str, Any]], tenants: int, max_running: int
) -> dict[str, str]:
    """The database's tables, a provider and so many tenants. An API key for each."""
    name, config = provider
    script = _CONFIGURE % (name, config, name, tenants, max_running)
    for arguments in (("bootstrap",), ("shell", "-c", script)):
        done = host.manage(*arguments)
        if done.returncode:
            raise RuntimeError(f"{arguments[0]}: {done.stderr[-2000:]}")
    keys: dict[str, str] = json.loads(done.stdout.strip().splitlines()[-1])
    return keys


def _family(pid: int, depth: int = 0) -> Iterator[tuple[int, int, str]]:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        children = [
            int(child)
            for task in Path(f"/proc/{pid}/task").glob("*/children")
            for child in task.read_text().split()
        ]
    except OSError:
        return
    yield pid, depth, command
    for child in children:
        yield from _family(child, depth + 1)


def _pids_below(pid: int) -> list[int]:
    return [each for each, depth, _ in _family(pid) if depth]


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False
