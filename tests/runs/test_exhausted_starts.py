"""A start for which the machine has too little left costs that start, and nobody else anything."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from providers.errors import RateLimited, SandboxError
from providers.models import CircuitBreaker
from providers.runtime.guest import wire
from providers.runtime.launchers.bubblewrap import BubblewrapLauncher
from providers.runtime.pool.launcher import start_failure
from providers.runtime.pool.requests import make_template
from providers.runtime.pool.sandbox import Sandbox
from providers.services import breaker
from providers.values import Job, SandboxLimits
from tests.conftest import require
from tests.support.process_bounds import bound_on_processes
from tests.support.sandboxes import children

FORKS = pytest.mark.parametrize("preload", [(), ("decimal",)], ids=["cloned", "forked"])
# How many descriptors more than it has a zygote needs for one start, and some to spare.
DESCRIPTORS = 16


def zygote_of(launcher: BubblewrapLauncher) -> int:
    assert launcher._zygote is not None
    (zygote,) = children(launcher._zygote._process.pid)
    return zygote


class Started:
    """A zygote with one sandbox that is kept, and what became of further starts."""

    def __init__(self, launcher: BubblewrapLauncher, preload: tuple[str, ...]) -> None:
        self._launcher = launcher
        self._template = make_template("python", "python", launcher, SandboxLimits(), preload)

    async def begin(self) -> None:
        self.kept = await Sandbox.start(self._launcher, self._template)
        self.zygote = zygote_of(self._launcher)

    async def another(self) -> SandboxError | None:
        try:
            sandbox = await Sandbox.start(self._launcher, self._template)
        except SandboxError as error:
            return error
        await sandbox.destroy()
        return None

    async def finish(self) -> str:
        """What the kept one has to say after all that."""
        job = Job("print('here')", "python", 10)
        result = await self.kept.run(job)
        await self.kept.destroy()
        return result.stdout


def with_zygote(data_dir: Path, preload: tuple[str, ...], do: Callable[[Started], Any]) -> Any:
    async def run() -> Any:
        launcher = BubblewrapLauncher(data_dir)
        await launcher.prepare()
        try:
            started = Started(launcher, preload)
            await started.begin()
            found = await do(started)
            assert zygote_of(launcher) == started.zygote
            assert await started.finish() == "here\n"
            return found
        finally:
            launcher.close()

    require("bwrap")
    return asyncio.run(run())


@FORKS
def test_wherever_descriptors_run_out_only_that_start_fails(
    tmp_path: Path, preload: tuple[str, ...]
) -> None:
    async def starve(started: Started) -> list[SandboxError | None]:
        _, most = resource.prlimit(started.zygote, resource.RLIMIT_NOFILE)
        used = max(int(fd) for fd in os.listdir(f"/proc/{started.zygote}/fd")) + 1
        outcomes = []
        for limit in range(used, used + DESCRIPTORS):
            resource.prlimit(started.zygote, resource.RLIMIT_NOFILE, (limit, most))
            outcomes.append(await started.another())
        resource.prlimit(started.zygote, resource.RLIMIT_NOFILE, (most, most))
        outcomes.append(await started.another())
        return outcomes

    *starved, last = with_zygote(tmp_path, preload, starve)
    failures = [error for error in starved if error is not None]
    # At every one of them, until there are enough.
    assert len(failures) >= 4
    assert [error for error in starved[len(failures) :] if error] == []
    assert [error for error in failures if error.code != "SB008"] == []
    assert last is None


@FORKS
def test_a_fork_that_fails_ends_no_other_sandbox(tmp_path: Path, preload: tuple[str, ...]) -> None:
    async def starve(started: Started) -> list[SandboxError | None]:
        with bound_on_processes(started.zygote) as bound:
            outcomes = []
            for most in ("now", "now", "max"):
                bound(most)
                outcomes.append(await started.another())
            return outcomes

    first, second, last = with_zygote(tmp_path, preload, starve)
    assert (type(first), type(second), last) == (RateLimited, RateLimited, None), first
    assert "enough free processes" in str(first)


@pytest.mark.parametrize("error", [OSError(errno.EAGAIN, "no"), MemoryError()], ids=repr)
@pytest.mark.django_db
def test_it_says_nothing_against_the_provider(error: Exception) -> None:
    failure = start_failure("bubblewrap", error)
    assert (failure.code, failure.may_retry) == ("SB008", True)
    for _ in range(breaker.THRESHOLD + 1):
        breaker.report_failure("local", failure)
    assert not CircuitBreaker.objects.exists()


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EPERM, errno.EACCES])
def test_any_other_failure_is_the_providers(number: int) -> None:
    assert not wire.is_exhaustion(OSError(number, "no"))
    assert start_failure("bubblewrap", OSError(number, "no")).code == "SB004"
