"""Which isolation level a launcher's pool has where it is left to `auto`, and why."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from providers.errors import SandboxError
from providers.runtime.pool.launcher import Launcher, Starter
from providers.runtime.pool.sandbox import Sandbox
from providers.runtime.pool.settings import Isolation, Level
from providers.runtime.pool.template import Template

# Whose kernel shows that there can be one. No caller's name has a space.
_NOBODY = "no tenant"


@dataclass(frozen=True)
class ChosenLevel:
    """`why` is for the provider's page, empty where somebody has named the level."""

    level: Level
    why: str = ""


async def choose_level(launcher: Launcher, wanted: Isolation) -> ChosenLevel:
    """The level to have with this launcher, which is prepared.

    `auto` takes a gVisor kernel for each tenant where there can be one: that is gVisor's isolation
    from the machine and from other tenants, without a fresh kernel's start for every run. Raises
    SandboxError where the level that is named cannot be had.
    """
    if wanted == "tenant-kernel":
        await _require_tenant_kernels(launcher)
    if wanted != "auto":
        return ChosenLevel(wanted)
    if launcher.runtime != "gvisor":
        return ChosenLevel("execution", "execution: a new sandbox starts fast with this launcher")
    try:
        await _require_tenant_kernels(launcher)
    except SandboxError as error:
        return ChosenLevel("execution", f"execution: {error.message}"[:200])
    return ChosenLevel("tenant-kernel", "tenant-kernel: a new gVisor for every run starts slowly")


async def _require_tenant_kernels(launcher: Launcher) -> None:
    """Have one make a run. Raises SandboxError where that cannot be, or its kernel is not gVisor's:
    what it takes to make runs in a container is too much for one on this machine's kernel."""
    await try_out(launcher.for_owner(_NOBODY))


async def try_out(starter: Starter) -> None:
    """Start a sandbox and end it. Raises SandboxError where that cannot be."""
    sandbox = await Sandbox.start(starter, Template("python", "python"))
    try:
        await sandbox.destroy()
    except asyncio.CancelledError:
        # Whoever gives it up closes the launcher, of which nothing may be left then.
        await sandbox.destroy()
        raise
