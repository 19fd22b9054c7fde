"""Recorded runs in a tenant's gVisor kernel, beside fresh gVisor sandboxes and a bare interpreter.

POST /api/v1/executions by one tenant, over a pool that starts gVisor without Docker: with the level
`execution` and with `tenant-kernel`, at one caller, at one with a call every half second, and at
eight. With `--preload numpy pandas` programs import these, which are preloaded. Needs runsc and the
right to make cgroups.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.executions import PROGRAM, PYTHON, process_caller
from benchmarks.measure import Call, Figures, measure, table, write_json
from benchmarks.service import api_caller, running_service

PAUSE_SECONDS = 0.5
SETTLE_SECONDS = 8.0
START_SECONDS = 60.0


def measure_level(
    isolation: str, gvisor_platform: str, calls: int, preload: Sequence[str]
) -> list[Figures]:
    config: dict[str, object] = {"isolation": isolation, "max_sandboxes": 16, "queue_timeout": 60}
    config |= {"pool_size": 2, "preload": " ".join(preload)}
    code = "".join(f"import {module}\n" for module in preload) + PROGRAM
    how = {"POOL_LAUNCHER": "gvisor", "POOL_GVISOR_PLATFORM": gvisor_platform}
    with (
        tempfile.TemporaryDirectory(prefix="cofferdam-bench-") as folder,
        running_service(Path(folder), config, "self_managed", **how) as service,
    ):

        def post() -> Call:
            return api_caller(service, {"code": code}, b'"stdout":"1\\n"')

        _wait_until_it_runs(post)
        bare = process_caller([PYTHON, "-c", PROGRAM])()
        rows = []
        for callers, pause in ((1, PAUSE_SECONDS), (1, 0.0), (8, 0.0)):
            time.sleep(SETTLE_SECONDS)
            print(f"  {isolation}, {callers} caller(s), pause {pause} s ...", file=sys.stderr)
            in_turn = bare if pause else None
            rows.append(
                measure(
                    f"audited run, {isolation}",
                    post,
                    callers=callers,
                    calls=calls if pause == 0 else max(10, calls // 2),
                    pause=pause,
                    in_turn=in_turn,
                )
            )
        return rows


def _wait_until_it_runs(post: Callable[[], Call]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            return post()()
        except RuntimeError:
            # The pool service is still starting.
            if time.monotonic() > deadline:
                raise
            time.sleep(1)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tenant_kernel", description=__doc__)
    parser.add_argument("--calls", type=int, default=200, help="counted calls per row (200)")
    parser.add_argument("--platform", default="ptrace", help="gVisor's (ptrace)")
    parser.add_argument("--preload", nargs="*", default=[], help="modules (none)")
    parser.add_argument("--json", type=Path, default=Path("var/bench/tenant_kernel.json"))
    options = parser.parse_args()
    bare = process_caller([PYTHON, "-c", PROGRAM])
    name = f"{PYTHON} -c 'print(1)'"
    rows = [
        measure(name, bare, callers=1, calls=100),
        measure(f"{name}, after pauses", bare, callers=1, calls=40, pause=PAUSE_SECONDS),
    ]
    for isolation in ("execution", "tenant-kernel"):
        calls = options.calls if isolation == "tenant-kernel" else options.calls // 4
        rows += measure_level(isolation, options.platform, calls, options.preload)
    load = " ".join(f"{each:.1f}" for each in os.getloadavg())
    print(f"\n{table(rows, *rows[:2])}\nload average at the end: {load}")
    write_json(
        options.json, rows, {"machine": platform.platform(), "cpus": os.cpu_count(), "load": load}
    )


if __name__ == "__main__":
    main()
