"""POST /api/v1/executions through `local`, beside what starting an interpreter costs.

Every figure is of one run on one machine; what carries over is the ratio in the last column.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.ledger import ledger_rows, share
from benchmarks.measure import Figures, measure, table, write_json
from benchmarks.processors import busy_ms, processor_ms_each, service_usage
from benchmarks.service import Service, api_caller, own_memory, running_service, wakeups_per_second

PYTHON = "/usr/bin/python3"
PROGRAM = "print(1)"
# Longer than the longest pause of a thread that wakes regularly.
WAKEUP_SECONDS = 10.0
PAUSE_SECONDS = 0.3

BUBBLEWRAP = [
    *("bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL"),
    *("--clearenv", "--ro-bind", "/usr", "/usr", "--symlink", "usr/lib", "/lib"),
    *("--symlink", "usr/lib64", "/lib64", "--symlink", "usr/bin", "/bin"),
    *("--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"),
]


def process_caller(command: list[str]) -> Callable[[], Callable[[], None]]:
    """Starts `command` and waits for its end, which must be a 1 on stdout."""

    def call() -> None:
        if subprocess.run(command, check=True, capture_output=True).stdout != b"1\n":
            raise RuntimeError(f"{command[0]} printed something else")

    return lambda: call


def measure_all(service: Service, calls: int, callers_at_once: list[int]) -> list[Figures]:
    """The named peers first, then the service at so many callers, then both after pauses."""

    def post() -> Callable[[], None]:
        return api_caller(service, {"code": PROGRAM}, b'"stdout":"1\\n"')

    bare = process_caller([PYTHON, "-c", PROGRAM])
    by_hand = process_caller([*BUBBLEWRAP, PYTHON, "-c", PROGRAM])
    rows = []
    for name, caller, callers in (
        (f"{PYTHON} -c 'print(1)'", bare, 1),
        ("bwrap ... python3 -c 'print(1)'", by_hand, 1),
        ("bwrap ... python3 -c 'print(1)'", by_hand, 8),
        *(("POST /api/v1/executions, local, audited", post, each) for each in callers_at_once),
    ):
        print(f"measuring {name} with {callers} caller(s) ...", file=sys.stderr)
        rows.append(measure(name, caller, callers=callers, calls=calls))
    print("measuring after pauses ...", file=sys.stderr)
    few = max(1, calls // 4)
    for name, caller, other in (("the bare start", bare, post), ("the service", post, bare)):
        rows.append(
            measure(
                f"{name}, after pauses",
                caller,
                callers=1,
                calls=few,
                pause=PAUSE_SECONDS,
                in_turn=other(),
            )
        )
    return rows


def processor_times(service: Service, calls: int) -> dict[str, float]:
    """The processor time in ms of a bare start, of a run on the whole machine, and of that in the
    processes of the service."""

    def post() -> Callable[[], None]:
        return api_caller(service, {"code": PROGRAM}, b'"stdout":"1\\n"')

    found = {}
    # Of each two calls go before, uncounted.
    runs = calls + 2
    for name, caller in (("bare", process_caller([PYTHON, "-c", PROGRAM])), ("run", post)):
        before, busy = service_usage(service), busy_ms()
        measure(name, caller, callers=1, calls=calls)
        found[name] = round((busy_ms() - busy) / runs, 2)
    return found | processor_ms_each(before, service_usage(service), runs)


def soak(service: Service, runs: int) -> dict[str, object]:
    """The service's memory before and after `runs` executions, after a tenth of them as warm-up."""

    def post() -> Callable[[], None]:
        return api_caller(service, {"code": PROGRAM}, b'"stdout":"1\\n"')

    print(f"running {runs} executions for their memory ...", file=sys.stderr)
    measure("warm-up", post, callers=4, calls=max(8, runs // 10))
    before = service.memory_bytes()
    measure("soak", post, callers=4, calls=runs)
    after = service.memory_bytes()
    return {"runs": runs, "memory_before_bytes": before, "memory_after_bytes": after}


def idle(service: Service, seconds: float) -> dict[str, object]:
    """The processes of a service before its first call, their memory and how often they wake."""
    print(f"waiting {seconds:g} s for an idle service ...", file=sys.stderr)
    time.sleep(seconds)
    processes, mebibytes = own_memory(service)
    return {
        "processes": processes,
        "pss_mib": round(mebibytes, 1),
        "wakeups_per_second": round(wakeups_per_second(service, WAKEUP_SECONDS), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="make bench ARGS=...", description=__doc__)
    parser.add_argument("--calls", type=int, default=400, help="counted calls per row (400)")
    parser.add_argument("--callers", type=int, nargs="+", default=[1, 8, 32], help="(1 8 32)")
    parser.add_argument("--soak", type=int, default=10_000, help="runs for memory (10000; 0: none)")
    parser.add_argument("--idle", type=float, default=75, help="seconds before the first call (75)")
    parser.add_argument("--launcher", default="bubblewrap", choices=("bubblewrap", "gvisor"))
    parser.add_argument("--json", type=Path, default=Path("var/bench/executions.json"))
    options = parser.parse_args()
    config: dict[str, object] = {"launcher": options.launcher, "pool_size": 8}
    extra: dict[str, object] = {"machine": platform.platform(), "cpus": os.cpu_count()}
    with (
        tempfile.TemporaryDirectory(prefix="cofferdam-bench-") as folder,
        running_service(Path(folder), config) as service,
    ):
        extra["idle"] = found = idle(service, options.idle)
        rows = measure_all(service, options.calls, options.callers)
        extra["processor_ms"] = processor_times(service, options.calls)
        if options.soak:
            extra["soak"] = soak(service, options.soak)
    print("measuring the ledger ...", file=sys.stderr)
    entered = ledger_rows(options.calls)
    posted = next(row for row in rows if row.name.startswith("POST"))
    bare_paused = next(row for row in rows if row.paused)
    extra["ledger_share_percent"] = round(share(entered, posted), 1)
    rows += entered
    print(table(rows, rows[0], bare_paused))
    print(f"\nprocessor time in ms, one caller: {extra['processor_ms']}")
    print(f"\nthe ledger's share of an execution: {extra['ledger_share_percent']} % of its median")
    print(
        f"\nthe service before the first call: {found['pss_mib']} MiB (PSS) in "
        f"{found['processes']} processes that wake {found['wakeups_per_second']} times a second, "
        "without its sandboxes"
    )
    if options.soak:
        memory = extra["soak"]
        assert isinstance(memory, dict)
        grown = memory["memory_after_bytes"] - memory["memory_before_bytes"]
        print(
            f"\nmemory of the service over {options.soak} runs: "
            f"{memory['memory_before_bytes'] / 2**20:.1f} MiB {grown / 2**20:+.1f} MiB"
        )
    write_json(options.json, rows, extra)
    print(f"written to {options.json}", file=sys.stderr)


if __name__ == "__main__":
    main()
