"""Fresh sandboxes a second without a daemon, beside `docker run`, eight at a time.

Each is started, runs `print(1)` and is removed; nothing is kept warm. Under gVisor there is its
floor too: `runsc run` of the same over this machine's files, without channel, supervisor or groups
of ours. They take turns in rounds, because the machine's speed drifts. `docker run` needs the image
of `build_images`.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import django

from benchmarks.containers import IMAGE
from benchmarks.executions import PROGRAM

# What answers for which, by the runtime.
LAUNCHERS = {"runc": ("runc", "crun"), "runsc": ("gvisor",)}

Once = Callable[[], Awaitable[None]]


def is_here(kind: str) -> bool:
    return kind == "gvisor" or shutil.which(kind) is not None


async def _command(*command: str) -> None:
    process = await asyncio.create_subprocess_exec(*command, stdin=DEVNULL, stdout=PIPE)
    out, _ = await process.communicate()
    if out != b"1\n":
        raise RuntimeError(f"{command[0]} printed something else: {out[:200]!r}")


def _bare(folder: Path) -> Once:
    """`runsc run` of a bundle that has the machine's own files, and nothing to bound it."""
    subprocess.run(["runsc", "spec"], cwd=folder, check=True)
    bundle = json.loads((folder / "config.json").read_text())
    bundle["root"] = {"path": "/", "readonly": True}
    bundle["process"] |= {"args": ["python3", "-c", PROGRAM], "terminal": False}
    (folder / "config.json").write_text(json.dumps(bundle))
    names = itertools.count()

    async def once() -> None:
        name = f"bench-bare-{next(names)}"
        options = ("--platform=ptrace", "--network=none", "--root", str(folder / "state"))
        await _command("runsc", *options, "run", "--bundle", str(folder), name)

    return once


async def _launched(kind: str, folder: Path, held: ExitStack) -> Once:
    from providers.runtime.pool.requests import make_template
    from providers.runtime.pool.sandbox import Sandbox
    from providers.runtime.service.launchers import LauncherChoice
    from providers.runtime.service.settings import ServiceSettings
    from providers.values import Job, SandboxLimits

    (folder / "run").mkdir()
    choice = LauncherChoice(kind, folder, "bench-rate", "ptrace")
    _, launcher, _ = await choice.open(ServiceSettings())
    held.callback(launcher.close)
    template = make_template("python", "python", launcher, SandboxLimits(), ())

    async def once() -> None:
        sandbox = await Sandbox.start(launcher, template)
        result = await sandbox.run(Job(PROGRAM, timeout=30))
        await sandbox.destroy()
        if result.stdout != "1\n":
            raise RuntimeError(f"{kind} printed something else: {result}")

    return once


async def _per_second(once: Once, calls: int, callers: int) -> float:
    async def work() -> None:
        for _ in range(calls // callers):
            await once()

    began = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(callers)))
    return calls // callers * callers / (time.perf_counter() - began)


async def bench(runtime: str, calls: int, callers: int, rounds: int) -> None:
    docker = ("docker", "run", "--rm", "--network=none", f"--runtime={runtime}", IMAGE)
    interpreter = ("python3", "-c", PROGRAM)
    ways: dict[str, Once] = {"docker run --rm": partial(_command, *docker, *interpreter)}
    with ExitStack() as held:
        if runtime == "runsc":
            bare = held.enter_context(tempfile.TemporaryDirectory(prefix="cofferdam-bench-"))
            ways["floor: runsc run"] = _bare(Path(bare))
        for kind in filter(is_here, LAUNCHERS[runtime]):
            folder = held.enter_context(tempfile.TemporaryDirectory(prefix="cofferdam-bench-"))
            ways[f"{kind}, fresh"] = await _launched(kind, Path(folder), held)
        taken: dict[str, list[float]] = {name: [] for name in ways}
        for once in ways.values():
            await once()
        for _ in range(rounds):
            for name, once in ways.items():
                taken[name].append(await _per_second(once, calls, callers))
    beside = statistics.median(taken["docker run --rm"])
    for name, rates in taken.items():
        rate = statistics.median(rates)
        print(f"{runtime:<8}{name:<28}{rate:>10.1f}{rate / beside:>18.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fresh_rate", description=__doc__)
    parser.add_argument("--calls", type=int, default=40, help="of each in a round (40)")
    parser.add_argument("--callers", type=int, default=8, help="at a time (8)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--runtimes", nargs="+", default=["runc", "runsc"], choices=LAUNCHERS)
    options = parser.parse_args()
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "sandbox_site.settings")
    django.setup()
    print(f"{'':<36}{'per second':>10}{'× docker run':>18}")
    for runtime in options.runtimes:
        asyncio.run(bench(runtime, options.calls, options.callers, options.rounds))
    print("load average at the end:", " ".join(f"{each:.1f}" for each in os.getloadavg()))


if __name__ == "__main__":
    main()
