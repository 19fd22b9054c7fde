"""Whether refilling makes the next caller wait: a call every half second, and one every five.

`providers.runtime.pool` over a launcher of this machine, without HTTP and record: from asking for a
sandbox to the answer of a small program. The two kinds of calls take turns in blocks, as the
machine's speed drifts.
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

LAUNCHERS = ("bubblewrap", "runc", "gvisor", "docker")


async def measure(kind: str, calls: int, blocks: int, size: int) -> dict[float, list[float]]:
    """Milliseconds by the seconds between two calls."""
    from providers.runtime.pool.pool import Pool, PoolSettings
    from providers.runtime.pool.requests import make_template
    from providers.runtime.service.launchers import LauncherChoice
    from providers.runtime.service.settings import ServiceSettings
    from providers.values import Job, SandboxLimits

    with tempfile.TemporaryDirectory(prefix="cofferdam-bench-") as folder:
        (Path(folder) / "run").mkdir()
        choice = LauncherChoice(kind, Path(folder), "bench", "ptrace")
        _, launcher, _ = await choice.open(ServiceSettings())
        template = make_template("python", "python", launcher, SandboxLimits())
        pool = Pool(launcher, {"python": template}, PoolSettings(size=size, capacity=2 * size))
        pool.open()
        taken: dict[float, list[float]] = {0.5: [], 5.0: []}
        await _refilled(pool, size)
        for _ in range(blocks):
            for pause, durations in taken.items():
                # What was called before a block is not what it is about.
                await asyncio.sleep(2)
                for _ in range(max(2, calls // blocks // (1 if pause < 1 else 4))):
                    await asyncio.sleep(pause)
                    began = time.perf_counter()
                    sandbox = await pool.acquire("python")
                    await sandbox.run(Job("print(1)"))
                    durations.append((time.perf_counter() - began) * 1000)
                    await pool.release(sandbox)
        await pool.close()
        launcher.close()
        return taken


async def _refilled(pool: object, size: int) -> None:
    while pool.stats()["idle"] < size:  # type: ignore[attr-defined]
        await asyncio.sleep(0.1)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.refilling", description=__doc__)
    parser.add_argument("--launchers", nargs="+", choices=LAUNCHERS, default=["bubblewrap"])
    parser.add_argument("--calls", type=int, default=48, help="every half second, in all (48)")
    parser.add_argument("--blocks", type=int, default=3)
    parser.add_argument("--size", type=int, default=4)
    options = parser.parse_args()
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "sandbox_site.settings")
    django.setup()
    for kind in options.launchers:
        taken = asyncio.run(measure(kind, options.calls, options.blocks, options.size))
        middle = {pause: statistics.median(each) for pause, each in taken.items()}
        for pause, durations in taken.items():
            print(
                f"{kind:12} every {pause:3g} s: {len(durations):3} calls, "
                f"p50 {middle[pause]:6.2f} ms, max {max(durations):7.2f}"
            )
        print(f"{kind:12} {middle[0.5] / middle[5.0]:.2f} times", flush=True)


if __name__ == "__main__":
    main()
