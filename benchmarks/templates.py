"""What templates cost: builds, the first sandbox, and each run beside one without a template.

The packages are made here and served by an index on the loopback, so that no network is measured.
Memory is the PSS of the processes.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import httpx

from providers.runtime.service.launchers import LauncherChoice
from providers.runtime.service.pool_manager import PoolManager
from providers.runtime.service.settings import ServiceSettings
from providers.templates.declaration import Declaration
from providers.templates.lock import Lock
from providers.templates.store import Built, TemplateStore
from providers.values import Job
from tests.support.package_index import PackageIndex, make_wheel, package_index

PACKAGES, MODULES = 30, 100


def build_templates(folder: Path) -> str:
    """Print what builds take; return the digest of the template that is left."""
    store = TemplateStore(folder)
    with package_index() as index:
        names = [_publish(index, number) for number in range(PACKAGES)]
        lock = Lock.parse(index.pylock(*names))
        more = Lock.parse(index.pylock(*names, _publish(index, PACKAGES)))
        first, built = _timed(lambda: _build(store, "all", lock))
        again, _ = _timed(lambda: _build(store, "all", lock))
        next_one, _ = _timed(lambda: _build(store, "more", more))
    print(
        f"a build of {PACKAGES} packages with {PACKAGES * MODULES} modules "
        f"({built.size_bytes >> 20} MiB): {first:.2f} s; again: {again * 1000:.1f} ms; with one "
        f"package more: {next_one:.2f} s"
    )
    return built.digest


def _publish(index: PackageIndex, number: int) -> str:
    body = "".join(f"def function_{line}(x):\n    return x + {line}\n" for line in range(60))
    name = f"package{number}"
    files = {f"{name}/__init__.py": "VALUE = 1\n"}
    files |= {f"{name}/module{module}.py": body for module in range(MODULES)}
    file_name = f"{name}-1.0-py3-none-any.whl"
    index.add_file(file_name, make_wheel(name, files=files))
    return file_name


def _build(store: TemplateStore, name: str, lock: Lock) -> Built:
    def fetch(url: str, most_bytes: int) -> Iterator[bytes]:
        yield httpx.get(url).content

    return store.build(Declaration(python=(name,)), lock, fetch, lambda line: None)


def _timed(call: Callable[[], Built]) -> tuple[float, Built]:
    began = time.perf_counter()
    built = call()
    return time.perf_counter() - began, built


async def measure(kind: str, folder: Path, digest: str, calls: int) -> None:
    """Print what runs of a template take, of those without one."""
    choice = LauncherChoice("auto", folder, "bench", "ptrace", best_first=(kind,))
    manager = PoolManager(choice, ServiceSettings(pool_size=1))
    manager.open()
    try:
        await run(manager, "")
        await asyncio.sleep(1)
        alone = memory()
        began = time.perf_counter()
        await run(manager, digest)
        first = time.perf_counter() - began
        took: dict[str, list[float]] = {"": [], digest: []}
        for turn in range(calls + 2):
            for name, times in took.items():
                # Time to have another sandbox ready.
                await asyncio.sleep(0.1)
                began = time.perf_counter()
                await run(manager, name)
                if turn > 1:
                    times.append(time.perf_counter() - began)
        plain, templated = (statistics.median(times) * 1000 for times in took.values())
        print(
            f"{kind}: a run {plain:.1f} ms, with a template {templated:.1f} ms "
            f"({templated / plain:.2f}) at p50; its first {first * 1000:.0f} ms"
        )
        await asyncio.sleep(1)
        print(
            f"{kind}: {alone:.1f} MiB (PSS) for an idle sandbox and what makes it, and "
            f"{memory() - alone:.1f} MiB more for one of the template"
        )
    finally:
        await manager.close()


async def run(manager: PoolManager, digest: str) -> None:
    instance = await manager.create("python", "bench", digest=digest)
    result = await manager.run_in(instance, Job("print(1)", timeout=30))
    if result.stdout != "1\n":
        raise RuntimeError(result.stderr)


def memory() -> float:
    """MiB (PSS) of the processes that this one has started, and of theirs."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            # What is before it, a name in brackets, may hold anything.
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    family = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    kibibytes = 0
    for pid in family - {os.getpid()}:
        with suppress(OSError):
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            kibibytes += next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return kibibytes / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=100)
    parser.add_argument("--launchers", nargs="+", default=["bubblewrap", "gvisor"])
    arguments = parser.parse_args()
    # Where sandboxes have nothing of their own.
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        folder = Path(name)
        folder.chmod(0o755)
        digest = build_templates(folder)
        for kind in arguments.launchers:
            asyncio.run(measure(kind, folder, digest, arguments.calls))


if __name__ == "__main__":
    main()
