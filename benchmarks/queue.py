"""The queue: how soon an idle service begins, and what a backlog of 10,000 costs, on each database.

Run below `.ci/with-servers`, as `make bench` does, for PostgreSQL and Redis; SQLite needs nothing.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.measure import Figures, percentiles, table, write_json
from benchmarks.servers import Database, databases, emptied
from benchmarks.service import ROOT, http_caller, running_service

EXECUTIONS = "/api/v1/executions"
BACKLOG = 10_000
# What is asked for: from the row to the run, at p50, where nothing else is to be done.
LONGEST_START_MS = 50

_WAITED = (
    "import json; from executions.models import Execution; print(json.dumps(["
    "(row.started_at - row.created_at).total_seconds() * 1000"
    " for row in Execution.objects.filter(mode='async', started_at__isnull=False)]))"
)
_LEFT = (
    "from executions.models import Execution; "
    "print(Execution.objects.filter(finished_at=None).count())"
)


def start_latency(database: Database, broker: str, calls: int) -> Figures:
    """From the row's time to the worker's claim, one job after a random pause."""
    name = f"start, {database.name}, broker {broker}"
    print(f"measuring {name} ...", file=sys.stderr)
    config: dict[str, object] = {"launcher": "bubblewrap", "pool_size": 4}
    environment = {**database.environment, "Q_BROKER": broker}
    with (
        tempfile.TemporaryDirectory(prefix="cofferdam-bench-") as folder,
        running_service(Path(folder), config, **environment) as service,
    ):
        content = json.dumps({"code": "pass", "mode": "async"}).encode()
        headers = {"X-API-Key": service.api_key}
        post = http_caller(service.port, EXECUTIONS, content, headers, b'"queued"', status=202)
        for _ in range(calls):
            # As jobs come: at no fixed distance from a worker's looks.
            time.sleep(random.uniform(0.2, 0.4))
            post()
        _wait(lambda: int(_last_line(service.manage("shell", "-c", _LEFT))) == 0)
        return percentiles(name, 1, json.loads(_last_line(service.manage("shell", "-c", _WAITED))))


def backlog(database: Database, calls: int) -> list[Figures]:
    """In a process of its own, whose settings name the database."""
    print(f"measuring the backlog, {database.name} ...", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="cofferdam-bench-") as folder:
        environment = os.environ | database.environment | {"DATA_DIR": folder, "LOG_LEVEL": "ERROR"}
        environment |= {"DJANGO_SETTINGS_MODULE": "sandbox_site.settings", "Q_BROKER": "orm"}
        bootstrap = [sys.executable, str(ROOT / "manage.py"), "bootstrap"]
        subprocess.run(bootstrap, env=environment, check=True, stdout=subprocess.DEVNULL)
        inside = [sys.executable, "-m", "benchmarks.queue", "--inside", database.name]
        done = subprocess.run(
            [*inside, "--calls", str(calls)],
            env=environment,
            cwd=ROOT,
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
    return [Figures(**row) for row in json.loads(_last_line(done.stdout))]


def inside(name: str, calls: int) -> list[Figures]:
    """The functions themselves, with nothing queued and behind BACKLOG rows."""
    import django

    django.setup()
    from executions.kernel.text import uuid7
    from executions.runs.models import Execution
    from executions.runs.queue import claim_next
    from executions.runs.record import close_record, open_record
    from executions.runs.requests import Caller, ExecutionRequest
    from executions.tenants.models import Tenant

    tenants = [
        Tenant.objects.create(
            slug=f"t{number}",
            name="t",
            max_running=10_000,
            max_queued=100_000,
            max_seconds_per_day=1_000_000_000,
        )
        for number in range(100)
    ]
    request = ExecutionRequest("pass", mode="async")

    def post(tenant: Tenant) -> None:
        open_record(request, Caller(tenant))

    def fill(tenants: Sequence[Tenant]) -> None:
        """In bulk, as copies of one that was posted to each: only their number is to be real."""
        Execution.objects.filter(finished_at=None).delete()
        rows = []
        for tenant in tenants:
            post(tenant)
            first = Execution.objects.filter(tenant=tenant, finished_at=None).get()
            for _ in range(BACKLOG // len(tenants) - 1):
                row = copy.copy(first)
                rows.append(row)
        # As they would have come: an id is later than those before it.
        random.shuffle(rows)
        for row in rows:
            row.pk = uuid7()
        Execution.objects.bulk_create(rows, batch_size=500)

    def timed(what: str, call: Callable[[], object]) -> Figures:
        durations = []
        for _ in range(calls):
            began = time.perf_counter()
            call()
            durations.append((time.perf_counter() - began) * 1000)
        return percentiles(f"{what}, {name}", 1, durations)

    def claim_and_end() -> float:
        began = time.perf_counter()
        execution = claim_next()
        ms = (time.perf_counter() - began) * 1000
        assert execution is not None
        close_record(execution, Execution.Status.SUCCEEDED, {"exit_code": 0})
        return ms

    rows = [timed("a look, nothing queued", claim_next)]
    rows.append(timed("a row recorded, nothing queued", lambda: post(tenants[0])))
    durations = [claim_and_end() for _ in range(calls)]
    rows.append(percentiles(f"a claim, some queued, {name}", 1, durations))
    for what, whose in (("of one tenant", tenants[:1]), ("of 100 tenants", tenants)):
        fill(whose)
        behind = f"{BACKLOG:,} queued {what}"
        rows.append(timed(f"a row recorded, {behind}", lambda: post(tenants[0])))
        durations = [claim_and_end() for _ in range(calls)]
        rows.append(percentiles(f"a claim, {behind}, {name}", 1, durations))
        Tenant.objects.update(max_running=0)
        time.sleep(1.1)  # as long as bounds are kept
        rows.append(timed(f"a look, none may run, {behind}", claim_next))
        Tenant.objects.update(max_running=10_000)
        time.sleep(1.1)
    return rows


def _last_line(printed: str) -> str:
    return printed.strip().splitlines()[-1]


def _wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError("what was queued did not end")
        time.sleep(0.5)


def main() -> None:
    parser = argparse.ArgumentParser(prog="make bench ARGS=...", description=__doc__)
    parser.add_argument("--calls", type=int, default=100, help="calls per row (100)")
    parser.add_argument("--json", type=Path, default=Path("var/bench/queue.json"))
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        print(json.dumps([vars(row) for row in inside(options.inside, options.calls)]))
        return
    starts, rows = [], []
    with databases() as known:
        for database in known:
            starts.append(start_latency(emptied(database), "orm", options.calls))
            if database.redis_url:
                starts.append(start_latency(emptied(database), "redis", options.calls))
            rows += backlog(emptied(database), options.calls)
    print(table(starts + rows, starts[0]))
    slowest = max(row.p50_ms for row in starts)
    print(f"\nidle start: p50 {slowest:.0f} ms at most (bound {LONGEST_START_MS})")
    extra: dict[str, object] = {
        "machine": platform.platform(),
        "cpus": os.cpu_count(),
        "load": os.getloadavg(),
        "backlog": BACKLOG,
        "slowest_start_p50_ms": slowest,
    }
    write_json(options.json, starts + rows, extra)
    print(f"written to {options.json}", file=sys.stderr)


if __name__ == "__main__":
    main()
