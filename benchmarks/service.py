"""A Cofferdam of the benchmark's own, started and ended with it, and callers of its API."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

_CONFIGURE = """
from providers.services import activate, save_config
import json, os
save_config(os.environ["BENCH_PROVIDER"], json.loads(os.environ["BENCH_CONFIG"]))
activate(os.environ["BENCH_PROVIDER"])
"""


@dataclass(frozen=True)
class Service:
    """Where it listens, the key to call it with, and the process that supervises the others."""

    port: int
    api_key: str
    process: subprocess.Popen[bytes]

    def memory_bytes(self) -> int:
        """Resident memory of the processes that serve: supervisor, web and worker."""
        total = 0
        for pid in _family(self.process.pid):
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
                if b"gunicorn" in command or b"manage.py" in command:
                    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
                    total += pages * os.sysconf("SC_PAGE_SIZE")
            except (OSError, IndexError):
                continue
        return total


@contextmanager
def running_service(
    data_dir: Path, config: dict[str, object], *, provider: str = "local"
) -> Iterator[Service]:
    """Start everything on a free port with an empty data directory; end it afterwards."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {
        "DATA_DIR": str(data_dir),
        "PORT": str(port),
        "BENCH_PROVIDER": provider,
        "BENCH_CONFIG": json.dumps(config),
        "LOG_LEVEL": "ERROR",
    }
    environment.pop("DJANGO_SETTINGS_MODULE", None)
    manage = [sys.executable, str(ROOT / "manage.py")]

    def command(*arguments: str) -> str:
        done = subprocess.run(
            [*manage, *arguments], env=environment, check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    command("bootstrap")
    command("shell", "-c", _CONFIGURE)
    api_key = command("create_api_key", "demo", "--name", "bench")
    process = subprocess.Popen([*manage, "up"], env=environment, stdout=subprocess.DEVNULL)
    try:
        _wait_until_up(port, process)
        yield Service(port, api_key, process)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(10)


def api_caller(service: Service, body: dict[str, object], expect: bytes) -> Callable[[], None]:
    """Posts `body` on a kept connection. A bare socket, so that little of the time is ours.

    Raises RuntimeError for an answer that is not 200 or lacks `expect`.
    """
    content = json.dumps(body).encode()
    request = (
        b"POST /api/v1/executions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        b"X-API-Key: %s\r\nContent-Length: %d\r\n\r\n" % (service.api_key.encode(), len(content))
    ) + content
    connection = socket.create_connection(("127.0.0.1", service.port))
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
        if b" 200 " not in head.split(b"\r\n")[0] or expect not in answer:
            raise RuntimeError(f"unexpected answer: {answer[:500]!r}")

    return call


def _receive(connection: socket.socket) -> bytes:
    data = connection.recv(65536)
    if not data:
        raise RuntimeError("the service closed the connection")
    return data


def _wait_until_up(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError("the service did not start")


def _family(pid: int) -> Iterator[int]:
    yield pid
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            yield from _family(int(child))
