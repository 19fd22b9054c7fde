"""How many entries a verification of the ledger reads in a second: alone, with all processors, from
the mark of a complete one.

`python -m benchmarks.verification [EXECUTIONS]` makes so many (20,000) and prints a table.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from typing import Any

from benchmarks.service import own_environment

DEFAULT = 20_000


def main(executions: int) -> None:
    """Measure in an empty data directory, in a process that has it from the start."""
    with tempfile.TemporaryDirectory(prefix="cofferdam-bench-verification-") as folder:
        environment = own_environment(folder) | {"BENCH_CHILD": "yes"}
        command = [sys.executable, "-m", "benchmarks.verification", str(executions)]
        subprocess.run(command, env=environment, check=True)


def _measure(executions: int) -> None:
    import django

    django.setup()
    from django.core.management import call_command

    from executions.kernel.ordered_work import processors
    from executions.ledger.verification import verify
    from executions.runs.models import Execution
    from executions.runs.record import close_record, open_record
    from executions.runs.requests import Caller, ExecutionRequest
    from executions.tenants.service import create_tenant

    call_command("migrate", verbosity=0)
    tenant = create_tenant("bench")
    tenant.max_running = 1_000_000
    ended = {"provider": "local", "config_version": 1, "stdout": "1\n", "exit_code": 0}
    ended |= {"meta": {"cpu_seconds": 0.01}, "run_ms": 4.2, "total_ms": 5.6}
    caller = Caller(tenant)

    def run(number: int) -> None:
        record, _ = open_record(ExecutionRequest(f"print({number})"), caller)
        close_record(record, Execution.Status.SUCCEEDED, ended)

    for number in range(executions):
        run(number)
    print(f"{'verification':<44} {'entries':>8} {'seconds':>8} {'a second':>9}")

    def row(name: str, **options: Any) -> None:
        began = time.monotonic()
        found = verify(**options)
        seconds = time.monotonic() - began
        if not found.is_intact:
            raise RuntimeError(f"it found something: {found.findings[0]}")
        rate = found.entries / seconds
        print(f"{name:<44} {found.entries:>8} {seconds:>8.2f} {rate:>9.0f}")

    several = processors()
    row("the ledger alone, 1 process", records=False)
    row(f"the ledger alone, {several} processes", records=False, processes=several)
    row("everything, 1 process")
    row(f"everything, {several} processes", processes=several)
    later = max(1, executions // 100)
    for number in range(later):
        run(executions + number)
    row(f"from the mark on, {later} executions later", since_verified=True, processes=several)


if __name__ == "__main__":
    count = int(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT
    _measure(count) if os.environ.get("BENCH_CHILD") else main(count)
