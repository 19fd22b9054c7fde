"""The pool hands every sandbox out once, keeps some warm, and replaces what was used or has failed."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from providers.errors import CreationFailed, InvalidConfiguration, RateLimited, SandboxError
from tests.support.impostor_pools import REQUEST, guests, idle, pool_over, until, use
from tests.support.impostors import Impostor
from tests.support.puppets import pass_seconds


def test_every_sandbox_serves_once() -> None:
    async def scenario() -> None:
        async with pool_over(Impostor(), capacity=4) as pool:
            used = [await use(pool) for _ in range(6)]
            together = await asyncio.gather(*(use(pool) for _ in range(12)))
        numbers = [sandbox.number for sandbox in (*used, *together)]
        assert len(set(numbers)) == 18
        assert not any(sandbox.alive for sandbox in (*used, *together))

    asyncio.run(scenario())


def test_the_first_template_is_warm_from_the_start_and_others_after_their_first_use() -> None:
    async def scenario() -> None:
        async with pool_over(Impostor(), size=2) as pool:
            await until(idle(pool, 2))
            await use(pool, "nodejs")
            await until(idle(pool, 4))
            assert (await pool.acquire("nodejs")).template.name == "nodejs"

    asyncio.run(scenario())


def test_what_was_used_is_replaced() -> None:
    async def scenario() -> None:
        async with pool_over(Impostor(), size=3) as pool:
            await until(idle(pool, 3))
            for _ in range(3):
                await use(pool)
            await until(idle(pool, 3))
            assert (pool.stats()["busy"], pool.stats()["started"]) == (0, 6)
            assert len(guests()) == 3

    asyncio.run(scenario())


def test_a_sandbox_that_has_answered_leaves_the_caller_time_to_answer() -> None:
    async def scenario() -> None:
        async with pool_over(Impostor(rest_seconds=60), size=1) as pool:
            await until(idle(pool, 1))
            sandbox = await pool.acquire("python")
            await sandbox.run(REQUEST)
            ending = asyncio.create_task(pool.release(sandbox))
            await asyncio.sleep(0.2)
            stats = pool.stats()
            assert (sandbox.alive, stats["ending"], stats["creating"]) == (True, 1, 0)
            pass_seconds(30)
            await ending
            assert not sandbox.alive

    asyncio.run(scenario())


def test_nobody_who_waits_is_made_to_wait_for_that() -> None:
    async def scenario() -> None:
        async with pool_over(Impostor(rest_seconds=60), size=1, capacity=1) as pool:
            await until(idle(pool, 1))
            sandbox = await pool.acquire("python")
            await sandbox.run(REQUEST)
            waiting = asyncio.create_task(pool.acquire("python"))
            await until(lambda: pool.stats()["waiting"] == 1)
            await pool.release(sandbox)
            assert (await waiting).alive

    asyncio.run(scenario())


def test_a_sandbox_that_has_not_answered_is_ended_at_once() -> None:
    async def scenario() -> None:
        async with pool_over(Impostor(rest_seconds=60), size=1) as pool:
            await until(idle(pool, 1))
            sandbox = await pool.acquire("python")
            async with asyncio.timeout(20):
                await pool.release(sandbox)
            assert not sandbox.alive

    asyncio.run(scenario())


def test_a_warm_sandbox_that_is_killed_is_replaced_before_anyone_gets_it() -> None:
    async def scenario() -> None:
        async with pool_over(Impostor(), size=2) as pool:
            await until(idle(pool, 2))
            killed = guests()
            for pid in killed:
                os.kill(pid, signal.SIGKILL)
            await until(lambda: not killed & guests())
            for _ in range(4):
                await use(pool)
            assert pool.stats()["failed"] == 0

    asyncio.run(scenario())


def test_a_launcher_that_fails_is_told_quickly_and_tried_ever_less_often() -> None:
    async def scenario() -> None:
        launcher = Impostor(failing="no isolation today")
        async with pool_over(launcher, size=2, patience=60) as pool:
            # Long before its patience is at an end.
            async with asyncio.timeout(20):
                with pytest.raises(CreationFailed, match="no isolation today"):
                    await pool.acquire("python")
            assert launcher.attempts < 12
            assert pool.stats()["failed"] == launcher.attempts
            launcher.failing = ""
            await until(idle(pool, 2), seconds=60)
            await use(pool)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (OSError(24, "Too many open files"), RateLimited),
        (ValueError("a bug"), CreationFailed),
        (MemoryError(), RateLimited),
    ],
)
def test_a_launcher_that_breaks_is_a_failed_creation_too(
    error: Exception, raised: type[SandboxError]
) -> None:
    async def scenario() -> None:
        launcher = Impostor(broken=error)
        async with pool_over(launcher, patience=60) as pool:
            async with asyncio.timeout(20):
                with pytest.raises(raised):
                    await pool.acquire("python")
            launcher.broken = None
            await until(idle(pool, 2), seconds=60)
            await use(pool)

    asyncio.run(scenario())


def test_an_unknown_template_names_the_field() -> None:
    async def scenario() -> None:
        async with pool_over(Impostor()) as pool:
            with pytest.raises(InvalidConfiguration) as caught:
                await pool.acquire("cobol")
            assert caught.value.field == "language"

    asyncio.run(scenario())
