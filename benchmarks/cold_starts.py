"""What a sandbox takes that nobody has kept warm, by every way to isolate that this machine has.

From asking to the answer of a small program, and to its end. With a kernel for each tenant the
first run starts the kernel, and those after it are what a run costs that was not made ahead. With
`--preload numpy pandas` these are imported while a sandbox, or a kernel, becomes warm.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from pathlib import Path

import django

LEVELS = (
    *(("bubblewrap", "execution"), ("crun", "execution"), ("runc", "execution")),
    *(("gvisor", "execution"), ("gvisor", "tenant-kernel")),
    *(("docker", "execution"), ("docker", "tenant-kernel")),
)


async def measure(kind: str, level: str, calls: int, preload: list[str]) -> str:
    """One line of the table. Raises SandboxError where there is no such thing here."""
    from providers.runtime.pool.launcher import Starter
    from providers.runtime.pool.requests import make_template
    from providers.runtime.pool.sandbox import Sandbox
    from providers.runtime.service.launchers import LauncherChoice
    from providers.runtime.service.settings import ServiceSettings
    from providers.values import Job, SandboxLimits

    with tempfile.TemporaryDirectory(prefix="cofferdam-bench-") as folder:
        (Path(folder) / "run").mkdir()
        choice = LauncherChoice(kind, Path(folder), "bench-cold", "ptrace")
        _, launcher, _ = await choice.open(ServiceSettings())
        try:
            limits = SandboxLimits()
            template = make_template("python", "python", launcher, limits, tuple(preload))
            code = "".join(f"import {module}\n" for module in preload) + "print(1)"
            first, answered, ended = 0.0, [], []
            for number in range(calls + 1):
                starter: Starter = launcher
                if level == "tenant-kernel":
                    starter = launcher.for_owner("bench")
                began = time.perf_counter()
                sandbox = await Sandbox.start(starter, template)
                await sandbox.run(Job(code, timeout=30))
                took = (time.perf_counter() - began) * 1000
                await sandbox.destroy()
                if number == 0:
                    first = took
                else:
                    answered.append(took)
                    ended.append((time.perf_counter() - began) * 1000)
        finally:
            launcher.close()
    name = f"{kind} ({launcher.runtime}), {level}"
    return (
        f"{name:<36}{first:>10.0f}{statistics.median(answered):>10.0f}"
        f"{max(answered):>8.0f}{statistics.median(ended):>12.0f}"
    )


async def bench(calls: int, only: list[str], preload: list[str]) -> None:
    from providers.errors import SandboxError

    print(f"{'milliseconds':<36}{'the first':>10}{'p50':>10}{'max':>8}{'to its end':>12}")
    for kind, level in LEVELS:
        if only and kind not in only:
            continue
        try:
            print(await measure(kind, level, calls, preload), flush=True)
        except SandboxError as error:
            print(f"{kind}, {level}: not here: {error.message[:120]}", flush=True)
    load = " ".join(f"{each:.1f}" for each in os.getloadavg())
    print(f"load average at the end: {load}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cold_starts", description=__doc__)
    parser.add_argument("--calls", type=int, default=20, help="counted calls per row (20)")
    parser.add_argument("--only", nargs="*", default=[], help="launchers, all where none is named")
    parser.add_argument(
        "--preload", nargs="*", default=[], help="modules, none where none is named"
    )
    options = parser.parse_args()
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "sandbox_site.settings")
    django.setup()
    asyncio.run(bench(options.calls, options.only, options.preload))


if __name__ == "__main__":
    main()
