"""However a sandbox or the whole pool ends, who waits for it is told, and nothing is left of it."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from providers.errors import CreationFailed, SandboxError
from providers.values import SANDBOX_ENDED
from tests.impostor_pools import REQUEST, guests, idle, pool_over, until, use
from tests.impostors import Impostor


def test_closing_ends_busy_and_warm_sandboxes_and_tells_who_waits() -> None:
    async def scenario() -> None:
        async with pool_over(Impostor(), size=1, capacity=1) as pool:
            held = await pool.acquire("python")
            waiting = asyncio.create_task(pool.acquire("python"))
            await until(lambda: pool.stats()["waiting"] == 1)
            await pool.close()
            assert not held.alive
            with pytest.raises(CreationFailed, match="shutting down"):
                await waiting
            began = time.monotonic()
            with pytest.raises(SandboxError, match="shutting down"):
                await pool.acquire("python")
            assert time.monotonic() - began < 5

    asyncio.run(scenario())


def test_closing_does_not_wait_for_a_guest_that_does_not_get_ready() -> None:
    async def scenario() -> float:
        async with pool_over(Impostor("time.sleep(1000)")) as pool:
            await until(lambda: bool(guests()))
            began = time.monotonic()
            await pool.close()
            return time.monotonic() - began

    assert asyncio.run(scenario()) < 20


def test_a_release_may_be_asked_for_twice_and_at_the_same_time() -> None:
    async def scenario() -> None:
        async with pool_over(Impostor(), size=1) as pool:
            sandbox = await pool.acquire("python")
            await asyncio.gather(*(pool.release(sandbox) for _ in range(3)))
            await pool.release(sandbox)
            assert pool.stats()["busy"] == 0
            await use(pool)

    asyncio.run(scenario())


def test_destroying_a_sandbox_ends_the_run_in_it() -> None:
    async def scenario() -> None:
        async with pool_over(Impostor("say(READY)\nlisten()\ntime.sleep(1000)")) as pool:
            sandbox = await pool.acquire("python")
            running = asyncio.create_task(sandbox.run(REQUEST))
            await asyncio.sleep(0.1)
            began = time.monotonic()
            await pool.release(sandbox)
            with pytest.raises(SandboxError) as caught:
                await running
            assert caught.value.started
            assert time.monotonic() - began < 20

    asyncio.run(scenario())


def test_a_sandbox_that_ends_during_a_run_is_told_at_once() -> None:
    async def scenario() -> None:
        async with pool_over(Impostor("say(READY)\nlisten()\ntime.sleep(1000)"), size=1) as pool:
            await until(idle(pool, 1))
            (pid,) = guests()
            sandbox = await pool.acquire("python")
            running = asyncio.create_task(sandbox.run(REQUEST))
            await asyncio.sleep(0.1)
            began = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            result = await running
            assert result.metadata[SANDBOX_ENDED].endswith("ended with signal 9")
            assert time.monotonic() - began < 20

    asyncio.run(scenario())


def test_no_descriptor_is_left_of_a_sandbox() -> None:
    def descriptors() -> int:
        return len(list(Path(f"/proc/{os.getpid()}/fd").iterdir()))

    async def scenario() -> None:
        before = descriptors()
        async with pool_over(Impostor(), size=1) as pool:
            for _ in range(10):
                await use(pool)
        async with pool_over(Impostor("say(READY[:3]); sys.exit()")) as pool:
            for _ in range(3):
                with pytest.raises(CreationFailed):
                    await pool.acquire("python")
        assert descriptors() <= before

    asyncio.run(scenario())
