"""A guest that answers what it likes."""

from __future__ import annotations

import os
import time
from typing import Any

from providers.runtime.pool.pool import Pool, PoolSettings
from providers.runtime.pool.template import Template
from providers.values import ExecutionResult, Job
from tests.support.impostors import MARK, Impostor
from tests.support.sandboxes import children, command
from tests.support.waiting import wait_until

TEMPLATES = {"python": Template("python", "python")}


def request(**changes: Any) -> Job:
    return Job(**{"code": "print(1)", "timeout": 60, **changes})


def impostors() -> set[int]:
    return {pid for pid in children(os.getpid()) if command(pid)[-1] == MARK}


async def served(script: str, **changes: Any) -> ExecutionResult:
    """What a pool makes of a guest with this script; nothing of the guest may be left after it."""
    pool = Pool(Impostor(script), TEMPLATES, PoolSettings(size=1, patience=60))
    pool.open()
    try:
        sandbox = await pool.acquire("python")
        try:
            return await sandbox.run(request(**changes))
        finally:
            began = time.monotonic()
            await pool.release(sandbox)
            assert time.monotonic() - began < 30
            # The pool goes on: the next one is as good as the first.
            await pool.release(await pool.acquire("python"))
    finally:
        await pool.close()
        wait_until(lambda: not impostors(), seconds=60)
