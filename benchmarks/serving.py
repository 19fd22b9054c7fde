"""What one tenant can do to the others with slow sockets and long runs: alone, and under attack.

The attack is 500 sockets that never finish a request, half of them in its headers and half in its
body, opened anew as they are closed, and 100 runs of one tenant that sleep. Meanwhile /healthz is
asked, and another tenant runs a short program.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.measure import Figures, measure, table, write_json
from benchmarks.service import ROOT, Service, http_caller, running_service

EXECUTIONS = "/api/v1/executions"
SLOW_SOCKETS = 500
LONG_RUNS = 100
PAUSE_SECONDS = 0.05

_BOUND = (
    "from executions.models import Tenant; "
    f"Tenant.objects.filter(slug='demo').update(max_running={LONG_RUNS})"
)

# What is asked for: /healthz at most, and a run's p50 as a multiple of itself alone.
LONGEST_HEALTH_MS = 100
MOST_TIMES_SLOWER = 2


def post(key: str, body: dict[str, object]) -> bytes:
    content = json.dumps(body).encode()
    return (
        f"POST {EXECUTIONS} HTTP/1.1\r\nHost: 127.0.0.1\r\nX-API-Key: {key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    ).encode() + content


class Attack:
    """Holds its sockets open, each with what it has sent, and opens one anew that was closed."""

    def __init__(self, port: int, key: str, seconds: float) -> None:
        self._port = port
        self._selector = selectors.DefaultSelector()
        self._statuses: Counter[str] = Counter()
        self._key = key
        self._seconds = seconds
        self._run = self._sleeper(seconds)
        self._half_body = self._run.partition(b"\r\n\r\n")[0] + b"\r\n\r\n{"

    def hold(self) -> None:
        for _ in range(SLOW_SOCKETS // 2):
            self._open(b"GET /healthz HTTP/1.1\r\nHost: x\r\n", "half a header")
            self._open(self._half_body, "one byte of a body")
        for number in range(LONG_RUNS):
            # The first ones end one after the other, so that those that follow do so too.
            longer = self._sleeper(self._seconds * (1 + number / LONG_RUNS))
            self._open(longer, "a long run", then=self._run)
        print("open", flush=True)
        while True:
            for key, _ in self._selector.select(timeout=1):
                connection, sent, name = key.fileobj, *key.data
                assert isinstance(connection, socket.socket)
                self._statuses[f"{name}: {_status(connection)}"] += 1
                self._selector.unregister(connection)
                connection.close()
                self._open(sent, name)
                print(json.dumps(self._statuses), flush=True)

    def _sleeper(self, seconds: float) -> bytes:
        code = f"import time; time.sleep({seconds})"
        return post(self._key, {"code": code, "timeout": seconds + 10})

    def _open(self, sent: bytes, name: str, then: bytes = b"") -> None:
        connection = socket.create_connection(("127.0.0.1", self._port))
        connection.sendall(sent)
        self._selector.register(connection, selectors.EVENT_READ, (then or sent, name))


def _status(connection: socket.socket) -> str:
    try:
        first = connection.recv(65536).split(b"\r\n")[0].split(b" ")
    except OSError:
        return "broken off"
    return first[1].decode() if len(first) > 1 else "closed"


@contextmanager
def attacked(service: Service, seconds: float, told: dict[str, int]) -> Iterator[None]:
    """In a process of its own, until the block ends. `told` gets what its sockets were told."""
    command = [sys.executable, "-m", "benchmarks.serving", "--attack", str(service.port)]
    process = subprocess.Popen(
        [*command, service.api_key, "--seconds", str(seconds)], cwd=ROOT, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        if process.stdout.readline() != b"open\n":
            raise RuntimeError("the attack did not come about")
        yield
    finally:
        process.terminate()
        said = process.communicate()[0].splitlines()
        told.update(json.loads(said[-1]) if said else {})


def wait_for_running(service: Service, count: int) -> None:
    """Until so many runs are open. Raises RuntimeError after a minute."""
    code = (
        "from executions.models import Execution; "
        "print(Execution.objects.filter(finished_at=None).count())"
    )
    deadline = time.monotonic() + 60
    while int(service.manage("shell", "-c", code).splitlines()[-1]) < count:
        if time.monotonic() > deadline:
            raise RuntimeError(f"there are not {count} runs")


def rows(service: Service, key: str, when: str, calls: int) -> list[Figures]:
    def health() -> Callable[[], None]:
        return http_caller(service.port, "/healthz", b"", {}, b'"ok"', method="GET")

    def run() -> Callable[[], None]:
        content = json.dumps({"code": "print(1)"}).encode()
        headers = {"X-API-Key": key}
        return http_caller(service.port, EXECUTIONS, content, headers, b'"stdout":"1\\n"')

    print(f"measuring {when} ...", file=sys.stderr)
    return [
        measure(f"/healthz, {when}", health, callers=1, calls=calls, pause=PAUSE_SECONDS),
        measure(f"another tenant's run, {when}", run, callers=1, calls=calls, pause=PAUSE_SECONDS),
    ]


def refused_at_once(service: Service) -> Figures:
    """How long the attacker's next run takes to be refused: his tenant runs all it may."""

    def refused() -> Callable[[], None]:
        headers = {"X-API-Key": service.api_key}
        content = json.dumps({"code": "print(1)"}).encode()
        return http_caller(service.port, EXECUTIONS, content, headers, b"SB008", status=429)

    return measure("a refusal, under attack", refused, callers=1, calls=50, pause=PAUSE_SECONDS)


