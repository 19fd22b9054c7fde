"""What kernels of tenants cost: ten thousand runs through one, and fifty tenants beside each other.

`--runs` go through one tenant's kernel, four at a time; before, in between and afterwards its
memory, its processes on this machine, its descriptors and its mounts are counted from outside.
Then `--tenants` call once each every `--every` seconds, and it is said what that takes of memory
and processors; a thousand of them are reckoned from it. Needs runsc and the right to make cgroups.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import django

AT_ONCE = 4
WARM_UP = 200
PROJECTED = 1000


@dataclass(frozen=True)
class Seen:
    """One kernel from outside."""

    memory_mib: float
    processes: int
    threads: int
    descriptors: int
    mounts: int

    def line(self, runs: int, milliseconds: float) -> str:
        return (
            f"{runs:>8}{self.memory_mib:>10.1f}{self.processes:>11}{self.threads:>9}"
            f"{self.descriptors:>13}{self.mounts:>8}{milliseconds:>9.1f}"
        )


HEAD = "    runs       MiB  processes  threads  descriptors  mounts   ms/run"


def look(cgroup: Any) -> Seen:
    """By the machine's kernel: the group's memory, and of every process in it what /proc says."""
    pids = {int(pid) for path in cgroup.procs for pid in Path(path).read_text().split()}
    threads = descriptors = mounts = 0
    for pid in pids:
        try:
            threads += len(os.listdir(f"/proc/{pid}/task"))
            descriptors += len(os.listdir(f"/proc/{pid}/fd"))
            # What starts the kernel sees this machine's own, which others add to.
            if os.readlink(f"/proc/{pid}/ns/mnt") != os.readlink("/proc/self/ns/mnt"):
                mounts += len(Path(f"/proc/{pid}/mounts").read_text().splitlines())
        except OSError:  # it has ended meanwhile
            continue
    return Seen((cgroup.memory_bytes() or 0) / 2**20, len(pids), threads, descriptors, mounts)


class Kernels:
    """A launcher and what makes runs with it."""

    def __init__(self, folder: Path, gvisor_platform: str) -> None:
        from providers.runtime.launchers.oci import GvisorLauncher

        (folder / "run").mkdir()
        self.launcher = GvisorLauncher(folder, gvisor_platform)

    async def prepare(self) -> None:
        from providers.runtime.pool.requests import make_template
        from providers.values import SandboxLimits

        await self.launcher.prepare()
        self.template = make_template("python", "python", self.launcher, SandboxLimits())

    async def run(self, owner: str) -> None:
        """One run, from its start until nothing of it is left."""
        from providers.runtime.pool.sandbox import Sandbox
        from providers.values import Job

        sandbox = await Sandbox.start(self.launcher.for_owner(owner), self.template)
        try:
            result = await sandbox.run(Job("print(1)", timeout=30))
        finally:
            await sandbox.destroy()
        if result.stdout != "1\n":
            raise RuntimeError(f"unexpected result: {result}")

    def all(self) -> list[Any]:
        """The groups of all kernels that there are."""
        kernels = self.launcher._kernels
        return [each.sentry._cgroup for each in kernels._all] if kernels else []


async def many_runs(kernels: Kernels, runs: int) -> None:
    from providers.runtime.launchers import tenant_kernel

    # One kernel is to have all of them, however long that takes.
    tenant_kernel.MOST_RUNS, tenant_kernel.MOST_SECONDS = runs * 2, 1e9

    async def serve(count: int) -> None:
        for _ in range(count):
            await kernels.run("one")

    print(f"{runs} runs through one kernel, {AT_ONCE} at a time\n{HEAD}")
    done = 0
    for part in (WARM_UP, *[(runs - WARM_UP) // 10] * 10):
        began = time.perf_counter()
        await asyncio.gather(*(serve(part // AT_ONCE) for _ in range(AT_ONCE)))
        done += part
        taken = (time.perf_counter() - began) * 1000 / max(1, part)
        # What has ended is given back a moment later.
        await asyncio.sleep(1)
        [cgroup] = kernels.all()
        print(look(cgroup).line(done, taken), flush=True)


async def many_tenants(kernels: Kernels, tenants: int, every: float, seconds: float) -> None:
    from providers.runtime.launchers import tenant_kernel

    tenant_kernel.MOST_IDLE = tenants
    durations: list[float] = []

    async def call(number: int, until: float) -> None:
        await asyncio.sleep(every * number / tenants)
        while time.monotonic() < until:
            began = time.perf_counter()
            await kernels.run(f"tenant {number}")
            durations.append((time.perf_counter() - began) * 1000)
            await asyncio.sleep(max(0.0, every - (time.perf_counter() - began)))

    async def all_call(seconds: float) -> None:
        until = time.monotonic() + seconds
        await asyncio.gather(*(call(number, until) for number in range(tenants)))

    # The kernels themselves start in the first round.
    await all_call(every)
    durations.clear()
    groups = kernels.all()
    before, began = sum(each.cpu_seconds() or 0 for each in groups), time.monotonic()
    await all_call(seconds)
    lasted = time.monotonic() - began
    processors = (sum(each.cpu_seconds() or 0 for each in groups) - before) / lasted
    memory = sum((each.memory_bytes() or 0) for each in groups) / 2**20
    durations.sort()
    print(f"\n{'tenants':>8}{'MiB':>9}{'processors':>12}{'p50 ms':>9}{'p99 ms':>9}")
    p99 = durations[int(len(durations) * 0.99)]
    print(
        f"{len(groups):>8}{memory:>9.0f}{processors:>12.2f}"
        f"{statistics.median(durations):>9.1f}{p99:>9.1f}"
    )
    scale = PROJECTED / max(1, len(groups))
    print(f"{PROJECTED:>8}{memory * scale:>9.0f}{processors * scale:>12.2f}   reckoned from it")


async def bench(options: argparse.Namespace) -> None:
    for part in ("runs", "tenants"):
        if not getattr(options, part):
            continue
        with tempfile.TemporaryDirectory(prefix="cofferdam-bench-") as folder:
            kernels = Kernels(Path(folder), options.platform)
            await kernels.prepare()
            try:
                if part == "runs":
                    await many_runs(kernels, options.runs)
                else:
                    await many_tenants(kernels, options.tenants, options.every, options.seconds)
            finally:
                kernels.launcher.close()
    load = " ".join(f"{each:.1f}" for each in os.getloadavg())
    print(f"load average at the end: {load}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=__doc__)
    parser.add_argument("--runs", type=int, default=10_000, help="0 leaves this part out (10000)")
    parser.add_argument("--tenants", type=int, default=50, help="0 leaves this part out (50)")
    parser.add_argument("--every", type=float, default=10.0, help="seconds between calls (10)")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long they call (60)")
    parser.add_argument("--platform", default="ptrace", help="gVisor's (ptrace)")
    options = parser.parse_args()
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "sandbox_site.settings")
    django.setup()
    asyncio.run(bench(options))


if __name__ == "__main__":
    main()
