"""Containers per second beside the engine's own limit, and where the time of a run in them goes.

The engine's limit is create + start + remove of a container that does nothing, with as many
callers: one of the engine's defaults, and one closed in as ours are. A run is what a provider
waits for: request frame out, answer frame in. What of it the guest's supervisor spends from the
request to the program's end, it says itself.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor

from providers.base import Limits
from providers.pool.hardening import Hardening
from providers.pool.launchers.docker import DockerLauncher, DockerSettings
from providers.pool.launchers.docker_engine import Engine, Recipe
from providers.pool.requests import Job, make_template, run_request
from providers.pool.sandbox import RunRequest, Sandbox


def engine_limit(runtime: str, count: int, parallel: int, hardening: Hardening | None) -> float:
    """Bare containers per second."""
    engine = Engine()
    host = hardening.host(Limits()) if hardening else {"NetworkMode": "none"}
    settings = hardening.container() if hardening else {}
    recipe = Recipe("cofferdam/python", ["sleep", "60"], settings, {**host, "Runtime": runtime}, {})

    def one(number: int) -> None:
        started = engine.start(f"bench-{os.getpid()}-{number}", recipe)
        started.stream.close()
        engine.remove(started.id)

    one(count)
    began = time.monotonic()
    with ThreadPoolExecutor(parallel) as threads:
        list(threads.map(one, range(count)))
    return count / (time.monotonic() - began)


async def measure(runtime: str, count: int, parallel: int) -> None:
    launcher = DockerLauncher(DockerSettings(runtime=runtime, pool_id=f"bench-{os.getpid()}"))
    await launcher.prepare()
    template = make_template("python", "python", launcher, Limits())
    starts: list[float] = []
    turn = asyncio.Semaphore(parallel)
    job = run_request(Job("print(1)", "python", 10), template)

    async def one() -> None:
        async with turn:
            began = time.monotonic()
            sandbox = await Sandbox.start(launcher, template)
            starts.append(time.monotonic() - began)
            await sandbox.destroy()

    began = time.monotonic()
    await asyncio.gather(*(one() for _ in range(count)))
    rate = count / (time.monotonic() - began)
    # One after the other, so that nothing else is under way while a run is timed.
    fresh = _Runs("fresh, 1 s after its start")
    for _ in range(count):
        sandbox = await Sandbox.start(launcher, template)
        await asyncio.sleep(1)
        await fresh.time(sandbox, job)
        await sandbox.destroy()
    kept = [_Runs("kept, back to back"), _Runs("kept, 50 ms apart")]
    sandbox = await Sandbox.start(launcher, template)
    sandbox.give_to("bench", reusable=True)
    for runs, pause in zip(kept, (0.0, 0.05), strict=True):
        for _ in range(4 * count):
            await asyncio.sleep(pause)
            await runs.time(sandbox, job)
    await sandbox.destroy()
    launcher.close()
    limits = [
        await asyncio.to_thread(engine_limit, runtime, count, parallel, hardening)
        for hardening in (None, Hardening.of(launcher.runtime))
    ]
    print(
        f"{runtime:14} {rate:5.1f}/s warm and removed, {parallel} in parallel "
        f"(the engine alone: {limits[0]:.1f}/s, closed in: {limits[1]:.1f}/s); "
        f"start p50 {statistics.median(starts):.2f} s"
    )
    for runs in (fresh, *kept):
        print(runs)


class _Runs:
    """Milliseconds of runs of one kind."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._whole: list[float] = []
        self._inside: list[float] = []
        self._renewal: list[float] = []

    async def time(self, sandbox: Sandbox, job: RunRequest) -> None:
        began = time.perf_counter()
        result = await sandbox.run(job)
        ended = time.perf_counter()
        await sandbox.renewed()
        self._whole.append((ended - began) * 1000)
        self._inside.append(result.execution_time * 1000)
        self._renewal.append((time.perf_counter() - ended) * 1000)

    def __str__(self) -> str:
        whole = sorted(self._whole)
        return (
            f"  run, {self._name:27} p50 {statistics.median(whole):6.2f} ms, "
            f"p95 {whole[len(whole) * 19 // 20]:6.2f}, max {whole[-1]:6.2f}; "
            f"of it the program {statistics.median(self._inside):5.2f}; "
            f"renewal {statistics.median(self._renewal):.2f}"
        )


def run(runtime: str, containers: int = 24, parallel: int = 4) -> None:
    """Print the figures of one runtime."""
    asyncio.run(measure(runtime, containers, parallel))
