"""What the ledger adds to an execution: the end of a record with its entry and without.

A process of its own, because it needs Django's settings before anything else:
`python -m benchmarks.ledger CALLS` prints the rows as JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict

from benchmarks.measure import Figures, measure
from benchmarks.service import own_environment

WITHOUT = "end of a record, without the ledger"
WITH = "end of a record, entered in the ledger"


def ledger_rows(calls: int) -> list[Figures]:
    """The rows, measured in an empty data directory of their own."""
    with tempfile.TemporaryDirectory(prefix="cofferdam-bench-ledger-") as folder:
        command = [sys.executable, "-m", "benchmarks.ledger", str(calls)]
        done = subprocess.run(
            command, env=own_environment(folder), check=True, stdout=subprocess.PIPE, text=True
        )
    return [Figures(**row) for row in json.loads(done.stdout)]


def share(rows: list[Figures], whole: Figures) -> float:
    """The ledger's part of `whole`, in percent of its median."""
    medians = {row.name: row.p50_ms for row in rows}
    return (medians[WITH] - medians[WITHOUT]) / whole.p50_ms * 100


def _measure(calls: int) -> list[Figures]:
    import django

    django.setup()
    from django.core.management import call_command
    from django.utils import timezone

    from executions.ledger.append import append
    from executions.runs.models import Execution
    from executions.runs.record import close_record, open_record
    from executions.runs.requests import Caller, ExecutionRequest
    from executions.tenants.service import create_tenant

    call_command("migrate", verbosity=0)
    tenant = create_tenant("bench")
    tenant.max_running = 1_000_000
    caller = Caller(tenant)
    ended = {
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

    def opened() -> list[Execution]:
        request = ExecutionRequest("print(1)")
        return [open_record(request, caller)[0] for _ in range(calls + 2)]

    def with_entry() -> Callable[[], None]:
        records = iter(opened())
        return lambda: _expect(close_record(next(records), Execution.Status.SUCCEEDED, ended))

    def without() -> Callable[[], None]:
        records = iter(opened())

        def call() -> None:
            rows = Execution.objects.filter(pk=next(records).pk, finished_at=None)
            now = timezone.now()
            _expect(rows.update(**ended, status="succeeded", finished_at=now, pending=None) == 1)

        return call

    def entry() -> Callable[[], None]:
        return lambda: _expect(append("bench", "x", {"a": 1}).sequence > 0)

    return [
        measure(WITHOUT, without, callers=1, calls=calls),
        measure(WITH, with_entry, callers=1, calls=calls),
        measure("ledger entry alone", entry, callers=1, calls=calls),
        measure("ledger entry alone", entry, callers=8, calls=calls),
    ]


def _expect(done: bool) -> None:
    if not done:
        raise RuntimeError("nothing was written")


if __name__ == "__main__":
    print(json.dumps([asdict(row) for row in _measure(int(sys.argv[1]))]))
