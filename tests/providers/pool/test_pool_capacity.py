"""A pool has as many sandboxes as it may: who comes then waits in turn, for a while, and costs nothing."""

from __future__ import annotations

import asyncio
import time

import pytest

from providers.errors import RateLimited
from providers.runtime.pool.pool import PoolSettings
from tests.support.impostor_pools import guests, idle, pool_over, until, use
from tests.support.impostors import Impostor


def test_at_capacity_callers_wait_and_are_refused_after_their_patience() -> None:
    async def scenario() -> None:
        async with pool_over(Impostor(), size=1, capacity=2) as pool:
            held = [await pool.acquire("python") for _ in range(2)]
            assert len(guests()) == 2
            await pool.resize(PoolSettings(size=1, capacity=2, patience=1))
            began = time.monotonic()
            with pytest.raises(RateLimited) as caught:
                await pool.acquire("python")
            assert 0.95 < time.monotonic() - began < 60
            assert caught.value.retry_after >= 1
            assert caught.value.may_retry
            assert len(guests()) == 2
            await pool.resize(PoolSettings(size=1, capacity=2, patience=60))
            for sandbox in held:
                await pool.release(sandbox)
            await use(pool)

    asyncio.run(scenario())


def test_capacity_is_never_exceeded() -> None:
    async def scenario() -> None:
        most = 0
        async with pool_over(Impostor(), size=2, capacity=3) as pool:

            async def watch() -> None:
                nonlocal most
                while True:
                    stats = pool.stats()
                    most = max(most, stats["busy"] + stats["idle"] + stats["creating"])
                    await asyncio.sleep(0.001)

            watching = asyncio.create_task(watch())
            names = ["python", "nodejs", "bash"] * 6
            await asyncio.gather(*(use(pool, name) for name in names))
            watching.cancel()
        assert 2 <= most <= 3

    asyncio.run(scenario())


def test_a_full_queue_refuses_at_once() -> None:
    async def scenario() -> None:
        async with pool_over(Impostor(), size=1, capacity=1, queue=2, patience=60) as pool:
            held = await pool.acquire("python")
            waiting = [asyncio.create_task(use(pool, name)) for name in ("python", "nodejs")]
            await until(lambda: pool.stats()["waiting"] == 2)
            began = time.monotonic()
            with pytest.raises(RateLimited) as caught:
                await pool.acquire("bash")
            assert time.monotonic() - began < 20
            assert caught.value.retry_after >= 1
            await pool.release(held)
            await asyncio.gather(*waiting)

    asyncio.run(scenario())


def test_callers_are_served_in_the_order_they_came() -> None:
    async def scenario() -> list[int]:
        served: list[int] = []
        async with pool_over(Impostor(), size=1, capacity=1) as pool:
            held = await pool.acquire("python")

            async def caller(number: int) -> None:
                sandbox = await pool.acquire("python")
                served.append(number)
                await pool.release(sandbox)

            callers = []
            for number in range(6):
                callers.append(asyncio.create_task(caller(number)))
                await until(lambda number=number: pool.stats()["waiting"] == number + 1)  # type: ignore[misc]
            await pool.release(held)
            await asyncio.gather(*callers)
        return served

    assert asyncio.run(scenario()) == list(range(6))


def test_a_caller_of_another_template_gets_the_place_of_one_that_only_waits_warm() -> None:
    async def scenario() -> None:
        async with pool_over(Impostor(), size=2, capacity=2) as pool:
            await until(idle(pool, 2))
            began = time.monotonic()
            assert (await use(pool, "bash")).template.name == "bash"
            assert time.monotonic() - began < 20

    asyncio.run(scenario())


def test_a_waiting_caller_that_gives_up_leaves_no_trace() -> None:
    async def scenario() -> None:
        async with pool_over(Impostor(), size=1, capacity=1) as pool:
            held = await pool.acquire("python")
            callers = [asyncio.create_task(pool.acquire("python")) for _ in range(3)]
            await until(lambda: pool.stats()["waiting"] == 3)
            for caller in callers:
                caller.cancel()
            await asyncio.gather(*callers, return_exceptions=True)
            assert pool.stats()["waiting"] == 0
            await pool.release(held)
            await until(idle(pool, 1))
            assert pool.stats()["busy"] == 0
            await use(pool)

    asyncio.run(scenario())


def test_a_caller_that_gives_up_while_being_served_does_not_take_the_sandbox_along() -> None:
    async def scenario() -> None:
        async with pool_over(Impostor(), size=1, capacity=1) as pool:
            for _ in range(3):
                held = await pool.acquire("python")
                caller = asyncio.create_task(pool.acquire("python"))
                await until(lambda: pool.stats()["waiting"] == 1)
                await pool.release(held)
                # No sleep in between: the caller has its sandbox but has not woken up yet.
                while pool.stats()["waiting"]:
                    await asyncio.sleep(0)
                assert caller.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await caller
                await until(idle(pool, 1))
                assert pool.stats()["busy"] == 0
            await use(pool)

    asyncio.run(scenario())


def test_a_sandbox_that_comes_just_too_late_goes_to_the_next_caller() -> None:
    async def scenario() -> None:
        async with pool_over(Impostor(), size=1, capacity=1) as pool:
            held = await pool.acquire("python")
            callers = [asyncio.create_task(pool.acquire("python")) for _ in range(2)]
            await until(lambda: pool.stats()["waiting"] == 2)
            await pool.release(held)
            while pool.stats()["waiting"] == 2:
                await asyncio.sleep(0)
            callers[0].cancel()
            async with asyncio.timeout(5):
                await pool.release(await callers[1])

    asyncio.run(scenario())
