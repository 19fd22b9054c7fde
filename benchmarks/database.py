"""What recorded runs ask of PostgreSQL: transactions, statements, processor time, bytes; and how
many ends of runs a second the ledger takes, which is one sequence under one lock.

Run below `.ci/with-servers` with DURABLE=yes, so that PostgreSQL waits for the disk.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg

from benchmarks.control_plane import (
    IDLE_SECONDS,
    Usage,
    idle_ms,
    processor_ms_each,
    service_usage,
    usage_of,
)
from benchmarks.measure import Figures, measure, percentiles, table, write_json
from benchmarks.servers import Database, databases, emptied
from benchmarks.service import ROOT, api_caller, running_service

CALLERS = 8
# Processes that end records at once, and rounds of them, of which the fastest counts: what others
# do on the machine only slows it.
WRITERS = (1, 2, 4)
ROUNDS = 3
# What is written and forced to the disk for comparison: a page of PostgreSQL's log.
_PAGE = bytes(8192)
_LOCK = "pg_advisory_xact_lock"
_TABLES = (
    "SELECT relname, pg_total_relation_size(oid) FROM pg_class "
    "WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace"
)
_COUNTS = (
    "SELECT xact_commit, (pg_current_wal_insert_lsn() - '0/0')::bigint "
    "FROM pg_stat_database WHERE datname = current_database()"
)
_ENDED = {
    "provider": "local",
    "config_version": 1,
    "runtime": "bubblewrap",
    "stdout": "1\n",
    "exit_code": 0,
    "meta": {"cpu_seconds": 0.01, "memory_peak_bytes": 9_000_000, "limits": {"pids": 64}},
    "received_ms": 0.1,
    "queue_ms": 0.1,
    "closed_ms": 0.1,
    "start_ms": 0.9,
    "run_ms": 4.2,
    "total_ms": 5.6,
}


def table_sizes(url: str) -> dict[str, int]:
    """Return the bytes of each table, with its indexes."""
    with psycopg.connect(url, autocommit=True) as connection:
        return {str(name): int(size) for name, size in connection.execute(_TABLES)}


def counts(url: str) -> tuple[int, int]:
    """Return how many transactions were committed, and how many bytes of log were written."""
    with psycopg.connect(url, autocommit=True) as connection:
        # What a backend has counted it reports within a second (PostgreSQL's documentation).
        time.sleep(2)
        found = connection.execute(_COUNTS).fetchone()
        assert found
        return int(found[0]), int(found[1])


def server_usage() -> Usage:
    """Return what all processes of the PostgreSQL server have used."""
    postmaster = int((Path(os.environ["TEST_SERVERS"]) / "postgres.pid").read_text())
    children = Path(f"/proc/{postmaster}/task/{postmaster}/children").read_text().split()
    found = [usage_of(pid) for pid in (postmaster, *map(int, children))]
    return Usage(sum(each.processor_ms for each in found), sum(each.memory_mib for each in found))


def recorded_runs(database: Database, calls: int) -> tuple[Figures, dict[str, Any]]:
    """Time recorded runs of many callers. Also return what one of them asks of the database."""
    url = database.environment["DATABASE_URL"]
    config: dict[str, object] = {"launcher": "bubblewrap", "pool_size": 8}
    with (
        tempfile.TemporaryDirectory(prefix="cofferdam-bench-") as folder,
        running_service(Path(folder), config, **database.environment) as service,
    ):

        def caller() -> Callable[[], None]:
            return api_caller(service, {"code": "print(1)"}, b'"stdout":"1\\n"')

        def usage() -> dict[str, Usage]:
            return {"PostgreSQL": server_usage(), **service_usage(service)}

        measure("warm-up", caller, callers=CALLERS, calls=CALLERS * 4)
        idle_transactions, idle_log = counts(url)
        idle = idle_ms(usage)
        transactions, log = counts(url)
        seconds = IDLE_SECONDS + 2
        idle_rate = (transactions - idle_transactions) / seconds
        idle_log_rate = (log - idle_log) / seconds
        sizes, used, began = table_sizes(url), usage(), time.monotonic()
        row = measure("POST /api/v1/executions", caller, callers=CALLERS, calls=calls)
        seconds = time.monotonic() - began
        each = processor_ms_each(used, usage(), calls + 2 * CALLERS, seconds, idle)
        transactions_after, log_after = counts(url)
        seconds = time.monotonic() - began
        sizes_after = table_sizes(url)
    runs = calls + 2 * CALLERS
    grown = {name: (sizes_after[name] - sizes.get(name, 0)) / runs for name in sizes_after}
    largest = sorted(grown.items(), key=lambda each: -each[1])[:6]
    return row, {
        "transactions a run": round(
            (transactions_after - transactions) / runs - idle_rate * seconds / runs, 2
        ),
        "bytes of log a run": round((log_after - log - idle_log_rate * seconds) / runs),
        "transactions a second when idle": round(idle_rate, 1),
        "bytes a run": round(sum(grown.values())),
        "bytes a run, by table": {name: round(size) for name, size in largest},
        "ms of the processors a run": each,
    }


def ends(database: Database, folder: Path, calls: int, writers: int) -> list[Figures]:
    """Time the ends of records in so many processes at once. With one of them, also return how
    long an end holds the lock of the ledger."""
    environment = {
        **os.environ,
        **database.environment,
        "DATA_DIR": str(folder),
        "DJANGO_SETTINGS_MODULE": "sandbox_site.settings",
        "LOG_LEVEL": "ERROR",
    }
    command = [sys.executable, "-m", "benchmarks.database", "--inside", str(calls)]
    pipe = subprocess.PIPE
    processes = [
        subprocess.Popen(command, env=environment, cwd=ROOT, stdin=pipe, stdout=pipe, text=True)
        for _ in range(writers)
    ]
    for process in processes:
        assert process.stdout
        if process.stdout.readline() != "ready\n":
            raise RuntimeError("a process that ends records did not start")
    began = time.perf_counter()
    for process in processes:
        assert process.stdin
        print(file=process.stdin, flush=True)
    answers = []
    for process in processes:
        assert process.stdout
        answers.append(json.loads(process.stdout.readline()))
    seconds = time.perf_counter() - began
    for process in processes:
        process.communicate()
    whole = [ms for answer in answers for ms in answer["whole"]]
    rows = [percentiles("the end of a record, in the ledger", writers, whole, seconds)]
    if writers == 1:
        rows.append(percentiles("of it with the ledger's lock", 1, answers[0]["locked"]))
        print(f"statements of a record and its end: {answers[0]['statements']}")
    return rows


def inside(calls: int) -> None:
    """End records when a line comes. Prints the milliseconds of each."""
    import django

    django.setup()
    from django.db import connection

    from executions.runs.models import Execution
    from executions.runs.record import close_record, open_record
    from executions.runs.requests import Caller, ExecutionRequest
    from executions.tenants.service import create_tenant

    tenant = create_tenant(f"bench-{secrets.token_hex(4)}")
    tenant.max_running = 1_000_000
    caller = Caller(tenant)
    request = ExecutionRequest("print(1)")
    statements = 0
    locked_at = 0.0

    def note(execute: Any, sql: str, *rest: Any) -> Any:
        nonlocal statements, locked_at
        statements += 1
        answer = execute(sql, *rest)
        if _LOCK in sql:
            locked_at = time.perf_counter()
        return answer

    open_record(request, caller)
    with connection.execute_wrapper(note):
        records = [open_record(request, caller)[0] for _ in range(calls)]
        print("ready", flush=True)
        sys.stdin.readline()
        whole, locked = [], []
        for record in records:
            began = time.perf_counter()
            if not close_record(record, Execution.Status.SUCCEEDED, _ENDED):
                raise RuntimeError("a record did not end")
            now = time.perf_counter()
            whole.append((now - began) * 1000)
            locked.append((now - locked_at) * 1000)
    answer = {"whole": whole, "locked": locked, "statements": round(statements / calls, 1)}
    print(json.dumps(answer), flush=True)


def forced_writes(folder: Path, calls: int) -> Figures:
    """Time a page that is written and forced to the disk."""
    took = []
    with (folder / "pages").open("wb", buffering=0) as pages:
        for _ in range(calls):
            began = time.perf_counter()
            pages.write(_PAGE)
            os.fdatasync(pages.fileno())
            took.append((time.perf_counter() - began) * 1000)
    return percentiles("8 KiB written and forced to the disk", 1, took)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.database", description=__doc__)
    parser.add_argument("--calls", type=int, default=600, help="in each row (600)")
    parser.add_argument("--json", type=Path, default=ROOT / "var" / "bench" / "database.json")
    parser.add_argument("--inside", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        inside(options.inside)
        return
    extra: dict[str, Any] = {
        "machine": platform.platform(),
        "cpus": os.cpu_count(),
        "load": [os.getloadavg()],
    }
    with databases() as known:
        database = known[-1]
        if "DATABASE_URL" not in database.environment:
            raise SystemExit("PostgreSQL is missing. Run: .ci/with-servers python -m ...")
        print("measuring recorded runs ...", file=sys.stderr)
        row, extra["run"] = recorded_runs(emptied(database), options.calls)
        rows = [row]
        # Where PostgreSQL's own files are.
        place = os.environ["TEST_SERVERS"]
        with tempfile.TemporaryDirectory(prefix="cofferdam-bench-", dir=place) as name:
            rows.append(forced_writes(Path(name), 200))
            environment = {**os.environ, **emptied(database).environment, "DATA_DIR": name}
            bootstrap = [sys.executable, str(ROOT / "manage.py"), "bootstrap"]
            subprocess.run(bootstrap, env=environment, check=True, capture_output=True)
            for writers in WRITERS:
                print(f"measuring ends of records, {writers} processes ...", file=sys.stderr)
                calls = options.calls // writers
                rounds = [ends(database, Path(name), calls, writers) for _ in range(ROUNDS)]
                rows += max(rounds, key=lambda found: found[0].per_second)
    extra["load"].append(os.getloadavg())
    print(table(rows, rows[0]))
    for what, value in extra["run"].items():
        print(f"{what}: {value}")
    print(f"load average before and after: {extra['load'][0][0]:.1f}, {extra['load'][1][0]:.1f}")
    write_json(options.json, [*rows], extra)
    print(f"written to {options.json}", file=sys.stderr)


if __name__ == "__main__":
    main()
