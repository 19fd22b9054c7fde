"""Tenants' gVisor kernels in tests, without a pool around them."""

from __future__ import annotations

import textwrap
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from providers.runtime.launchers.docker import DockerLauncher
from providers.runtime.launchers.oci import GvisorLauncher
from providers.runtime.pool.background import BackgroundLoop
from providers.runtime.pool.requests import make_template
from providers.runtime.pool.sandbox import Sandbox
from providers.values import Event, ExecutionResult, Job, SandboxLimits

# Longer than anything here takes on a busy machine.
PATIENCE = 180.0
MEMORY = 192 << 20


class Kernels:
    """A launcher in a loop of its own, whose kernels tests take runs from."""

    def __init__(self, folder: Path, launcher: DockerLauncher | None = None) -> None:
        """Over `runsc`, or over an engine's containers under gVisor."""
        (folder / "run").mkdir()
        self.loop = BackgroundLoop("test-kernels")
        self.launcher = launcher or GvisorLauncher(folder, "ptrace")
        self.loop.call(self.launcher.prepare())

    def start(self, owner: str, language: str = "python", *preload: str) -> Sandbox:
        async def begin() -> Sandbox:
            limits = SandboxLimits(memory_bytes=MEMORY)
            template = make_template(language, language, self.launcher, limits, preload)
            return await Sandbox.start(self.launcher.for_owner(owner), template)

        return self.loop.call(begin())

    def run(self, owner: str, code: str, language: str = "python", **how: Any) -> ExecutionResult:
        """Run dedented code in a run of its own in this owner's kernel."""
        return Going(self, self.start(owner, language), code, language, **how).result()

    def begin(self, owner: str, code: str, **how: Any) -> Going:
        """The same, going on; it has printed something."""
        going = Going(self, self.start(owner), code, **how)
        assert going.spoken.wait(PATIENCE)
        assert going.first == "stdout", going.result()
        return going

    def kernel(self, owner: str) -> Any:
        current = self.launcher._kernels._current  # type: ignore[union-attr]
        [kernel] = [one for (whose, _), them in current.items() if whose == owner for one in them]
        return kernel

    def close(self) -> None:
        async def close() -> None:
            self.launcher.close()

        self.loop.call(close())
        self.loop.stop()


class Going:
    """A run that goes on."""

    def __init__(
        self,
        kernels: Kernels,
        sandbox: Sandbox,
        code: str,
        language: str = "python",
        *,
        timeout: float = 20,
        environment: Mapping[str, str] | None = None,
        **how: Any,
    ) -> None:
        self.sandbox = sandbox
        self.spoken = threading.Event()
        self.first = ""
        self._kernels = kernels
        text = textwrap.dedent(code)
        job = Job(text, language, timeout, environment=environment or {}, **how)
        self._future: Future[ExecutionResult] = kernels.loop.submit(sandbox.run(job, self._hear))

    def _hear(self, event: Event) -> None:
        self.first = self.first or event.type
        self.spoken.set()

    def result(self) -> ExecutionResult:
        try:
            return self._future.result(PATIENCE)
        finally:
            self.end()

    @property
    def came(self) -> ExecutionResult | None:
        """What came of it, None while it goes on. Raises what ended it."""
        return self._future.result() if self._future.done() else None

    def end(self) -> None:
        self._kernels.loop.call(self.sandbox.destroy())
