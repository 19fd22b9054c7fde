"""The pool hands every sandbox out once, never hangs, and holds what it promises."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from providers.base import SANDBOX_ENDED, Limits
from providers.errors import CreationFailed, InvalidConfiguration, RateLimited, SandboxError
from providers.pool.pool import Pool, PoolSettings
from providers.pool.sandbox import RunRequest, Sandbox
from providers.pool.template import Template
from tests.impostors import MARK, Impostor
from tests.sandboxes import children, command

REQUEST = RunRequest("code", "auto", 5, None, (), Limits())
TEMPLATES = {name: Template(name, "python") for name in ("python", "nodejs", "bash")}


def guests() -> set[int]:
    return {pid for pid in children(os.getpid()) if command(pid)[-1] == MARK}


@asynccontextmanager
async def pool_over(launcher: Impostor, **settings: Any) -> AsyncIterator[Pool]:
    """A pool that is open; when it is closed, no guest may be left."""
    pool = Pool(launcher, TEMPLATES, PoolSettings(**{"size": 2, "patience": 5.0, **settings}))
    pool.open()
    try:
        yield pool
    finally:
        await pool.close()
        assert not guests()


async def until(condition: Callable[[], bool], seconds: float = 5) -> None:
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
        async with pool_over(Impostor(rest_seconds=0.6), size=1) as pool:
            await until(idle(pool, 1))
            sandbox = await pool.acquire("python")
            await sandbox.run(REQUEST)
            ending = asyncio.create_task(pool.release(sandbox))
            await asyncio.sleep(0.2)
            stats = pool.stats()
            assert (sandbox.alive, stats["ending"], stats["creating"]) == (True, 1, 0)
            await ending
            assert not sandbox.alive

    asyncio.run(scenario())


def test_nobody_who_waits_is_made_to_wait_for_that() -> None:
    async def scenario() -> None:
        async with pool_over(Impostor(rest_seconds=30), size=1, capacity=1) as pool:
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
        async with pool_over(Impostor(rest_seconds=30), size=1) as pool:
            await until(idle(pool, 1))
            sandbox = await pool.acquire("python")
            async with asyncio.timeout(5):
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


def test_at_capacity_callers_wait_and_are_refused_after_their_patience() -> None:
    async def scenario() -> None:
        async with pool_over(Impostor(), size=1, capacity=2, patience=1) as pool:
            held = [await pool.acquire("python") for _ in range(2)]
            assert len(guests()) == 2
            began = time.monotonic()
            with pytest.raises(RateLimited) as caught:
                await pool.acquire("python")
            assert 0.95 < time.monotonic() - began < 3
            assert caught.value.retry_after >= 1
            assert caught.value.may_retry
            assert len(guests()) == 2
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
        async with pool_over(Impostor(), size=1, capacity=1, queue=2) as pool:
            held = await pool.acquire("python")
            waiting = [asyncio.create_task(use(pool, name)) for name in ("python", "nodejs")]
            await until(lambda: pool.stats()["waiting"] == 2)
            began = time.monotonic()
            with pytest.raises(RateLimited) as caught:
                await pool.acquire("bash")
            assert time.monotonic() - began < 0.1
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
            assert time.monotonic() - began < 2

    asyncio.run(scenario())


def test_a_launcher_that_fails_is_told_quickly_and_tried_ever_less_often() -> None:
    async def scenario() -> None:
        launcher = Impostor(failing="no isolation today")
        async with pool_over(launcher, size=2) as pool:
            began = time.monotonic()
            with pytest.raises(CreationFailed, match="no isolation today"):
                await pool.acquire("python")
            assert time.monotonic() - began < 1
            await asyncio.sleep(1)
            assert launcher.attempts < 12
            assert pool.stats()["failed"] == launcher.attempts
            launcher.failing = ""
            await until(idle(pool, 2), seconds=7)
            await use(pool)

    asyncio.run(scenario())


@pytest.mark.parametrize("error", [OSError(24, "Too many open files"), ValueError("a bug"), MemoryError()])  # fmt: skip
def test_a_launcher_that_breaks_is_a_failed_creation_too(error: Exception) -> None:
    async def scenario() -> None:
        launcher = Impostor(broken=error)
        async with pool_over(launcher) as pool:
            began = time.monotonic()
            with pytest.raises(CreationFailed):
                await pool.acquire("python")
            assert time.monotonic() - began < 1
            launcher.broken = None
            await until(idle(pool, 2), seconds=7)
            await use(pool)

    asyncio.run(scenario())


def test_an_unknown_template_names_the_field() -> None:
    async def scenario() -> None:
        async with pool_over(Impostor()) as pool:
            with pytest.raises(InvalidConfiguration) as caught:
                await pool.acquire("cobol")
            assert caught.value.field == "language"

    asyncio.run(scenario())


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
            assert time.monotonic() - began < 0.1

    asyncio.run(scenario())


def test_closing_does_not_wait_for_a_guest_that_does_not_get_ready() -> None:
    async def scenario() -> float:
        async with pool_over(Impostor("time.sleep(1000)")) as pool:
            await until(lambda: len(guests()) == 2)
            began = time.monotonic()
            await pool.close()
            return time.monotonic() - began

    assert asyncio.run(scenario()) < 2


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
            assert time.monotonic() - began < 1

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
            assert time.monotonic() - began < 1

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
