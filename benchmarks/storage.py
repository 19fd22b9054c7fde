"""Files of sessions over a real S3 service, beside the same bytes to and from it without us.

The service is OpenStack Swift, which .ci/install-swift puts there. Calls of all rows are made in
turn, so that whatever else the machine does meanwhile is in each of them.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import secrets
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import boto3
from botocore.config import Config

from benchmarks.measure import percentiles, table, write_json
from benchmarks.service import ROOT, Service, running_service

SWIFT_PYTHON = Path("/usr/local/lib/cofferdam-swift/bin/python")
BUCKET = "bench"
SIZE = 50_000_000
# Of the session that is woken: as many files as its bytes in millions.
FILES = 50
_FILL = (
    "import os\nos.makedirs('d')\n"
    f"for n in range({FILES}): open(f'd/{{n}}', 'wb').write(os.urandom({SIZE // FILES}))"
)
_START_SECONDS = 60


@dataclass(frozen=True)
class Bare:
    """The storage by itself: one caller with a client of its own."""

    client: Any
    environment: dict[str, str]

    def put(self, name: str, content: bytes) -> None:
        self.client.put_object(Bucket=BUCKET, Key=name, Body=content)

    def get(self, name: str) -> None:
        _require(len(self.client.get_object(Bucket=BUCKET, Key=name)["Body"].read()))


@contextmanager
def running_storage() -> Iterator[Bare]:
    if not SWIFT_PYTHON.exists():
        raise SystemExit("OpenStack Swift is missing. Install it: sudo .ci/install-swift")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    secret = secrets.token_hex(16)
    # It keeps what it knows of a file in attributes that not every /tmp has.
    with tempfile.TemporaryDirectory(prefix="cofferdam-bench.", dir="/var/tmp") as folder:
        script = str(ROOT / "tests" / "swift" / "server.py")
        command = [str(SWIFT_PYTHON), "-W", "ignore", script, folder, str(port), secret]
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        try:
            _wait_for(lambda: _listens(port))
            endpoint = f"http://127.0.0.1:{port}"
            client = boto3.client(
                "s3",
                endpoint_url=endpoint,
                region_name="us-east-1",
                aws_access_key_id="test:tester",
                aws_secret_access_key=secret,
                config=Config(
                    s3={"addressing_style": "path"}, request_checksum_calculation="when_required"
                ),
            )
            client.create_bucket(Bucket=BUCKET)
            where = f"endpoint={quote(endpoint, safe='')}&region=us-east-1&addressing=path"
            url = f"s3://{BUCKET}/kept?{where}"
            keys = {"STORAGE_ACCESS_KEY": "test:tester", "STORAGE_SECRET_KEY": secret}
            yield Bare(client, {"STORAGE_URL": url, **keys})
        finally:
            process.kill()
            process.wait(10)


class Session:
    """One that goes to sleep as soon as nobody uses it."""

    def __init__(self, service: Service, *, idle_seconds: int = 1) -> None:
        self._service = service
        ages = {"idle_seconds": idle_seconds, "max_seconds": 3600}
        made = json.loads(self._ask("POST", "", json.dumps(ages).encode()))
        self._path = f"/{made['id']}"

    def _ask(self, method: str, path: str, body: bytes = b"") -> bytes:
        connection = http.client.HTTPConnection("127.0.0.1", self._service.port, timeout=600)
        content = "application/octet-stream" if method == "PUT" else "application/json"
        headers = {"X-API-Key": self._service.api_key, "Content-Type": content}
        try:
            connection.request(method, f"/api/v1/sessions{path}", body or None, headers)
            answer = connection.getresponse()
            read = answer.read()
        finally:
            connection.close()
        if answer.status not in (200, 201):
            raise RuntimeError(f"unexpected answer: {read[:500]!r}")
        return read

    def run(self, code: str) -> None:
        body = json.dumps({"code": code, "timeout": 120}).encode()
        ran = json.loads(self._ask("POST", f"{self._path}/executions", body))
        if ran["status"] != "succeeded":
            raise RuntimeError(f"unexpected end: {ran}")

    def sleep(self) -> None:
        _wait_for(lambda: json.loads(self._ask("GET", self._path))["state"] == "asleep")

    def put(self, content: bytes) -> None:
        self._ask("PUT", f"{self._path}/files/content?path=large", content)

    def get(self) -> None:
        _require(len(self._ask("GET", f"{self._path}/files/content?path=large")))


def rounds(calls: int, service: Service, bare: Bare) -> dict[str, list[float]]:
    """Milliseconds of each call, by what was called."""
    empty, full, asleep = (Session(service) for _ in range(3))
    awake = Session(service, idle_seconds=3600)
    empty.run("open('f', 'w').write('x')")
    full.run(_FILL)
    asleep.run("1")
    awake.run("1")
    names = [f"bare/{n}" for n in range(FILES)]
    for name in names:
        bare.put(name, os.urandom(SIZE // FILES))
    took: dict[str, list[float]] = {}

    def timed(name: str, call: Callable[[], None]) -> None:
        began = time.perf_counter()
        call()
        took.setdefault(name, []).append((time.perf_counter() - began) * 1000)

    for number in range(calls):
        # New ones each time: what is there already would not be sent.
        content = [os.urandom(SIZE) for _ in range(3)]
        for each in (empty, full, asleep):
            each.sleep()
        timed("50 MB up, bare", lambda: bare.put(f"bare/large{number}", content[0]))  # noqa: B023
        timed("  to a session that sleeps", lambda: asleep.put(content[1]))  # noqa: B023
        timed("  to one that is awake", lambda: awake.put(content[2]))  # noqa: B023
        timed("50 MB down, bare", lambda: bare.get(f"bare/large{number}"))  # noqa: B023
        timed("  from a session that sleeps", asleep.get)
        timed("  from one that is awake", awake.get)
        timed(f"{FILES} files of 1 MB down, bare", lambda: [bare.get(each) for each in names])  # type: ignore[func-returns-value]
        timed("  a cell that wakes a session with them", lambda: full.run("1"))
        timed("  a cell that wakes one with one small file", lambda: empty.run("1"))
    return took


def _require(size: int) -> None:
    if size not in (SIZE, SIZE // FILES):
        raise RuntimeError(f"{size} bytes came")


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def _wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + _START_SECONDS
    while not condition():
        if time.monotonic() > until:
            raise RuntimeError("nothing came of it in time")
        time.sleep(0.1)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.storage", description=__doc__)
    parser.add_argument("--calls", type=int, default=10, help="calls per row (10)")
    parser.add_argument("--json", type=Path, default=ROOT / "var" / "bench" / "storage.json")
    arguments = parser.parse_args()
    with ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory()))
        bare = held.enter_context(running_storage())
        config = {"launcher": "bubblewrap"}
        # Swift has no conditional writes, which checkpoints in storage need.
        often = {"SANDBOX_REAPER_INTERVAL": "1", "LEDGER_CHECKPOINTS": str(folder / "checkpoints")}
        service = held.enter_context(
            running_service(folder, config, **often, **bare.environment)  # type: ignore[arg-type]
        )
        print("measuring ...", flush=True)
        took = rounds(arguments.calls, service, bare)
    rows = [percentiles(name, 1, durations) for name, durations in took.items()]
    # Each three beside the first of them.
    for start in range(0, len(rows), 3):
        print(table(rows[start : start + 3], rows[start]))
    write_json(arguments.json, rows, {})
    print(f"written to {arguments.json}")


if __name__ == "__main__":
    main()
