"""When the process that owns the pool dies, everything in its sandboxes dies with it."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.conftest import require
from tests.support.cgroups import groups_named
from tests.support.sandboxes import LocalProcess, family, wait_until_gone
from tests.support.waiting import wait_until

DAEMON = """
    import os, time
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(1000)
    time.sleep(1000)
"""


@pytest.mark.parametrize(
    ("launcher", "tool", "how"),
    [
        ("bubblewrap", "bwrap", signal.SIGKILL),
        ("bubblewrap", "bwrap", signal.SIGTERM),
        ("bubblewrap", "bwrap", signal.SIGINT),
        # What gVisor does when its owner goes does not depend on how that was told to.
        ("gvisor", "runsc", signal.SIGKILL),
    ],
)
def test_nothing_survives_the_owner_of_the_pool(
    tmp_path: Path, launcher: str, tool: str, how: signal.Signals
) -> None:
    require(tool)
    owner = LocalProcess(tmp_path, launcher=launcher, gvisor_platform="ptrace", pool_size=2)
    owner.start(DAEMON, timeout=60)
    wait_until(lambda: len(family(owner.process.pid)) > 3, seconds=60)
    running = family(owner.process.pid)
    owner.process.send_signal(how)
    owner.process.wait()
    wait_until_gone(running)


@pytest.mark.parametrize(("launcher", "tool"), [("bubblewrap", "bwrap"), ("gvisor", "runsc")])
def test_what_a_killed_owner_has_left_is_removed_by_the_next(
    tmp_path: Path, launcher: str, tool: str
) -> None:
    require(tool)
    config = {"launcher": launcher, "gvisor_platform": "ptrace", "pool_size": 1}
    owner = LocalProcess(tmp_path, **config)
    owner.start("import time\ntime.sleep(100)", timeout=60)
    pid = owner.process.pid
    owner.process.kill()
    owner.process.wait()
    left = groups_named(f"cofferdam-{pid}-*")
    left += (tmp_path / "run").glob(f"{launcher}-*")
    with LocalProcess(tmp_path, **config) as following:
        assert following.run("print(1)")["stdout"] == "1\n"
    wait_until(lambda: not any(path.exists() for path in left), seconds=60)
