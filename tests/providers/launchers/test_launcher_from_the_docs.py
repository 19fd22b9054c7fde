"""The launcher that docs/internals/sandboxes.md shows is one."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from providers.errors import ProviderUnavailable
from providers.isolation import NONE, of_runtime
from providers.runtime.pool.launcher import Launcher
from providers.runtime.pool.pool import Pool, PoolSettings
from providers.runtime.pool.requests import make_template
from providers.values import Job, SandboxLimits
from tests.conftest import require
from tests.support.processes import ROOT

PAGE = ROOT / "docs" / "internals" / "sandboxes.md"


@pytest.fixture
def launcher() -> Iterator[Launcher]:
    # Not below /tmp, over which each sandbox has its own.
    folder = Path(tempfile.mkdtemp(prefix="cofferdam-test-", dir="/var/tmp"))
    (folder / "run").mkdir()
    yield shown_launcher(folder)
    shutil.rmtree(folder)


def shown_launcher(folder: Path) -> Launcher:
    text = PAGE.read_text().split("## A launcher of one's own")[1]
    block = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert block
    shown: dict[str, Any] = {"__name__": "shown"}
    exec(block[1], shown)
    made: Launcher = shown["UnshareLauncher"](folder)
    return made


@pytest.mark.skipif(os.geteuid() != 0, reason="the example makes namespaces without those of users")
def test_it_runs_code_in_a_pool(launcher: Launcher) -> None:
    require("unshare")
    code = "import os\nprint(os.getppid(), len(os.listdir('/sys/class/net')))"

    async def scenario() -> tuple[str, str]:
        await launcher.prepare()
        limits = SandboxLimits()
        templates = {"python": make_template("python", "python", launcher, limits, ())}
        pool = Pool(launcher, templates, PoolSettings(size=1, capacity=1))
        pool.open()
        try:
            sandbox = await pool.acquire("python", "alice")
            result = await sandbox.run(Job(code, timeout=60))
            await pool.release(sandbox)
            return result.stdout, result.stderr
        finally:
            await pool.close()
            launcher.close()

    stdout, stderr = asyncio.run(scenario())
    assert (stdout.split()[0], stderr) == ("1", "")
    assert of_runtime("unshare") == NONE


def test_what_it_does_not_have_says_so(launcher: Launcher) -> None:
    with pytest.raises(ProviderUnavailable, match="tenant-kernel is not available"):
        launcher.for_owner("alice")
    with pytest.raises(ProviderUnavailable, match="none of unshare"):
        asyncio.run(launcher.adopt("name", "unshare", {}, b""))
    assert launcher.counts == {}
