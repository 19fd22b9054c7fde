"""Containers per second, and calls of warm ones, beside the engine's own limit.

The engine's limit is create + start + remove of a container that does nothing, with as many
callers. A call is what a provider waits for: request frame out, answer frame in.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor

import docker

from providers.base import Limits
from providers.pool.launchers.docker import DockerLauncher, DockerSettings
from providers.pool.requests import Job, make_template, run_request
from providers.pool.sandbox import Sandbox


def engine_limit(runtime: str, count: int, parallel: int) -> float:
    """Bare containers per second."""
    client = docker.from_env(timeout=60, max_pool_size=parallel)

    def one(_: int) -> None:
        options = {"runtime": runtime, "network_mode": "none", "detach": True}
        client.containers.run("cofferdam/python", ["sleep", "60"], **options).remove(force=True)

    one(0)
    began = time.monotonic()
    with ThreadPoolExecutor(parallel) as threads:
        list(threads.map(one, range(count)))
    return count / (time.monotonic() - began)


async def measure(runtime: str, count: int, parallel: int) -> None:
    launcher = DockerLauncher(DockerSettings(runtime=runtime, pool_id=f"bench-{os.getpid()}"))
    await launcher.prepare()
    template = make_template("python", "python", launcher, Limits())
    starts: list[float] = []
    calls: list[float] = []
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
    # One after the other, so that nothing else is under way while a call is timed.
    for _ in range(count):
        sandbox = await Sandbox.start(launcher, template)
        await asyncio.sleep(0.3)
        began = time.monotonic()
        await sandbox.run(job)
        calls.append((time.monotonic() - began) * 1000)
        await sandbox.destroy()
    launcher.close()
    limit = await asyncio.to_thread(engine_limit, runtime, count, parallel)
    print(
        f"{runtime:14} {rate:5.1f}/s warm and removed, {parallel} in parallel "
        f"(the engine alone: {limit:.1f}/s); start p50 {statistics.median(starts):.2f} s; "
        f"call p50 {statistics.median(calls):.1f} ms, p95 {sorted(calls)[count * 19 // 20]:.1f}, "
        f"max {max(calls):.1f}"
    )


def run(runtime: str, containers: int = 24, parallel: int = 4) -> None:
    """Print the figures of one runtime."""
    asyncio.run(measure(runtime, containers, parallel))
