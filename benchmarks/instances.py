"""Recorded runs on SQLite and PostgreSQL, with one caller and with eight, and with two instances.

An instance is `manage.py up`: a web process, workers and a pool of its own. Two of them are on one
host here and share its processors, so this shows what they cost each other, not what a second host
adds. Run below `.ci/with-servers`, as `make bench` does, for PostgreSQL.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.measure import Figures, measure, table, write_json
from benchmarks.servers import Database, databases, emptied
from benchmarks.service import Service, http_caller, running_service

EXECUTIONS = "/api/v1/executions"
CALLERS = 8
# Callers and instances of each measurement.
KINDS = ((1, 1), (CALLERS, 1), (CALLERS, 2))


@contextmanager
def instances(database: Database, count: int) -> Iterator[list[Service]]:
    """On one database and one data directory; the key of the first serves for all."""
    config: dict[str, object] = {"launcher": "bubblewrap", "pool_size": 4}
    with tempfile.TemporaryDirectory(prefix="cofferdam-bench-") as folder, ExitStack() as stack:
        yield [
            stack.enter_context(running_service(Path(folder), config, **database.environment))
            for _ in range(count)
        ]


def recorded_runs(database: Database, callers: int, count: int, calls: int) -> Figures:
    name = f"{database.name}, {count} instance{'s' if count > 1 else ''}"
    print(f"measuring {name} ...", file=sys.stderr)
    with instances(database, count) as services:
        ports = itertools.cycle([service.port for service in services])
        content = json.dumps({"code": "print(1)"}).encode()
        headers = {"X-API-Key": services[0].api_key}

        def caller() -> Callable[[], None]:
            return http_caller(next(ports), EXECUTIONS, content, headers, b'"stdout":"1\\n"')

        return measure(name, caller, callers=callers, calls=calls)


def main() -> None:
    parser = argparse.ArgumentParser(prog="make bench ARGS=...", description=__doc__)
    parser.add_argument("--calls", type=int, default=800, help="calls per row (800)")
    parser.add_argument("--json", type=Path, default=Path("var/bench/instances.json"))
    options = parser.parse_args()
    with databases() as known:
        rows = [
            recorded_runs(emptied(database), callers, count, options.calls)
            for callers, count in KINDS
            for database in known
        ]
    print(table(rows, rows[0]))
    extra: dict[str, object] = {
        "machine": platform.platform(),
        "cpus": os.cpu_count(),
        "load": os.getloadavg(),
    }
    write_json(options.json, rows, extra)
    print(f"written to {options.json}", file=sys.stderr)


if __name__ == "__main__":
    main()
