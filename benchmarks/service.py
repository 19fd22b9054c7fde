"""A Cofferdam of the benchmark's own, started and ended with it, and callers of its API."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

_CONFIGURE = """
from executions.models import Tenant
from providers.services import activate, save_config
import json, os
provider = os.environ["BENCH_PROVIDER"]
save_config(provider, json.loads(os.environ["BENCH_CONFIG"]))
activate(provider)
# What is measured is the service, not what a tenant may have of it.
Tenant.objects.filter(slug="demo").update(
    max_running=10_000,
    max_queued=100_000,
    max_requests_per_minute=10_000_000,
    max_executions_per_day=1_000_000_000,
    max_seconds_per_day=1_000_000_000,
)
"""


@dataclass(frozen=True)
class Service:
    """Where it listens, the key to call it with, and the process that supervises the others.

    `command` runs one of manage.py's for it, and returns what that prints.
    """

    port: int
    pool_port: int
    api_key: str
    process: subprocess.Popen[bytes]
    environment: Mapping[str, str]
    root: Path = ROOT

    def manage(self, *arguments: str) -> str:
        """What a management command prints."""
        return _manage(self.root, self.environment, *arguments)

    @property
    def pool_endpoint(self) -> str:
        return f"http://127.0.0.1:{self.pool_port}"

    def memory_bytes(self) -> int:
        """Resident memory of the processes that serve: supervisor, web and worker."""
        total = 0
        for pid in _family(self.process.pid):
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
                if any(word in command for word in (b"gunicorn", b"qcluster", b"manage.py")):
                    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
                    total += pages * os.sysconf("SC_PAGE_SIZE")
            except (OSError, IndexError):
                continue
        return total


@contextmanager
def running_service(
    data_dir: Path,
    config: dict[str, object],
    provider: str = "local",
    root: Path = ROOT,
    **settings: str,
) -> Iterator[Service]:
    """Start everything on free ports with an empty data directory; end it afterwards.

    `settings` are environment variables, and `root` is the project, which may be another checkout.
    The key is of a tenant without bounds.
    """
    port, pool_port = _free_port(), _free_port()
    if provider == "self_managed":
        config = {**config, "endpoint": f"http://127.0.0.1:{pool_port}"}
    environment = os.environ | {
        "DATA_DIR": str(data_dir),
        "PORT": str(port),
        "POOL_PORT": str(pool_port),
        "PROVIDER_ALLOWED_NETWORKS": "127.0.0.0/8",
        "BENCH_PROVIDER": provider,
        "BENCH_CONFIG": json.dumps(config),
        "LOG_LEVEL": "ERROR",
        **settings,
    }
    environment.pop("DJANGO_SETTINGS_MODULE", None)
    _manage(root, environment, "bootstrap")
    _manage(root, environment, "shell", "-c", _CONFIGURE)
    api_key = _manage(root, environment, "create_api_key", "demo", "--name", "bench")
    command = [sys.executable, str(root / "manage.py"), "up"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    try:
        _wait_until_up(port, process)
        yield Service(port, pool_port, api_key, process, environment, root)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def own_environment(folder: str) -> dict[str, str]:
    """The environment of a process that uses Django with a data directory and keys of its own."""
    return os.environ | {
        "DATA_DIR": folder,
        "DJANGO_SETTINGS_MODULE": "sandbox_site.settings",
        "SECRET_KEY": secrets.token_urlsafe(50),
        "FERNET_KEYS": secrets.token_urlsafe(32),
        "LEDGER_KEYS": secrets.token_urlsafe(32),
        "LOG_LEVEL": "ERROR",
    }


def api_caller(service: Service, body: dict[str, object], expect: bytes) -> Callable[[], None]:
    """Posts `body` on a kept connection. A bare socket, so that little of the time is ours.

    Raises RuntimeError for an answer that is not 200 or lacks `expect`.
    """
    headers = {"X-API-Key": service.api_key}
    return http_caller(
        service.port, "/api/v1/executions", json.dumps(body).encode(), headers, expect
    )


def http_caller(
    port: int,
    path: str,
    content: bytes,
    headers: dict[str, str],
    expect: bytes,
    *,
    method: str = "POST",
    status: int = 200,
) -> Callable[[], None]:
    """Sends `content` as JSON on a kept connection, as `api_caller` does."""
    lines = [f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    lines += [f"Content-Length: {len(content)}", "", ""]
    request = "\r\n".join(lines).encode() + content
    connection = socket.create_connection(("127.0.0.1", port))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def call() -> None:
        connection.sendall(request)
        received = b""
        while b"\r\n\r\n" not in received:
            received += _receive(connection)
        head, _, answer = received.partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
        while len(answer) < length:
            answer += _receive(connection)
        if head.split(b" ")[1] != b"%d" % status or expect not in answer:
            raise RuntimeError(f"unexpected answer: {answer[:500]!r}")

    return call


def _manage(root: Path, environment: Mapping[str, str], *arguments: str) -> str:
    command = [sys.executable, str(root / "manage.py"), *arguments]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def _receive(connection: socket.socket) -> bytes:
    data = connection.recv(65536)
    if not data:
        raise RuntimeError("the service closed the connection")
    return data


def _wait_until_up(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError("the service did not start")


def own_memory(service: Service) -> tuple[int, float]:
    """How many processes the service has without its sandboxes, and their MiB (PSS)."""
    count, kibibytes = 0, 0
    for pid in own_processes(service):
        with suppress(OSError):
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            kibibytes += next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
            count += 1
    return count, kibibytes / 1024


def wakeups_per_second(service: Service, seconds: float) -> float:
    """How often a thread of the service, its sandboxes apart, has slept and gone on in a second."""
    before, began = _sleeps(service), time.monotonic()
    time.sleep(seconds)
    after, ended = _sleeps(service), time.monotonic()
    return sum(after[task] - before.get(task, 0) for task in after) / (ended - began)


def _sleeps(service: Service) -> dict[Path, int]:
    """The voluntary context switches of each thread."""
    found: dict[Path, int] = {}
    for pid in own_processes(service):
        for task in Path(f"/proc/{pid}/task").glob("*"):
            with suppress(OSError):
                _, _, rest = (task / "status").read_text().partition("\nvoluntary_ctxt_switches:")
                found[task] = int(rest.split()[0])
    return found


def own_processes(service: Service) -> Iterator[int]:
    """The process ids of what runs this interpreter, which no sandbox does."""
    for pid in processes_of(service):
        with suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            if command.startswith(sys.executable.encode() + b"\0"):
                yield pid


def processes_of(service: Service) -> Iterator[int]:
    """The process ids of all that the service has started, sandboxes included."""
    yield from _family(service.process.pid)


def _family(pid: int) -> Iterator[int]:
    yield pid
    children: list[str] = []
    # It may end meanwhile, as what was forked for a moment does.
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").glob("*/children"):
            children += task.read_text().split()
    for child in children:
        yield from _family(int(child))
