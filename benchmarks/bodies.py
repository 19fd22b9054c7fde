"""What another tenant notices of hostile bodies: its runs, /healthz, and memory afterwards.

One tenant with eight keys sends the same large body again and again from each: lists of many
members, objects of many names, long texts. Beside it another tenant has runs, one after another.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from http.client import HTTPConnection, HTTPException
from multiprocessing.synchronize import Event as Stop
from pathlib import Path
from typing import Any

from benchmarks.bounds import Tenant
from benchmarks.service import Service, running_service

KEYS = 8
MIB = 1024 * 1024
Answer = tuple[int, float]
# How long memory has to come back.
_SETTLE_SECONDS = 60


@dataclass(frozen=True)
class Attack:
    name: str
    path: str
    body: Callable[[], bytes]
    scopes: str = ""
    headers: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Seen:
    """Milliseconds and MiB. `answers` are the attacker's, by status; 0 is none. `ended` are runs of
    the other tenant that did not succeed. Of /healthz it is the longest answer, alone and under
    the attack."""

    name: str
    answer_ms: float
    answers: dict[int, int]
    alone_p50_ms: float
    p50_ms: float
    runs: int
    ended: int
    healthz_alone_ms: float
    healthz_ms: float
    before_mib: float
    most_mib: float
    after_mib: float
    settled_seconds: float


def _members(start: str, member: str, end: str, size: int) -> bytes:
    count = (size - len(start) - len(end)) // (len(member) + 1)
    return (start + ",".join([member] * count) + end).encode()


def _unique_keys() -> bytes:
    return ("{" + ",".join(f'"k{number:07}":1' for number in range(61 * MIB // 13)) + "}").encode()


_MCP_HEADERS = (("Accept", "application/json, text/event-stream"),)
_RUNS = "/api/v1/executions"
ATTACKS = (
    Attack("files, 7 MB", _RUNS, lambda: _members('{"code":"1","files":[', "{}", "]}", 7 * MIB)),
    Attack("unique keys, 61 MB", _RUNS, _unique_keys),
    Attack(
        "MCP, key that reads, 7 MB",
        "/mcp",
        lambda: _members('{"jsonrpc":"2.0","id":1,"method":"x","params":[', "{}", "]}", 7 * MIB),
        "read",
        _MCP_HEADERS,
    ),
    Attack(
        "argv, 2 MB",
        "/api/v1/sessions/{session}/processes",
        lambda: _members('{"command":[', "1", "]}", 2 * MIB),
    ),
    Attack(
        "env, 2 MB",
        _RUNS,
        lambda: (
            '{"code":"1","env":{' + ",".join(f'"{n}":1' for n in range(2 * MIB // 10)) + "}}"
        ).encode(),
    ),
    Attack(
        "99,000 values",
        _RUNS,
        lambda: ('{"code":"1","arguments":' + json.dumps(list(range(99_000))) + ',"x":1}').encode(),
    ),
    Attack(
        "a file of 40 MB",
        _RUNS,
        lambda: (
            b'{"code":"","files":[{"path":"a","content_base64":"' + b"AAAA" * (13 * MIB) + b'"}]}'
        ),
    ),
)


def measure(service: Service, attack: Attack, keys: list[str], other: Tenant, each: float) -> Seen:
    """`each` is for how many seconds it goes on."""
    body = attack.body()
    with _beside(partial(_ask_health, service.port)) as calm:
        alone = [_milliseconds(other)[1] for _ in range(20)]
    before = most = service.memory_bytes()
    runs = []
    send = partial(_send, service.port, attack, keys, body)
    with _beside(partial(_ask_health, service.port)) as health, _beside(send) as sent:
        until = time.monotonic() + each
        while time.monotonic() < until:
            runs.append(_milliseconds(other))
            most = max(most, service.memory_bytes())
    began = time.monotonic()
    while (after := service.memory_bytes()) > before * 1.1:
        if time.monotonic() > began + _SETTLE_SECONDS:
            break
        time.sleep(0.5)
    return Seen(
        attack.name,
        statistics.median(ms for _, ms in sent),
        dict(Counter(status for status, _ in sent)),
        statistics.median(alone),
        statistics.median(ms for _, ms in runs),
        len(runs),
        sum(not succeeded for succeeded, _ in runs),
        max(ms for _, ms in calm),
        max(ms for _, ms in health),
        before / MIB,
        most / MIB,
        after / MIB,
        time.monotonic() - began,
    )


def _milliseconds(tenant: Tenant) -> tuple[bool, float]:
    """Whether a run succeeded, and how long it took."""
    status, answer, seconds = tenant.run(0)
    return status == 200 and answer["status"] == "succeeded", seconds * 1000


@contextmanager
def _beside(work: Callable[[Stop], list[Answer]]) -> Iterator[list[Answer]]:
    """What is seen by a process of its own, whose lock of the interpreter is another one."""
    stop, told = multiprocessing.Event(), multiprocessing.Queue()
    process = multiprocessing.Process(target=lambda: told.put(work(stop)))
    process.start()
    found: list[Answer] = []
    try:
        yield found
    finally:
        stop.set()
        found += told.get()
        process.join()


def _send(port: int, attack: Attack, keys: list[str], body: bytes, stop: Stop) -> list[Answer]:
    found: list[Answer] = []
    headers = {"Content-Type": "application/json", **dict(attack.headers)}

    def send(key: str) -> None:
        while not stop.is_set():
            found.append(_ask(port, "POST", attack.path, body, {"X-API-Key": key, **headers}))
            if found[-1][0] == 429:
                time.sleep(0.2)

    with ThreadPoolExecutor(len(keys)) as threads:
        list(threads.map(send, keys))
    return found


def _ask_health(port: int, stop: Stop) -> list[Answer]:
    found = [_ask(port, "GET", "/healthz")]
    while not stop.wait(0.02):
        found.append(_ask(port, "GET", "/healthz"))
    return found


def _ask(
    port: int, method: str, path: str, body: bytes | None = None, headers: Any = None
) -> Answer:
    """Status, 0 for none, and milliseconds."""
    began = time.perf_counter()
    with closing(HTTPConnection("127.0.0.1", port, timeout=300)) as connection:
        try:
            connection.request(method, path, body, headers or {})
            answer = connection.getresponse()
            answer.read()
            status = answer.status
        except (OSError, HTTPException):
            status = 0
    return status, (time.perf_counter() - began) * 1000


def measure_all(options: argparse.Namespace) -> list[Seen]:
    rows = []
    with (
        tempfile.TemporaryDirectory(prefix="cofferdam-bench-") as folder,
        running_service(Path(folder), {"launcher": "bubblewrap"}) as service,
    ):
        for slug in ("greedy", "other"):
            service.manage("create_tenant", slug)
        other = Tenant(service, service.manage("create_api_key", "other", "--name", "bench"))
        made: dict[str, list[str]] = {}
        for attack in ATTACKS:
            if options.only and options.only not in attack.name:
                continue
            if attack.scopes not in made:
                scopes = ["--scope", attack.scopes] if attack.scopes else []
                made[attack.scopes] = [
                    service.manage("create_api_key", "greedy", "--name", f"key{n}", *scopes)
                    for n in range(KEYS)
                ]
            keys = made[attack.scopes]
            if "{session}" in attack.path:
                _, opened, _ = Tenant(service, keys[0]).ask("/api/v1/sessions", {})
                attack = Attack(attack.name, attack.path.format(session=opened["id"]), attack.body)
            print(f"measuring {attack.name} ...", file=sys.stderr)
            rows.append(measure(service, attack, keys, other, options.seconds))
            print(table(rows[-1:]).splitlines()[-1], file=sys.stderr)
    return rows


def table(rows: list[Seen]) -> str:
    names = (
        f"{'answer':>8} {'alone':>7} {'p50':>8} {'runs':>5} {'ended':>5} {'calm':>6} {'healthz':>8}"
    )
    header = f"{'milliseconds and MiB':28} {names} {'before':>7} {'most':>7} {'after':>7}  answers"
    lines = [header, "-" * len(header)]
    lines += [
        f"{row.name:28} {row.answer_ms:8.0f} {row.alone_p50_ms:7.0f} {row.p50_ms:8.0f} "
        f"{row.runs:5} {row.ended:5} {row.healthz_alone_ms:6.0f} "
        f"{row.healthz_ms:8.0f} {row.before_mib:7.0f} "
        f"{row.most_mib:7.0f} {row.after_mib:7.0f}  {row.answers}"
        for row in rows
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bodies", description=__doc__)
    parser.add_argument("--seconds", type=float, default=10, help="of each attack (10)")
    parser.add_argument("--only", default="", help="attacks with this in their name")
    parser.add_argument("--json", type=Path, default=Path("var/bench/bodies.json"))
    options = parser.parse_args()
    rows = measure_all(options)
    print(table(rows))
    options.json.parent.mkdir(parents=True, exist_ok=True)
    found = {"machine": platform.platform(), "rows": [asdict(row) for row in rows]}
    options.json.write_text(json.dumps(found, indent=2) + "\n")
    print(f"written to {options.json}", file=sys.stderr)


if __name__ == "__main__":
    main()
