"""Pools over guests that only pretend, in the loop of the test itself."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from providers.runtime.pool.pool import Pool, PoolSettings
from providers.runtime.pool.sandbox import Sandbox
from providers.runtime.pool.template import Template
from providers.values import Job
from tests.support.impostors import MARK, Impostor
from tests.support.sandboxes import children, command

REQUEST = Job("code", timeout=60)


TEMPLATES = {name: Template(name, "python") for name in ("python", "nodejs", "bash")}


def guests() -> set[int]:
    return {pid for pid in children(os.getpid()) if command(pid)[-1] == MARK}


@asynccontextmanager
async def pool_over(launcher: Impostor, **settings: Any) -> AsyncIterator[Pool]:
    """A pool that is open; when it is closed, no guest may be left."""
    pool = Pool(launcher, TEMPLATES, PoolSettings(**{"size": 2, "patience": 60.0, **settings}))
    pool.open()
    try:
        yield pool
    finally:
        await pool.close()
        assert not guests()


async def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


def idle(pool: Pool, count: int) -> Callable[[], bool]:
    return lambda: pool.stats()["idle"] == count and not pool.stats()["creating"]


async def use(pool: Pool, template: str = "python") -> Sandbox:
    sandbox = await pool.acquire(template)
    assert (await sandbox.run(REQUEST)).stdout == "code"
    await pool.release(sandbox)
    return sandbox
