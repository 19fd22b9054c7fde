"""The admin over a million executions: every list, every filter and every page, on each database.

Run below `.ci/with-servers`, as `make bench` does, for PostgreSQL too; SQLite needs nothing.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.admin_rows import fill
from benchmarks.measure import Figures, percentiles, write_json
from benchmarks.servers import Database, databases, emptied
from benchmarks.service import ROOT

EXECUTIONS = 1_000_000
# What is asked for, at p95.
BOUND_MS = 300
_NEXT = re.compile(r'<a rel="next" href="([^"]+)"')
_LIST = "/admin/executions/execution/"


def measure_on(database: Database, executions: int, calls: int) -> list[Figures]:
    """In a process of its own, whose settings name the database."""
    print(f"measuring the admin, {database.name} ...", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="cofferdam-bench-") as folder:
        environment = os.environ | database.environment | {"DATA_DIR": folder, "LOG_LEVEL": "ERROR"}
        environment |= {"DJANGO_SETTINGS_MODULE": "sandbox_site.settings"}
        bootstrap = [sys.executable, str(ROOT / "manage.py"), "bootstrap"]
        subprocess.run(bootstrap, env=environment, check=True, stdout=subprocess.DEVNULL)
        inside = [sys.executable, "-m", "benchmarks.admin", "--inside", database.name]
        done = subprocess.run(
            [*inside, "--executions", str(executions), "--calls", str(calls)],
            env=environment,
            cwd=ROOT,
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
    return [Figures(**row) for row in json.loads(done.stdout.strip().splitlines()[-1])]


def inside(name: str, executions: int, calls: int) -> list[Figures]:
    """Each page `calls` times, as a superuser sees it, without the network."""
    import django

    django.setup()
    # The entries that are filled in are signed by nobody, which the ledger says of each page.
    logging.disable(logging.CRITICAL)
    from django.contrib.auth import get_user_model
    from django.test import Client

    if executions:
        began = time.perf_counter()
        fill(executions)
        print(f"filled in {time.perf_counter() - began:.0f} s", file=sys.stderr)
    client = Client(headers={"host": "localhost"})
    client.force_login(get_user_model().objects.filter(is_superuser=True)[0])
    rows = []
    for what, address in _pages(client):
        durations, worked = [], []
        for call in range(calls + 1):
            started, at_work = time.perf_counter(), time.process_time()
            answer = client.get(address)
            content = answer.content
            durations.append((time.perf_counter() - started) * 1000)
            worked.append((time.process_time() - at_work) * 1000)
            if answer.status_code != 200:
                raise RuntimeError(f"{address}: {answer.status_code} {content[:500]!r}")
            if not call:
                durations.clear()
        rows.append(percentiles(f"{what}, {name}", 1, durations))
        # What the processor did tells of a busy machine what the page itself takes.
        print(f"{rows[-1].p95_ms:8.1f} {max(worked[1:]):8.1f} {what}", file=sys.stderr)
    return rows


def _pages(client: object) -> Iterator[tuple[str, str]]:
    """What is visited, in words, and its address."""
    from executions.ledger.models import LedgerEntry
    from executions.runs.models import Execution

    newest = Execution.objects.latest("pk")
    middle = Execution.objects.order_by("-created_at")[Execution.objects.count() // 2]
    yield "dashboard", "/admin/"
    yield "dashboard, 7 days", "/admin/?range=7d"
    yield "comparison, 30 days", "/admin/executions/spending/comparison/?hours=720"
    yield "execution", f"{_LIST}{newest.pk}/change/"
    since, until = (
        f"{middle.created_at:%Y-%m-%dT%H:%M:%S}",
        f"{newest.created_at:%Y-%m-%dT%H:%M:%S}",
    )
    filters = {
        "none": "",
        "a tenant": "tenant_slug=bench",
        "a small tenant": "tenant_slug=small",
        "status": "status__exact=failed",
        "provider": "provider=e2b",
        "language": "language=bash",
        "error code": "error_code=SB005",
        "key": "api_key_prefix=k0",
        "exit code 0": "exit_code=0",
        "exit code, rare": "exit_code=137",
        "runtime": "runtime=bubblewrap",
        "runtime of none": "runtime=nothing",
        "agent": "agent=coder",
        "agent, rare": "agent=rare",
        "conversation": "conversation=c5",
        "replays": "replay=yes",
        "replay of": f"replay_of={middle.pk}",
        "observations": "observed=any",
        "an observation": "observed=network",
        "from": f"created_at__gte={since}",
        "from and before": f"created_at__gte={since}&created_at__lt={until}",
        "tenant and status": "tenant_slug=bench&status__exact=failed",
        "tenant, status, from": f"tenant_slug=bench&status__exact=failed&created_at__gte={since}",
        "tenant and no such exit": "tenant_slug=bench&exit_code=99",
        "two that never meet": "tenant_slug=bench&runtime=nothing",
        "four together": "tenant_slug=bench&status__exact=failed&provider=e2b&language=bash",
        "agent and tenant": "agent=coder&tenant_slug=bench",
        "search, id": f"q={middle.pk}",
        "search, agent": "q=agent:coder",
        "search, code of all": "q=import",
        "search, code of one": "q=number_777_",
        "search, no such code": "q=nowhere_to_be_found",
    }
    for what, query in filters.items():
        yield f"executions: {what}", f"{_LIST}?{query}"
    yield "executions: in the middle", f"{_LIST}?from={middle.pk}"
    yield "executions: tenant, in the middle", f"{_LIST}?tenant_slug=bench&next={middle.pk}"
    yield "executions: back from the middle", f"{_LIST}?previous={middle.pk}"
    yield "executions: oldest first", f"{_LIST}?order=oldest"
    yield (
        "executions: tenant and status, middle",
        f"{_LIST}?{filters['tenant and status']}&next={middle.pk}",
    )
    for list_name, queries in _OTHERS.items():
        for what, query in {"none": "", **queries}.items():
            yield f"{list_name.strip('/')}: {what}", f"/admin/{list_name}?{query}"
    entry = LedgerEntry.objects.latest("sequence").sequence
    yield "ledger: in the middle", f"/admin/executions/ledgerentry/?from={entry // 2}"
    yield "ledger: an entry", f"/admin/executions/ledgerentry/{entry}/change/"


_DAY = "2026-01-01"
_OTHERS: dict[str, dict[str, str]] = {
    "executions/ledgerentry/": {
        "kind": "kind=execution",
        "rare kind": "kind=setting",
        "from": f"at__gte={_DAY}T00:00",
        "kind and from": f"kind=execution&at__gte={_DAY}T00:00",
        "key id": "key_id=0123456789abcdef",
        "search, sequence": "q=4711",
        "search, digest": "q=" + "0" * 64,
        "oldest first": "order=oldest",
    },
    "executions/session/": {
        "state": "state__exact=open",
        "tenant": "tenant_slug=bench",
        "from": f"created_at__gte={_DAY}T00:00",
    },
    "providers/configversion/": {
        "author": "author=user:nobody",
        "from": f"created_at__gte={_DAY}T00:00",
        "search": "q=nowhere",
    },
    "admin/logentry/": {
        "user": "user=admin",
        "action": "action_flag=2",
        "from": f"action_time__gte={_DAY}T00:00",
        "search": "q=nowhere",
    },
    "executions/tenant/": {},
    "executions/apikey/": {},
    "executions/spending/": {},
    "executions/webhookdelivery/": {},
    "executions/schedule/": {},
    "executions/snapshot/": {},
    "executions/alert/": {},
    "auth/user/": {},
}


def _table(rows: list[Figures]) -> str:
    header = f"{'':58} {'p50 ms':>8} {'p95 ms':>8} {'max ms':>8}"
    lines = [header, "-" * len(header)]
    for row in rows:
        mark = " *" if row.p95_ms > BOUND_MS else ""
        lines.append(f"{row.name:58} {row.p50_ms:8.1f} {row.p95_ms:8.1f} {row.max_ms:8.1f}{mark}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="make bench ARGS=...", description=__doc__)
    parser.add_argument("--calls", type=int, default=20, help="visits of each page (20)")
    parser.add_argument("--executions", type=int, default=EXECUTIONS)
    parser.add_argument("--only", default="", help="of one database: SQLite or PostgreSQL")
    parser.add_argument("--json", type=Path, default=Path("var/bench/admin.json"))
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        rows = inside(options.inside, options.executions, options.calls)
        print(json.dumps([vars(row) for row in rows]))
        return
    rows = []
    with databases() as known:
        for database in known:
            if options.only not in ("", database.name):
                continue
            rows += measure_on(emptied(database), options.executions, options.calls)
    print(_table(rows))
    slowest = max(rows, key=lambda row: row.p95_ms)
    load = os.getloadavg()
    print(f"\nslowest: {slowest.name}, p95 {slowest.p95_ms:.0f} ms (bound {BOUND_MS})")
    print("load: " + " ".join(f"{each:.1f}" for each in load))
    extra: dict[str, object] = {
        "machine": platform.platform(),
        "cpus": os.cpu_count(),
        "load": load,
        "executions": options.executions,
    }
    write_json(options.json, rows, extra)
    print(f"written to {options.json}", file=sys.stderr)


if __name__ == "__main__":
    main()
