"""Pools of the service for sessions of other settings: how long they stay warm."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from providers.runtime.service import pool_manager as keeping
from providers.runtime.service.launchers import LauncherChoice
from providers.runtime.service.pool_manager import PoolManager
from providers.runtime.service.sandbox_registry import Apart
from providers.runtime.service.settings import ServiceSettings
from tests.conftest import require

SETTINGS = ServiceSettings(pool_size=1, max_sandboxes=4)
ONE = Apart(SETTINGS, "bubblewrap", "systrap", "one")
OTHER = replace(ONE, key="other")


def in_a_service(folder: Path, work: Callable[[PoolManager], Awaitable[None]]) -> None:
    require("bwrap")

    async def serve() -> None:
        keeper = PoolManager(LauncherChoice("bubblewrap", folder, "test"), SETTINGS)
        keeper.open(is_apart=True)
        try:
            await work(keeper)
        finally:
            await keeper.close()

    asyncio.run(asyncio.wait_for(serve(), 60))


async def use(keeper: PoolManager, apart: Apart) -> None:
    """Open a session and close it again, until nothing is left of it."""
    session = await keeper.keeping.keep("python", "alice", 60, {}, None, apart)
    keeper.keeping.sessions.remove(session)
    line = await keeper.line_apart(apart)
    while line.instances:
        await asyncio.sleep(0.01)


def test_the_next_session_after_a_pause_finds_the_pool_warm(tmp_path: Path) -> None:
    async def work(keeper: PoolManager) -> None:
        await use(keeper, ONE)
        line = await keeper.line_apart(ONE)
        await use(keeper, ONE)
        assert await keeper.line_apart(ONE) is line
        assert keeper.stats()["retired_pools"] == 1

    in_a_service(tmp_path, work)


def test_one_that_nobody_uses_any_more_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeping, "REST_SECONDS", 0.2)

    async def work(keeper: PoolManager) -> None:
        await use(keeper, ONE)
        while keeper.stats()["retired_pools"]:
            await asyncio.sleep(0.01)

    in_a_service(tmp_path, work)


def test_a_pool_of_other_settings_takes_its_place(tmp_path: Path) -> None:
    async def work(keeper: PoolManager) -> None:
        await use(keeper, ONE)
        resting = await keeper.line_apart(ONE)
        await use(keeper, OTHER)
        assert keeper.stats()["retired_pools"] == 1
        assert await keeper.line_apart(ONE) is not resting

    in_a_service(tmp_path, work)
