"""A start that the host gives up costs that sandbox, and none of the others from its zygote."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("preload", [(), ("decimal",)], ids=["cloned", "forked"])
def test_starts_that_are_given_up_end_no_other_sandbox(
    tmp_path: Path, preload: tuple[str, ...]
) -> None:
    require("bwrap")
    result = asyncio.run(_run_beside_starts_given_up(tmp_path, preload))
    assert (result.stdout, result.exit_code) == ("here\n", 0)
