"""What E2B's protocol costs over the native API: a cell, and the first byte of a command.

Both are asked in turn in one session, on kept connections, as streams: the difference is the
door's. Afterwards the same beside many sandboxes, in each of which a command is run first.
"""

from __future__ import annotations

import argparse
import base64
import http.client
import json
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

from benchmarks.measure import Figures, percentiles, table, write_json
from benchmarks.service import ROOT, Service, running_service

CELL = "x = 1\nx"
SAYS = "echo said"
# What may lie between a door's median and the native one's, in ms.
MOST_CELL_MS, MOST_COMMAND_MS = 2.0, 20.0
_ENVELOPE = "application/connect+json"


@dataclass(frozen=True)
class Door:
    """A sandbox, and what is sent with its calls."""

    sandbox: str
    token: str

    def headers(self, port: str, kind: str) -> dict[str, str]:
        return {
            "E2b-Sandbox-Id": self.sandbox,
            "E2b-Sandbox-Port": port,
            "X-Access-Token": self.token,
            "Content-Type": kind,
        }


Ask = Callable[[], float]


def opened(service: Service) -> Door:
    connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=120)
    headers = {"X-API-Key": service.api_key, "Content-Type": "application/json"}
    connection.request("POST", "/v2/sandboxes", json.dumps({"timeout": 3600}), headers)
    answer = connection.getresponse()
    told = json.loads(answer.read())
    connection.close()
    if answer.status != 201:
        raise RuntimeError(f"unexpected answer: {told}")
    return Door(told["sandboxID"], told["envdAccessToken"])


def asking(service: Service, path: str, headers: dict[str, str], body: bytes, wanted: bytes) -> Ask:
    """Milliseconds from a request to the first of what comes that has `wanted` in it."""
    connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=120)

    def ask() -> float:
        began = time.perf_counter()
        connection.request("POST", path, body, headers)
        answer = connection.getresponse()
        received = b""
        took = 0.0
        while piece := answer.read1(65536):
            received += piece
            if not took and wanted in received:
                took = (time.perf_counter() - began) * 1000
        if not took:
            raise RuntimeError(f"unexpected answer: {received[:500]!r}")
        return took

    return ask


def cells(service: Service, door: Door) -> tuple[Ask, Ask]:
    native = {
        "X-API-Key": service.api_key,
        "Content-Type": "application/json",
        "Accept": "application/x-ndjson",
    }
    path = f"/api/v1/sessions/{UUID(door.sandbox)}/executions"
    body = json.dumps({"code": CELL}).encode()
    asked = {"code": CELL, "context_id": None, "language": None, "env_vars": None}
    headers = door.headers("49999", "application/json")
    return (
        asking(service, path, native, body, b'"type":"done"'),
        asking(service, "/execute", headers, json.dumps(asked).encode(), b"end_of_execution"),
    )


def commands(service: Service, door: Door) -> tuple[Ask, Ask]:
    native = {
        "X-API-Key": service.api_key,
        "Content-Type": "application/json",
        "Accept": "application/x-ndjson",
    }
    path = f"/api/v1/sessions/{UUID(door.sandbox)}/processes"
    body = json.dumps({"shell": SAYS}).encode()
    asked: dict[str, Any] = {
        "process": {"cmd": "/bin/bash", "args": ["-l", "-c", SAYS], "envs": {}},
        "stdin": False,
    }
    content = json.dumps(asked).encode()
    message = b"\0" + len(content).to_bytes(4, "big") + content
    said = base64.b64encode(b"said\n")
    return (
        asking(service, path, native, body, b'"said\\n"'),
        asking(service, "/process.Process/Start", door.headers("49983", _ENVELOPE), message, said),
    )


def in_turn(name: str, both: tuple[Ask, Ask], calls: int) -> tuple[Figures, Figures]:
    native, door = both
    took: tuple[list[float], list[float]] = [], []
    for count in range(calls + 2):
        for each, found in zip((native, door), took, strict=True):
            milliseconds = each()
            # Two go before, uncounted.
            if count > 1:
                found.append(milliseconds)
    return (
        percentiles(f"{name}, native", 1, took[0]),
        percentiles(f"{name}, E2B's door", 1, took[1]),
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.e2b_door", description=__doc__)
    parser.add_argument("--calls", type=int, default=200, help="calls per row (200)")
    parser.add_argument("--sandboxes", type=int, default=200, help="alive beside them (200)")
    parser.add_argument("--json", type=Path, default=ROOT / "var" / "bench" / "e2b_door.json")
    arguments = parser.parse_args()
    with ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory()))
        # Of all that there may be half can be kept, and four fifths of that by one tenant.
        config = {"launcher": "bubblewrap", "max_sandboxes": min(512, 3 * arguments.sandboxes)}
        bounds = {"SESSIONS_PER_TENANT": "1000", "SANDBOX_MAX_TOTAL": "1000"}
        service = held.enter_context(running_service(folder, config, **bounds))
        print("measuring ...", flush=True)
        door = opened(service)
        rows: list[Figures] = [
            *in_turn("a cell", cells(service, door), arguments.calls),
            *in_turn("first byte of a command", commands(service, door), arguments.calls),
        ]
        before, began = service.memory_bytes(), time.perf_counter()
        alive = [opened(service) for _ in range(arguments.sandboxes)]
        seconds = time.perf_counter() - began
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(lambda each: commands(service, each)[1](), alive))
        crowd = f"beside {arguments.sandboxes}"
        rows += in_turn(f"a cell {crowd}", cells(service, door), arguments.calls)
        rows += in_turn(f"a command {crowd}", commands(service, door), arguments.calls)
        memory = [round(each / 2**20) for each in (before, service.memory_bytes())]
    print(table(rows, rows[0]))
    print(f"{len(alive)} sandboxes in {seconds:.1f} s; memory of the service: {memory} MiB")
    more = rows[1].p50_ms - rows[0].p50_ms, rows[3].p50_ms - rows[2].p50_ms
    print(
        f"a cell {more[0]:+.2f} ms (at most {MOST_CELL_MS:g}), "
        f"a command's first byte {more[1]:+.2f} ms (at most {MOST_COMMAND_MS:g})"
    )
    write_json(arguments.json, rows, {"memory_mib": memory, "seconds": seconds})
    print(f"written to {arguments.json}")
    return 0 if more[0] <= MOST_CELL_MS and more[1] <= MOST_COMMAND_MS else 1


if __name__ == "__main__":
    sys.exit(main())
