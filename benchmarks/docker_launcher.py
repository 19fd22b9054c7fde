"""Containers per second beside the engine's own limit, and where the time of a run in them goes.

The engine's limit is create + start + remove of a container that does nothing, with as many
callers: one of the engine's defaults, one closed in as ours are, and then step by step what ours
cannot do without. They take turns with ours, because the engine's speed drifts. A run is what a
provider waits for: request frame out, answer frame in. What of it the guest's supervisor spends
from the request to the program's end, it says itself.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import statistics
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

from benchmarks.processors import busy_ms
from providers.runtime.launchers.docker import DockerLauncher, DockerSettings
from providers.runtime.launchers.docker_engine import Engine, Recipe
from providers.runtime.pool.hardening import Hardening
from providers.runtime.pool.requests import make_template
from providers.runtime.pool.sandbox import Sandbox
from providers.values import Job, SandboxLimits

ROUNDS = 6

Make = Callable[[int], Awaitable[float]]

SLEEP = ["sleep", "60"]

# What ours cannot do without: an interpreter, the modules of its library that the guest's need for
# the kernel's calls and for frames, and a child that has been forked and said so.
_MODULES = "import _json, _signal, _thread, ctypes, gc, os, resource, select, time"
_CHILD = """
from_child, to_parent = os.pipe()
if os.fork() == 0:
    os.write(to_parent, b"ready")
    os.read(0, 1)
os.read(from_child, 5)
"""
_SAY_SO = "os.write(1, b'ready'); os.read(0, 1)"
_PYTHON = ["python3", "-I", "-S", "-X", "utf8", "-c"]
INTERPRETER = [*_PYTHON, f"import os; {_SAY_SO}"]
FORKED = [*_PYTHON, f"import os{_CHILD}{_SAY_SO}"]
FORKED_WITH_MODULES = [*_PYTHON, f"{_MODULES}{_CHILD}{_SAY_SO}"]


def engine_alone(
    runtime: str, command: list[str], hardening: Hardening | None, parallel: int
) -> Make:
    """Makes and removes bare containers, an interpreter once it has said so. The seconds taken."""
    engine = Engine()
    host = hardening.host(SandboxLimits()) if hardening else {"NetworkMode": "none"}
    settings = hardening.container() if hardening else {}
    recipe = Recipe("cofferdam/python", command, settings, {**host, "Runtime": runtime}, {})
    numbers = itertools.count()

    def one(_: int) -> None:
        started = engine.start(f"bench-{os.getpid()}-{id(recipe)}-{next(numbers)}", recipe)
        if command is not SLEEP and not started.stream.recv(1):
            raise RuntimeError("the interpreter said nothing")
        started.stream.close()
        engine.remove(started.id)

    def make(count: int) -> float:
        began = time.monotonic()
        with ThreadPoolExecutor(parallel) as threads:
            list(threads.map(one, range(count)))
        return time.monotonic() - began

    return lambda count: asyncio.to_thread(make, count)


async def measure(runtime: str, count: int, parallel: int) -> None:
    launcher = DockerLauncher(DockerSettings(runtime=runtime, pool_id=f"bench-{os.getpid()}"))
    await launcher.prepare()
    template = make_template("python", "python", launcher, SandboxLimits())
    starts: list[float] = []
    turn = asyncio.Semaphore(parallel)
    job = Job("print(1)", "python", 10)

    async def one() -> None:
        async with turn:
            began = time.monotonic()
            sandbox = await Sandbox.start(launcher, template)
            starts.append(time.monotonic() - began)
            await sandbox.destroy()

    async def ours(count: int) -> float:
        began = time.monotonic()
        await asyncio.gather(*(one() for _ in range(count)))
        return time.monotonic() - began

    hardening = Hardening.of(launcher.runtime)
    makers: dict[str, Make] = {
        "warmed up": ours,
        "by the engine alone": engine_alone(runtime, SLEEP, None, parallel),
        "the same, closed in": engine_alone(runtime, SLEEP, hardening, parallel),
        "and with an interpreter": engine_alone(runtime, INTERPRETER, hardening, parallel),
        "and with a forked child": engine_alone(runtime, FORKED, hardening, parallel),
        "and with the modules": engine_alone(runtime, FORKED_WITH_MODULES, hardening, parallel),
    }
    print(
        f"\n{runtime}: {count} containers made and removed, {parallel} in parallel, {ROUNDS} times"
    )
    for name, rounds in (await _in_turn(makers, count)).items():
        rate, busy = (statistics.median(kind) for kind in zip(*rounds, strict=True))
        shown = " ".join(f"{rate:.1f}" for rate, _ in rounds)
        print(f"  {name:24} {rate:5.2f}/s  processors {busy:4.0f} ms each  ({shown})")
    print(f"  start of ours: p50 {statistics.median(starts):.2f} s")
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
    for runs in (fresh, *kept):
        print(runs)


async def _in_turn(makers: dict[str, Make], count: int) -> dict[str, list[tuple[float, float]]]:
    """Of each, in rounds: containers per second, and the processors' ms per container.

    Each is the first of a round as often.
    """
    order = list(makers)
    rounds: dict[str, list[tuple[float, float]]] = {name: [] for name in order}
    for _ in range(ROUNDS):
        order = [*order[1:], order[0]]
        for name in order:
            before = busy_ms()
            rate = count / await makers[name](count)
            rounds[name].append((rate, (busy_ms() - before) / count))
            await asyncio.sleep(1)
    return rounds


class _Runs:
    """Milliseconds of runs of one kind."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._whole: list[float] = []
        self._inside: list[float] = []
        self._renewal: list[float] = []

    async def time(self, sandbox: Sandbox, job: Job) -> None:
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


def run(runtime: str, containers: int = 12, parallel: int = 4) -> None:
    """Print the figures of one runtime."""
    asyncio.run(measure(runtime, containers, parallel))
