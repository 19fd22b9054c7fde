"""A start that the host gives up costs that sandbox, and none of the others from its zygote."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path

import pytest

from providers.errors import CreationFailed
from providers.runtime.launchers.bubblewrap import BubblewrapLauncher
from providers.runtime.pool.requests import make_template
from providers.runtime.pool.sandbox import Sandbox
from providers.values import ExecutionResult, Job, SandboxLimits
from tests.conftest import require


async def _run_beside_starts_given_up(data_dir: Path, preload: tuple[str, ...]) -> ExecutionResult:
    launcher = BubblewrapLauncher(data_dir)
    await launcher.prepare()
    try:
        template = make_template("python", "python", launcher, SandboxLimits(), preload)
        kept = await Sandbox.start(launcher, template)
        for number in range(30):
            start = asyncio.ensure_future(Sandbox.start(launcher, template))
            # At once, and when the zygote is in the middle of it.
            await asyncio.sleep(number % 6 * 0.002)
            start.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await (await start).destroy()
        result = await kept.run(Job("print('here')", "python", 10))
        await kept.destroy()
        following = await Sandbox.start(launcher, template)
        await following.destroy()
        return result
    finally:
        launcher.close()


async def _start_after_closing_twice(data_dir: Path) -> None:
    launcher = BubblewrapLauncher(data_dir)
    await launcher.prepare()
    template = make_template("python", "python", launcher, SandboxLimits(), ())
    await (await Sandbox.start(launcher, template)).destroy()
    launcher.close()
    # They have the numbers that the launcher's had.
    others = [os.memfd_create(str(number)) for number in range(50)]
    launcher.close()
    for other in others:
        os.close(other)
    with pytest.raises(CreationFailed, match="closed"):
        await launcher.start(template)


def test_a_launcher_that_is_closed_twice_closes_nothing_of_others_and_starts_nothing(
    tmp_path: Path,
) -> None:
    require("bwrap")
    asyncio.run(_start_after_closing_twice(tmp_path))


@pytest.mark.parametrize("preload", [(), ("decimal",)], ids=["cloned", "forked"])
def test_starts_that_are_given_up_end_no_other_sandbox(
    tmp_path: Path, preload: tuple[str, ...]
) -> None:
    require("bwrap")
    result = asyncio.run(_run_beside_starts_given_up(tmp_path, preload))
    assert (result.stdout, result.exit_code) == ("here\n", 0)
