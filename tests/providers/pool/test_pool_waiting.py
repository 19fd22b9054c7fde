"""Who waits for a sandbox waits in a bounded line, in turn with the others, and never for ever."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest
from django.conf import settings as django_settings

from providers.errors import CreationFailed, ProviderUnavailable, RateLimited
from providers.runtime.launchers.bubblewrap import BubblewrapLauncher
from providers.runtime.pool.launcher import Guest
from providers.runtime.pool.pool import PoolSettings
from providers.runtime.pool.shelf import QueueFull, Waiter, WaitQueue
from providers.runtime.pool.template import Template
from tests.conftest import require
from tests.support.waiting import wait_until
from tests.support.warm_pools import SlowLauncher, WarmPool


class Together(BubblewrapLauncher):
    """Has a sandbox for nobody before four are asked for."""

    barrier = asyncio.Barrier(4)

    async def start(self, template: Template) -> Guest:
        await self.barrier.wait()
        return await super().start(template)


@pytest.fixture(autouse=True)
def _bubblewrap() -> None:
    require("bwrap")


@pytest.fixture
def narrow() -> Iterator[WarmPool]:
    """One sandbox at a time, and room for six callers."""
    with WarmPool(PoolSettings(size=1, capacity=1, queue=6, patience=60)) as pool:
        pool.settle(idle=1)
        yield pool


def test_owners_are_served_in_turn(narrow: WarmPool) -> None:
    served: list[str] = []

    def call(owner: str) -> None:
        sandbox = narrow.acquire(owner)
        served.append(owner)
        narrow.release(sandbox)

    first = narrow.acquire("greedy")
    calls = []
    for position, owner in enumerate(["greedy", "greedy", "greedy", "modest", "other", "modest"]):
        calls.append(narrow.in_background(call, owner))
        narrow.settle(waiting=position + 1)
    narrow.release(first)
    for each in calls:
        each.result(60)
    assert served == ["greedy", "modest", "other", "greedy", "modest", "greedy"]


def test_a_full_line_refuses_with_when_to_come_back(narrow: WarmPool) -> None:
    first = narrow.acquire("one")
    calls = [narrow.in_background(narrow.run, "1", f"owner {number}") for number in range(6)]
    narrow.settle(waiting=6)
    # At once: the sandbox is not released before.
    with pytest.raises(RateLimited) as refusal:
        narrow.acquire("one too many")
    assert refusal.value.code == "SB008"
    assert refusal.value.retry_after is not None
    assert refusal.value.retry_after >= 1
    narrow.release(first)
    assert all(each.result(60).exit_code == 0 for each in calls)


def test_who_fills_the_line_makes_way_for_somebody_new(narrow: WarmPool) -> None:
    first = narrow.acquire("greedy")
    calls = [narrow.in_background(narrow.run, "1", "greedy") for _ in range(6)]
    narrow.settle(waiting=6)
    newcomer = narrow.in_background(narrow.run, "print('served')", "modest")
    narrow.settle(waiting=6, refused=1)
    narrow.release(first)
    assert newcomer.result(60).stdout == "served\n"
    refusals = [error for each in calls if (error := each.exception(60))]
    assert [type(error) for error in refusals] == [RateLimited]


def test_patience_ends(narrow: WarmPool) -> None:
    first = narrow.acquire()
    narrow.resize(PoolSettings(size=1, capacity=1, patience=0.3))
    began = time.monotonic()
    with pytest.raises(RateLimited, match=r"0\.3 s") as refusal:
        narrow.acquire()
    assert time.monotonic() - began > 0.25
    assert refusal.value.retry_after
    assert narrow.stats()["waiting"] == 0
    narrow.resize(PoolSettings(size=1, capacity=1, patience=60))
    narrow.release(first)
    assert narrow.run("print(1)").stdout == "1\n"


def test_a_caller_who_goes_away_leaves_nothing_behind(narrow: WarmPool) -> None:
    async def give_up_while_waiting() -> None:
        first = await narrow.pool.acquire("python", "one")
        waiting = asyncio.create_task(narrow.pool.acquire("python", "two"))
        await asyncio.sleep(0.05)
        waiting.cancel()
        await narrow.pool.release(first)

    async def give_up_when_served() -> None:
        first = await narrow.pool.acquire("python", "one")
        waiting = asyncio.create_task(narrow.pool.acquire("python", "two"))
        await asyncio.sleep(0.05)
        place = narrow.pool._line.everybody()[0]
        releasing = asyncio.create_task(narrow.pool.release(first))
        while not place.future.done():
            await asyncio.sleep(0)
        waiting.cancel()
        await releasing
        with pytest.raises(asyncio.CancelledError):
            await waiting

    for what in (give_up_while_waiting, give_up_when_served):
        narrow.loop.call(what())
        narrow.settle(idle=1, busy=0, ending=0, waiting=0)


def test_many_callers_of_few_sandboxes_are_all_served_and_capacity_is_never_exceeded() -> None:
    alive = ("busy", "idle", "kept", "creating", "ending")
    with WarmPool(PoolSettings(size=2, capacity=3, queue=40, patience=60)) as pool:
        calls = [
            pool.in_background(pool.run, f"print({number})", f"owner {number % 7}")
            for number in range(30)
        ]
        most = 0
        while not all(each.done() for each in calls):
            stats = pool.stats()
            most = max(most, sum(stats[name] for name in alive))
            time.sleep(0.002)
        assert most <= 3
        assert [each.result(60).stdout for each in calls] == [f"{n}\n" for n in range(30)]
        pool.settle(idle=2, busy=0, ending=0, waiting=0)
        assert pool.stats()["refused"] == 0


def test_a_launcher_that_fails_is_told_at_once_and_tried_again() -> None:
    launcher = SlowLauncher()
    launcher.error = ProviderUnavailable("The engine is gone.")
    with WarmPool(PoolSettings(size=1, capacity=2, patience=60), launcher=launcher) as pool:
        wait_until(lambda: len(launcher.attempts) >= 3, seconds=60)
        with pytest.raises(ProviderUnavailable, match="engine is gone") as refusal:
            pool.acquire()
        assert refusal.value.retry_after
        assert not refusal.value.started
        stats = pool.stats()
        assert stats["failing"] == ["python"]
        assert stats["templates"]["python"]["failing"] == "The engine is gone."
        pauses = [
            later - earlier
            for earlier, later in zip(launcher.attempts, launcher.attempts[1:], strict=False)
        ]
        # Each is at least what is waited after so many failures, and longer on a slow machine.
        least = [0.19 * 2.0**failures for failures in range(len(pauses))]
        assert all(pause >= bound for pause, bound in zip(pauses[:4], least[:4], strict=True))
        launcher.error = None
        pool.settle(idle=1)
        assert pool.stats()["failing"] == []
        assert pool.run("print(1)").stdout == "1\n"


def test_a_fault_in_the_launcher_itself_hangs_nobody() -> None:
    launcher = SlowLauncher()
    launcher.error = KeyError("surprise")
    # Whose patience is at an end is refused with another error.
    with (
        WarmPool(PoolSettings(size=1, patience=60), launcher=launcher) as pool,
        pytest.raises(CreationFailed, match="KeyError"),
    ):
        pool.acquire()


def test_sandboxes_are_started_side_by_side() -> None:
    launcher = Together(django_settings.DATA_DIR)
    with WarmPool(PoolSettings(size=4, capacity=4, parallel_starts=4), launcher=launcher) as pool:
        pool.settle(idle=4)


def test_a_warm_sandbox_gives_way_to_a_caller_of_another_template() -> None:
    shell = Template("bash", "bash", ("/bin/bash",))
    templates = {"python": Template("python", "python"), "bash": shell}
    with WarmPool(PoolSettings(size=1, capacity=1, patience=60), templates) as pool:
        pool.settle(idle=1)
        assert pool.run("echo hello", template="bash", owner="a").stdout == "hello\n"
        pool.settle(busy=0, ending=0)


def test_the_line_is_in_the_order_of_service() -> None:
    async def fill() -> list[str]:
        line = WaitQueue()
        for owner in "aaabbc":
            line.join(owner, "python", bound=10)
        order = []
        while (place := line.first("python")) is not None:
            line.serve(place)
            order.append(place.owner)
        return order

    assert asyncio.run(fill()) == ["a", "b", "c", "a", "b", "a"]


def test_only_who_has_less_may_push_in() -> None:
    async def fill() -> tuple[Waiter | None, Waiter | None]:
        line = WaitQueue()
        for owner in "aab":
            line.join(owner, "python", bound=3)
        with pytest.raises(QueueFull):
            line.join("b", "python", bound=3)
        _, displaced = line.join("c", "python", bound=3)
        with pytest.raises(QueueFull):
            line.join("d", "python", bound=3)
        return displaced, line.first("python", "c")

    displaced, newcomer = asyncio.run(fill())
    assert displaced is not None
    assert displaced.owner == "a"
    assert newcomer is not None
