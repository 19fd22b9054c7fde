"""The time that a sandbox has for its start."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from providers.runtime.pool.launcher import start_deadline


class Clock(asyncio.SelectorEventLoop):
    """A loop whose time goes on when the test says so."""

    now = 0.0

    def time(self) -> float:
        return self.now

    async def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for _ in range(3):
            await asyncio.sleep(0)


def run(clock: Clock, work: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=lambda: clock) as runner:
        runner.run(work)


def test_a_start_is_ended_after_its_seconds() -> None:
    clock = Clock()

    async def start() -> None:
        async with start_deadline(2.5):
            for seconds in (1, 1, 0.4):
                await clock.pass_time(seconds)
            with pytest.raises(asyncio.CancelledError):
                await clock.pass_time(0.2)
            raise asyncio.CancelledError

    with pytest.raises(TimeoutError):
        run(clock, start())


def test_a_machine_that_stood_still_ends_no_start() -> None:
    clock = Clock()

    async def start() -> None:
        async with start_deadline(30):
            await clock.pass_time(3600)
            await clock.pass_time(28.9)

    run(clock, start())
    assert clock.now > 3600
