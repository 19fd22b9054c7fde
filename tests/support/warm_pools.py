"""A pool over one launcher for tests, without any provider around it."""

from __future__ import annotations

import asyncio
import textwrap
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from django.conf import settings

from providers.runtime.launchers.bubblewrap import BubblewrapLauncher
from providers.runtime.pool.background import BackgroundLoop
from providers.runtime.pool.launcher import Guest, Launcher
from providers.runtime.pool.pool import Pool, PoolSettings
from providers.runtime.pool.requests import make_template
from providers.runtime.pool.sandbox import Sandbox
from providers.runtime.pool.template import Template
from providers.values import Entrypoint, ExecutionResult, InputFile, Job, RunLimits, SandboxLimits
from tests.support.waiting import wait_until

CALM = PoolSettings(size=1, capacity=4, patience=60)


class WarmPool:
    """A pool in a loop of its own, used from the test's thread and from others."""

    def __init__(
        self,
        pool_settings: PoolSettings = CALM,
        templates: Mapping[str, Template] | None = None,
        launcher: Launcher | None = None,
        *,
        in_all_languages: bool = False,
    ) -> None:
        self.loop = BackgroundLoop("test-pool")
        self.launcher = launcher or BubblewrapLauncher(settings.DATA_DIR)
        self.loop.call(self.launcher.prepare())
        if in_all_languages:
            templates = languages(self.launcher)
        self.pool = self.loop.call(self._open(pool_settings, templates or {}))
        self._threads = ThreadPoolExecutor(64)

    async def _open(self, chosen: PoolSettings, templates: Mapping[str, Template]) -> Pool:
        default = {"python": Template("python", "python")}
        pool = Pool(self.launcher, templates or default, chosen)
        pool.open()
        return pool

    def __enter__(self) -> WarmPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.loop.call(self.pool.close())
        self.launcher.close()
        self.loop.stop()
        self._threads.shutdown()

    def acquire(self, owner: str = "", template: str = "python") -> Sandbox:
        return self.loop.call(self.pool.acquire(template, owner))

    def release(self, sandbox: Sandbox) -> None:
        self.loop.call(self.pool.release(sandbox))

    def resize(self, chosen: PoolSettings) -> None:
        self.loop.call(self.pool.resize(chosen))

    def stats(self) -> dict[str, Any]:
        async def look() -> dict[str, Any]:
            return self.pool.stats()

        return self.loop.call(look())

    def in_background(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """A future of `work` done in another thread."""
        return self._threads.submit(work, *arguments)

    def run_in(
        self,
        sandbox: Sandbox,
        code: str,
        *,
        entrypoint: Entrypoint = "auto",
        timeout: float = 60,
        arguments: Mapping[str, Any] | None = None,
        files: tuple[InputFile, ...] = (),
        environment: Mapping[str, str] | None = None,
        language: str = "python",
        **limits: int,
    ) -> ExecutionResult:
        job = Job(
            textwrap.dedent(code),
            language,
            timeout,
            arguments,
            entrypoint,
            files,
            RunLimits(**limits),
            environment=environment or {},
        )
        return self.loop.call(sandbox.run(job))

    def run(self, code: str, owner: str = "", template: str = "python", **how: Any) -> Any:
        """Acquire, run, release."""
        sandbox = self.acquire(owner, template)
        try:
            return self.run_in(sandbox, code, **how)
        finally:
            self.release(sandbox)

    def settle(self, **wanted: int) -> None:
        """Wait until the pool's figures are these."""

        def settled() -> bool:
            stats = self.stats()
            return all(stats[name] == value for name, value in wanted.items())

        try:
            wait_until(settled, seconds=60)
        except AssertionError:
            raise AssertionError(f"wanted {wanted}, the pool has {self.stats()}") from None


class SlowLauncher(BubblewrapLauncher):
    """Takes `delay` seconds for a start, or fails while it has an `error`."""

    delay = 0.0
    error: Exception | None = None
    attempts: list[float]

    def __init__(self) -> None:
        super().__init__(settings.DATA_DIR)
        self.attempts = []

    async def start(self, template: Template) -> Guest:
        self.attempts.append(time.monotonic())
        await asyncio.sleep(self.delay)
        if self.error:
            raise self.error
        return await super().start(template)


def languages(launcher: Launcher) -> dict[str, Template]:
    """A template of every language the launcher has."""
    return {
        name: make_template(name, name, launcher, SandboxLimits()) for name in launcher.languages()
    }
