"""What Codex's protocol costs over the native API: a command, until its client knows of its end.

Both are asked in turn in one warm session, on kept connections: the difference is the door's. The
native API answers once the command has ended. Codex is answered when it was started, and told of
its output, its exit and its close: until the last the command is not over for it.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from benchmarks.measure import percentiles, table, write_json
from benchmarks.service import ROOT, Service, running_service
from tests.support.codex_door import Client

SAYS = "echo said"
# What may lie between both medians, in ms.
MOST_MS = 5.0
NATIVE, CLOSED = "native API, until it has ended", "Codex's door, until closed"
# Those that go before, uncounted.
_WARM = 5


class Native:
    """The command by the native API, in the session that Codex has."""

    def __init__(self, service: Service, session_id: str) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=120)
        self._path = f"/api/v1/sessions/{session_id}/processes"
        self._headers = {"X-API-Key": service.api_key, "Content-Type": "application/json"}
        self._body = json.dumps({"shell": SAYS}).encode()

    def run(self) -> float:
        """Milliseconds to its end."""
        began = time.perf_counter()
        self._connection.request("POST", self._path, self._body, self._headers)
        answer = self._connection.getresponse().read()
        took = (time.perf_counter() - began) * 1000
        if json.loads(answer).get("stdout") != "said\n":
            raise RuntimeError(f"unexpected answer: {answer[:500]!r}")
        return took


class Door:
    """The command by Codex's door."""

    def __init__(self, service: Service) -> None:
        self._client = Client(service, "/codex/", X_API_Key=service.api_key)
        self.session_id = self._client.initialize()
        self._ids = itertools.count(1)

    def run(self) -> dict[str, float]:
        """Milliseconds to each that its client is told."""
        process_id = str(next(self._ids))
        began = time.perf_counter()
        self._client.start(process_id, "/bin/bash", "-lc", SAYS)
        took = {"start": (time.perf_counter() - began) * 1000}
        for name in ("output", "exited", "closed"):
            self._client.wait_for(f"process/{name}", process_id)
            took[name] = (time.perf_counter() - began) * 1000
        self._client.told.clear()
        return took

    def close(self) -> None:
        self._client.close()


def in_turn(native: Native, door: Door, calls: int) -> dict[str, list[float]]:
    """The milliseconds of each row."""
    took: dict[str, list[float]] = {}
    for count in range(calls + _WARM):
        found = {NATIVE: native.run()}
        found |= {f"Codex's door, until {name}": ms for name, ms in door.run().items()}
        if count >= _WARM:
            for name, milliseconds in found.items():
                took.setdefault(name, []).append(milliseconds)
    return took


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.codex_door", description=__doc__)
    parser.add_argument("--calls", type=int, default=300, help="calls per row (300)")
    parser.add_argument("--json", type=Path, default=ROOT / "var" / "bench" / "codex_door.json")
    arguments = parser.parse_args()
    with ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory()))
        service = held.enter_context(running_service(folder, {"launcher": "bubblewrap"}))
        print("measuring ...", flush=True)
        door = Door(service)
        held.callback(door.close)
        took = in_turn(Native(service, door.session_id), door, arguments.calls)
    rows = [percentiles(name, 1, each) for name, each in took.items()]
    print(table(rows, rows[0]))
    least = [min(took[name]) for name in (NATIVE, CLOSED)]
    more, more_at_least = rows[-1].p50_ms - rows[0].p50_ms, least[1] - least[0]
    print(f"a command {more:+.2f} ms at p50 (at most {MOST_MS:g}), {more_at_least:+.2f} at best")
    write_json(arguments.json, rows, {"more_ms": more, "more_at_best_ms": more_at_least})
    print(f"written to {arguments.json}")
    return 0 if more <= MOST_MS else 1


if __name__ == "__main__":
    sys.exit(main())
