"""What another tenant notices of one that attacks: its runs, /healthz, and memory afterwards.

One tenant with eight keys sends large bodies, follows one execution by many streams, takes
connections, leaves answers unread, or moves folders of many saved files. Beside it another tenant
has runs, one after another.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import resource
import socket
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
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


Send = Callable[[Stop], list[Answer]]


@dataclass(frozen=True)
class Attack:
    """`begin` prepares it with the attacker's keys, and returns what goes on until it is stopped,
    in a process of its own."""

    name: str
    begin: Callable[[Service, list[str]], Send]
    scopes: str = ""


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


_MCP_HEADERS = {"Accept": "application/json, text/event-stream"}
_RUNS = "/api/v1/executions"


def _body(
    path: str, body: Callable[[], bytes], **headers: str
) -> Callable[[Service, list[str]], Send]:
    """The same body again and again, from each key."""

    def begin(service: Service, keys: list[str]) -> Send:
        where = path
        if "{session}" in path:
            _, session, _ = Tenant(service, keys[0]).ask("/api/v1/sessions", {})
            where = path.format(session=session["id"])
        content = body()
        return partial(_send, service.port, where, {**JSON, **headers}, keys, content)

    return begin


JSON = {"Content-Type": "application/json"}


def _queued(service: Service, key: str) -> str:
    """The id of an execution that begins in an hour."""
    at = datetime.now(UTC) + timedelta(hours=1)
    later = {"code": "1", "mode": "async", "run_at": at.isoformat()}
    status, queued, _ = Tenant(service, key).ask(_RUNS, later)
    if status != 202:
        raise RuntimeError(f"nothing could be queued: {queued['error']}")
    return str(queued["id"])


def _followers(service: Service, keys: list[str]) -> Send:
    """FOLLOWERS streams of one execution that waits in the queue."""
    path = f"{_RUNS}/{_queued(service, keys[0])}/events"
    return partial(_hold, service.port, path, {"Accept": NDJSON}, keys, FOLLOWERS)


def _idle_streams(service: Service, keys: list[str]) -> Send:
    """STREAMS streams, each of an execution of its own that waits in the queue."""
    paths = [f"{_RUNS}/{_queued(service, keys[0])}/events" for _ in range(QUEUED)]
    return partial(_hold, service.port, paths, {"Accept": NDJSON}, keys, STREAMS)


def _unread_answers(service: Service, keys: list[str]) -> Send:
    """READERS who ask for a record of 8 MB, and read none of it."""
    code = {"code": "print('x' * 8_000_000)"}
    _, ran, _ = Tenant(service, keys[0]).ask(_RUNS, code)
    return partial(_hold, service.port, f"{_RUNS}/{ran['id']}", {}, keys, READERS)


def _moves(service: Service, keys: list[str]) -> Send:
    """A folder of SAVED_FILES files of a session that sleeps, moved to and fro."""
    made = service.manage("shell", "-c", _MAKE_FILES.format(count=SAVED_FILES))
    url = f"/api/v1/sessions/{made.split()[-1]}/files/move"
    return partial(_move, service.port, url, keys[0])


NDJSON = "application/x-ndjson"
FOLLOWERS, STREAMS, READERS, SAVED_FILES = 250, 1999, 150, 15_000
# Streams of one execution have a bound of their own.
QUEUED = 64
_MAKE_FILES = """
from django.utils import timezone
from executions.models import Blob, Session, StoredTotal, Tenant, Workspace, WorkspaceFile
from executions.kernel.text import key_of
tenant = Tenant.objects.get(slug="greedy")
session = Session.objects.create(
    tenant=tenant, tenant_slug=tenant.slug, provider="local", language="python", state="asleep",
    idle_seconds=600, max_seconds=86400, api_key=tenant.api_keys.first())
blob = Blob.objects.create(
    tenant=tenant, sha256="0" * 64, size=1, file="x", kept_until=timezone.now())
workspace = Workspace.objects.create(tenant=tenant, session=session, saved_at=timezone.now())
paths = ["a", *(f"a/f{{number}}" for number in range({count}))]
WorkspaceFile.objects.bulk_create(
    [WorkspaceFile(
        workspace=workspace, key=key_of(path), path=path, mode=0o644, modified=1.0,
        type="directory" if path == "a" else "file", blob=None if path == "a" else blob,
        size=0 if path == "a" else 1) for path in paths], batch_size=500)
