"""How long SQLite's one write lock is held by what goes on in the background.

Another process asks for the lock all the time, as any other writer would, and notes how long it was
refused. So everything counts: transactions, single statements, pragmas. On a busy machine the
figures hold what the machine did meanwhile; "processor" is what the work itself took.

    python -m benchmarks.write_locks --programs 5000
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import sqlite3
import string
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.service import own_environment

BOUND_MS = 50


def watch(database: str, results: Connection) -> None:
    """Send how long each refusal lasted, in milliseconds, whenever asked."""
    lock = sqlite3.connect(database, timeout=0, isolation_level=None)
    held: list[float] = []
    refused_since: float | None = None
    while True:
        now = time.perf_counter()
        try:
            lock.execute("BEGIN IMMEDIATE")
            lock.execute("ROLLBACK")
        except sqlite3.OperationalError:
            refused_since = refused_since or now
        else:
            if refused_since is not None:
                held.append((now - refused_since) * 1000)
                refused_since = None
            # The lock is somebody else's for most of the time.
            time.sleep(0.0005)
        if results.poll():
            if results.recv() == "end":
                return
            results.send(held)
            held = []


def measure(name: str, work: Callable[[], Any], watcher: Connection) -> None:
    watcher.send("so far")
    watcher.recv()
    began, processor = time.perf_counter(), time.process_time()
    work()
    seconds, processor = time.perf_counter() - began, time.process_time() - processor
    watcher.send("so far")
    held = sorted(watcher.recv()) or [0.0]
    over = sum(each > BOUND_MS for each in held)
    print(
        f"{name:28} {seconds:8.1f} s {processor:8.1f} s {len(held):7} "
        f"{held[len(held) // 2]:8.1f} {held[int(len(held) * 0.99)]:8.1f} {held[-1]:8.1f} {over:6}",
        flush=True,
    )


def fill(programs: int) -> None:
    """Executions as they ended ten days ago, a program and some output each."""
    from django.utils import timezone

    from executions.kernel.text import first_uuid7
    from executions.ledger.entry import text_hash
    from executions.runs.models import Execution
    from executions.tenants.models import Tenant

    rng = random.Random(7)
    tenant = Tenant.objects.create(slug="bench", name="Bench", keep_code_days=1, keep_output_days=1)
    source = Path(__file__).read_text(encoding="utf-8") * 2
    begin = timezone.now() - timedelta(days=10)
    rows = []
    for number in range(programs):
        start = rng.randrange(len(source) // 2)
        code = "".join(rng.choices(string.printable, k=100)) + source[start : start + 2000]
        at = begin + timedelta(seconds=number)
        rows.append(
            Execution(
                id=first_uuid7(at),
                tenant=tenant,
                tenant_slug="bench",
                language="python",
                entrypoint="auto",
                code=code,
                code_hash=text_hash(code),
                timeout=10,
                status="succeeded",
                provider="local",
                stdout="x" * rng.choice((10, 1000, 200_000)),
                total_ms=rng.random() * 1000,
                created_at=at,
                started_at=at,
                deadline=at,
                finished_at=at,
            )
        )
        if len(rows) == 200:
            Execution.objects.bulk_create(rows)
            rows = []
    Execution.objects.bulk_create(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=5000)
    programs = parser.parse_args().programs
    with tempfile.TemporaryDirectory(prefix="write-locks-") as folder:
        os.environ |= own_environment(folder) | {"LOG_LEVEL": "CRITICAL"}
        import django

        django.setup()
        from django.core.management import call_command

        call_command("migrate", verbosity=0)
        fill(programs)
        ours, theirs = multiprocessing.Pipe()
        database = str(Path(folder) / "cofferdam.sqlite3")
        watcher = multiprocessing.get_context("spawn").Process(
            target=watch, args=(database, theirs)
        )
        watcher.start()
        try:
            _measure_all(ours)
        finally:
            ours.send("end")
            watcher.join()


def _measure_all(watcher: Connection) -> None:
    from django.conf import settings
    from django.contrib.sessions.models import Session
    from django.core.management import call_command
    from django.utils import timezone

    from executions.capabilities.observability.counters import recount
    from executions.capabilities.retention import service as retention
    from executions.capabilities.search import service as search
    from executions.ledger import checkpoints
    from executions.ledger.append import append, record_baseline
    from executions.ledger.verification import verify, verify_entries
    from executions.runs.statistics import Statistic
    from executions.tenants.models import Tenant

    sink = Path(os.devnull).open("w")  # noqa: SIM115
    target = str(Path(settings.DATA_DIR) / "export.csv")
    said = {"stdout": sink, "stderr": sink}
    columns = f"{'took':>10} {'processor':>10} {'held':>7} {'p50 ms':>8} {'p99':>8} {'max':>8}"
    print(f"{'':28} {columns}  >{BOUND_MS}")
    measure("index_new_code", search.index_new_code, watcher)
    Statistic.objects.all().delete()
    measure("recount", recount, watcher)
    measure("record_baseline", record_baseline, watcher)
    for number in range(300):
        append("setting", f"entry {number}", {})
    measure("write_checkpoint", lambda: checkpoints.write_checkpoint(verify_entries), watcher)
    measure("verify", verify, watcher)
    measure("export", lambda: call_command("export_executions", target, **said), watcher)
    settings.FERNET_KEYS = ["g" * 50, *settings.FERNET_KEYS]
    measure("rotate_keys", lambda: call_command("rotate_keys", **said), watcher)
    measure("apply_retention", retention.apply_retention, watcher)
    measure("give_space_back", retention.give_space_back, watcher)
    past = timezone.now() - timedelta(days=1)
    Session.objects.bulk_create(
        [
            Session(session_key=f"{n:032}", session_data="x" * 200, expire_date=past)
            for n in range(10_000)
        ]
    )
    measure("clearsessions (10,000)", lambda: call_command("clearsessions"), watcher)
    measure("a tenant is deleted", lambda: Tenant.objects.get(slug="bench").delete(), watcher)


if __name__ == "__main__":
    main()