def main() -> None:
    parser = argparse.ArgumentParser(prog="make bench ARGS=...", description=__doc__)
    parser.add_argument("--calls", type=int, default=150, help="counted calls per row (150)")
    parser.add_argument("--seconds", type=float, default=30, help="length of the long runs (30)")
    parser.add_argument("--json", type=Path, default=Path("var/bench/serving.json"))
    parser.add_argument("--attack", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.attack:
        Attack(int(options.attack[0]), options.attack[1], options.seconds).hold()
    config: dict[str, object] = {
        "launcher": "bubblewrap",
        "pool_size": 8,
        "max_sandboxes": LONG_RUNS + 28,
        # For the attack to come about on a slow machine too.
        "queue_timeout": 60,
    }
    told: dict[str, int] = {}
    with (
        tempfile.TemporaryDirectory(prefix="cofferdam-bench-") as folder,
        running_service(Path(folder), config) as service,
    ):
        service.manage("shell", "-c", _BOUND)
        service.manage("create_tenant", "neighbour")
        key = service.manage("create_api_key", "neighbour", "--name", "bench")
        alone = rows(service, key, "alone", options.calls)
        with attacked(service, options.seconds, told):
            wait_for_running(service, LONG_RUNS)
            refused = refused_at_once(service)
            under = [*rows(service, key, "under attack", options.calls), refused]
    print(table([*alone, *under], alone[1]))
    ratio = round(under[1].p50_ms / alone[1].p50_ms, 2)
    print(
        f"\n/healthz under attack: {under[0].max_ms:.0f} ms at most (bound {LONGEST_HEALTH_MS}); "
        f"another tenant's run: {ratio} times its p50 alone (bound {MOST_TIMES_SLOWER})"
    )
    print("the attack's sockets were told: " + (", ".join(f"{k} {v}" for k, v in told.items())))
    extra: dict[str, object] = {
        "machine": platform.platform(),
        "cpus": os.cpu_count(),
        "slow_sockets": SLOW_SOCKETS,
        "long_runs": LONG_RUNS,
        "run_seconds": options.seconds,
        "healthz_max_ms": under[0].max_ms,
        "run_p50_ratio": ratio,
        "told": told,
    }
    write_json(options.json, [*alone, *under], extra)
    print(f"written to {options.json}", file=sys.stderr)


if __name__ == "__main__":
    main()
