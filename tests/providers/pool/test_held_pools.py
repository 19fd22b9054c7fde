"""Pools of the service for the provider `local`: who holds one, and when it ends."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from providers.errors import ProviderUnavailable, RateLimited
from providers.runtime.service.launchers import LauncherChoice
from providers.runtime.service.pool_manager import PoolManager
from providers.runtime.service.registry import PoolSpec
from providers.runtime.service.settings import ServiceSettings
from providers.values import Job
from tests.conftest import require
from tests.support.sandboxes import children, command

SETTINGS = ServiceSettings(pool_size=1, max_sandboxes=4)
ONE = PoolSpec(SETTINGS, "bubblewrap", "systrap")
LARGER = replace(ONE, settings=replace(SETTINGS, max_sandboxes=6))
OTHER = replace(ONE, settings=replace(SETTINGS, preload=("json",)))


def in_a_service(folder: Path, work: Callable[[PoolManager], Awaitable[None]]) -> None:
    require("bwrap")

    async def serve() -> None:
        manager = PoolManager(LauncherChoice("bubblewrap", folder, "test"), SETTINGS)
        manager.open(has_settings=False)
        try:
            await work(manager)
        finally:
            await manager.close()

    asyncio.run(asyncio.wait_for(serve(), 60))


def nobody(is_full: bool) -> None:
    """Is told in vain."""


async def until_none_is_open(manager: PoolManager) -> None:
    while manager.stats()["retired_pools"]:
        await asyncio.sleep(0.01)


def test_holders_of_the_same_settings_share_a_pool_which_ends_with_the_last(tmp_path: Path) -> None:
    async def work(manager: PoolManager) -> None:
        first, second = [].append, [].append
        pool = await manager.hold(ONE, first)
        assert await manager.hold(ONE, second) is pool
        manager.leave(pool, first)
        instance = await manager.create_in(manager.pool_named(pool.name), "python", "alice")
        manager.end(instance)
        manager.leave(pool, second)
        await until_none_is_open(manager)
        with pytest.raises(ProviderUnavailable, match="no such pool"):
            manager.pool_named(pool.name)
        assert not manager.is_used

    in_a_service(tmp_path, work)


def test_what_is_lent_keeps_a_pool_that_nobody_holds(tmp_path: Path) -> None:
    async def work(manager: PoolManager) -> None:
        pool = await manager.hold(ONE, nobody)
        session = await manager.registry.keep("python", "alice", 60, {}, None, ONE)
        manager.leave(pool, nobody)
        assert manager.stats()["retired_pools"] == 1
        assert manager.is_used
        manager.registry.sessions.remove(session)
        await until_none_is_open(manager)

    in_a_service(tmp_path, work)


def test_a_pool_that_is_held_no_longer_keeps_nothing_warm_until_it_is_held_again(
    tmp_path: Path,
) -> None:
    async def work(manager: PoolManager) -> None:
        pool = await manager.hold(ONE, nobody)
        instance = await manager.create_in(pool, "python", "alice")
        manager.leave(pool, nobody)
        while manager.stats_of(pool)["size"]:
            await asyncio.sleep(0.01)
        assert await manager.hold(ONE, nobody) is pool
        assert manager.stats_of(pool)["size"] == 1
        manager.end(instance)

    in_a_service(tmp_path, work)


def test_pools_with_the_same_launcher_share_it(tmp_path: Path) -> None:
    async def work(manager: PoolManager) -> None:
        first = await manager.hold(ONE, nobody)
        second = await manager.hold(OTHER, nobody)
        assert second.launcher is first.launcher
        manager.leave(first, nobody)
        while manager.stats()["retired_pools"] > 1:
            await asyncio.sleep(0.01)
        instance = await manager.create_in(second, "python", "alice")
        assert (await manager.run_in(instance, Job("print(1)"))).stdout == "1\n"

    in_a_service(tmp_path, work)


def test_pools_that_share_a_launcher_and_end_together_close_it_once(tmp_path: Path) -> None:
    """The numbers of its descriptors may be another's by the second time."""
    closed = []

    async def work(manager: PoolManager) -> None:
        pools = [await manager.hold(spec, nobody) for spec in (ONE, OTHER)]
        launcher = pools[0].launcher
        close = launcher.close

        def note() -> None:
            closed.append(launcher)
            close()

        launcher.close = note  # type: ignore[method-assign]
        for pool in pools:
            manager.leave(pool, nobody)
        await until_none_is_open(manager)

    in_a_service(tmp_path, work)
    assert len(closed) == 1


def test_a_pool_of_other_sandboxes_is_another(tmp_path: Path) -> None:
    async def work(manager: PoolManager) -> None:
        pool = await manager.hold(ONE, nobody)
        assert await manager.hold(OTHER, nobody) is not pool
        assert manager.stats()["retired_pools"] == 2

    in_a_service(tmp_path, work)


def test_the_newest_sizes_hold_and_those_of_a_trial_do_not(tmp_path: Path) -> None:
    async def work(manager: PoolManager) -> None:
        pool = await manager.hold(ONE, nobody)
        await manager.hold(LARGER, nobody, is_trial=True)
        assert manager.stats_of(pool)["capacity"] == 4
        await manager.hold(LARGER, nobody)
        assert manager.stats_of(pool)["capacity"] == 6

    in_a_service(tmp_path, work)


def test_a_trial_opens_its_pool_with_one_idle_sandbox(tmp_path: Path) -> None:
    async def work(manager: PoolManager) -> None:
        spec = replace(ONE, settings=replace(SETTINGS, pool_size=3))
        pool = await manager.hold(spec, nobody, is_trial=True)
        assert manager.stats_of(pool)["size"] == 1

    in_a_service(tmp_path, work)


def test_each_holder_is_told_when_it_is_full_and_when_it_is_no_longer(tmp_path: Path) -> None:
    async def work(manager: PoolManager) -> None:
        told: list[bool] = []
        small = replace(ONE, settings=replace(SETTINGS, max_sandboxes=1))
        pool = await manager.hold(small, told.append)
        instance = await manager.create_in(pool, "python", "alice")
        assert told == [True]
        late: list[bool] = []
        await manager.hold(small, late.append)
        assert late == [True]
        manager.end(instance)
        while len(told) < 2:
            await asyncio.sleep(0.01)
        assert (told, late) == ([True, False], [True, False])

    in_a_service(tmp_path, work)


def test_sessions_and_runs_count_in_one_pool(tmp_path: Path) -> None:
    async def work(manager: PoolManager) -> None:
        tight = replace(ONE, settings=replace(SETTINGS, max_sandboxes=2, queue_timeout=0.2))
        pool = await manager.hold(tight, nobody)
        await manager.registry.keep("python", "alice", 60, {}, None, tight)
        await manager.create_in(pool, "python", "bob")
        with pytest.raises(RateLimited):
            await manager.create_in(pool, "python", "charlie")

    in_a_service(tmp_path, work)


def test_nothing_is_left_of_a_pool_that_was_just_ending(tmp_path: Path) -> None:
    """Its last holder has left right before the service ends."""
    seen: list[set[int]] = []

    def ours() -> set[int]:
        place = str(tmp_path)
        return {pid for pid in children(os.getpid()) if place in " ".join(command(pid))}

    async def work(manager: PoolManager) -> None:
        pool = await manager.hold(ONE, nobody)
        instance = await manager.create_in(pool, "python", "alice")
        manager.end(instance)
        while pool.instances:
            await asyncio.sleep(0)
        seen.append(ours())
        manager.leave(pool, nobody)

    in_a_service(tmp_path, work)
    assert seen[0]
    assert not ours()