names = sum(map(len, paths))
Workspace.objects.filter(pk=workspace.pk).update(files=len(paths), bytes={count}, names=names)
StoredTotal.objects.create(tenant=tenant, files=len(paths), bytes=1, names=names)
print(session.pk)
"""

ATTACKS = (
    Attack(
        "files, 7 MB", _body(_RUNS, lambda: _members('{"code":"1","files":[', "{}", "]}", 7 * MIB))
    ),
    Attack("unique keys, 61 MB", _body(_RUNS, _unique_keys)),
    Attack(
        "MCP, key that reads, 7 MB",
        _body(
            "/mcp",
            lambda: _members(
                '{"jsonrpc":"2.0","id":1,"method":"x","params":[', "{}", "]}", 7 * MIB
            ),
            **_MCP_HEADERS,
        ),
        "read",
    ),
    Attack(
        "argv, 2 MB",
        _body(
            "/api/v1/sessions/{session}/processes",
            lambda: _members('{"command":[', "1", "]}", 2 * MIB),
        ),
    ),
    Attack(
        "env, 2 MB",
        _body(
            _RUNS,
            lambda: (
                '{"code":"1","env":{' + ",".join(f'"{n}":1' for n in range(2 * MIB // 10)) + "}}"
            ).encode(),
        ),
    ),
    Attack(
        "99,000 values",
        _body(
            _RUNS,
            lambda: (
                '{"code":"1","arguments":' + json.dumps(list(range(99_000))) + ',"x":1}'
            ).encode(),
        ),
    ),
    Attack(
        "a file of 40 MB",
        _body(
            _RUNS,
            lambda: (
                b'{"code":"","files":[{"path":"a","content_base64":"'
                + b"AAAA" * (13 * MIB)
                + b'"}]}'
            ),
        ),
    ),
    Attack(f"{FOLLOWERS} followers of one run", _followers, "execute read"),
    Attack(f"{STREAMS} idle streams", _idle_streams, "execute read"),
    Attack(f"{READERS} unread answers of 8 MB", _unread_answers, "execute read"),
    Attack(f"moves of {SAVED_FILES:,} files", _moves),
)


def measure(service: Service, attack: Attack, keys: list[str], other: Tenant, each: float) -> Seen:
    """`each` is for how many seconds it goes on."""
    send = attack.begin(service, keys)
    with _beside(partial(_ask_health, service.port)) as calm:
        alone = [_milliseconds(other)[1] for _ in range(20)]
    before = most = service.memory_bytes()
    runs = []
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


def _send(
    port: int, path: str, headers: dict[str, str], keys: list[str], body: bytes, stop: Stop
) -> list[Answer]:
    found: list[Answer] = []

    def send(key: str) -> None:
        while not stop.is_set():
            found.append(_ask(port, "POST", path, body, {"X-API-Key": key, **headers}))
            if found[-1][0] == 429:
                time.sleep(0.2)

    with ThreadPoolExecutor(len(keys)) as threads:
        list(threads.map(send, keys))
    return found


def _hold(
    port: int,
    paths: str | list[str],
    headers: dict[str, str],
    keys: list[str],
    count: int,
    stop: Stop,
) -> list[Answer]:
    """Begin `count` answers, read the first line of each, and keep them open without reading on."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, count + 1024), most))
    places = [paths] if isinstance(paths, str) else paths
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    found: list[Answer] = []
    with ExitStack() as stack:
        for number in range(count):
            if stop.is_set():
                break
            began = time.perf_counter()
            key, path = keys[number % len(keys)], places[number % len(places)]
            status = 0
            with suppress(OSError, ValueError):
                connection = socket.create_connection(("127.0.0.1", port), 60)
                stack.callback(connection.close)
                head = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nX-API-Key: {key}\r\n{lines}\r\n"
                connection.sendall(head.encode())
                status = int(connection.recv(12)[-3:])
            found.append((status, (time.perf_counter() - began) * 1000))
        stop.wait()
    return found


def _move(port: int, url: str, key: str, stop: Stop) -> list[Answer]:
    found: list[Answer] = []
    names = ["a", "b"]
    while not stop.is_set():
        body = json.dumps({"from": names[0], "to": names[1]}).encode()
        found.append(_ask(port, "POST", url, body, {"X-API-Key": key, **JSON}))
        if found[-1][0] in (200, 204):
            names.reverse()
        else:
            time.sleep(0.2)
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
        running_service(
            Path(folder), {"launcher": "bubblewrap"}, SANDBOX_MAX_OUTPUT_KB="9000"
        ) as service,
    ):
        for slug in ("greedy", "other"):
            service.manage("create_tenant", slug)
        other = Tenant(service, service.manage("create_api_key", "other", "--name", "bench"))
        made: dict[str, list[str]] = {}
        for attack in ATTACKS:
            if options.only and options.only not in attack.name:
                continue
            if attack.scopes not in made:
                scopes = [part for each in attack.scopes.split() for part in ("--scope", each)]
                made[attack.scopes] = [
                    service.manage("create_api_key", "greedy", "--name", f"key{n}", *scopes)
                    for n in range(KEYS)
                ]
            keys = made[attack.scopes]
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
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attacks", description=__doc__)
    parser.add_argument("--seconds", type=float, default=10, help="of each attack (10)")
    parser.add_argument("--only", default="", help="attacks with this in their name")
    parser.add_argument("--json", type=Path, default=Path("var/bench/attacks.json"))
    options = parser.parse_args()
    rows = measure_all(options)
    print(table(rows))
    options.json.parent.mkdir(parents=True, exist_ok=True)
    found = {"machine": platform.platform(), "rows": [asdict(row) for row in rows]}
    options.json.write_text(json.dumps(found, indent=2) + "\n")
    print(f"written to {options.json}", file=sys.stderr)


if __name__ == "__main__":
    main()
