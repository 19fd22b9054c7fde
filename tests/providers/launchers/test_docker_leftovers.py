"""What of containers outlives its pool or its caller is removed, and nothing else."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from typing import Any

import docker
import pytest

from providers.runtime.launchers.docker_engine import Engine
from providers.runtime.launchers.docker_owner import OWNER_LABEL
from providers.values import SandboxLimits
from tests.support.docker_engine import (
    Containers,
    eventually,
    new_pool_id,
)
from tests.support.processes import ROOT

HOLDER = """
import asyncio, sys
from providers.runtime.launchers.docker import DockerLauncher, DockerSettings
from providers.runtime.pool.requests import make_template
from providers.runtime.pool.sandbox import Sandbox
from providers.values import Job, SandboxLimits

async def main():
    launcher = DockerLauncher(DockerSettings(pool_id=sys.argv[1], runtime=sys.argv[2]))
    await launcher.prepare()
    template = make_template("python", "python", launcher, SandboxLimits())
    starts = [Sandbox.start(launcher, template) for _ in range(2)]
    idle, busy = await asyncio.gather(*starts)
    job = Job("import time; time.sleep(600)", "python", 900)
    run = asyncio.create_task(busy.run(job))
    await asyncio.sleep(0.2)
    print("running", flush=True)
    await run

asyncio.run(main())
"""


def hold(*pool_ids: str, runtime: str) -> list[subprocess.Popen[str]]:
    """A process for each pool, with one container that waits and one that runs."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", HOLDER, pool_id, runtime],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "DJANGO_SETTINGS_MODULE": "tests.settings"},
        )
        for pool_id in pool_ids
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "running\n"
    return processes


@pytest.mark.parametrize("runtime", ["runc", pytest.param("runsc", marks=pytest.mark.slow)])
def test_what_a_killed_pool_left_behind_is_removed_and_nothing_else(
    engine: docker.DockerClient, runtime: str
) -> None:
    pool_id, neighbour_id = new_pool_id(), new_pool_id()
    dead, sibling, neighbour = hold(pool_id, pool_id, neighbour_id, runtime=runtime)
    mine = Containers(runtime, pool_id=pool_id)
    stranger = Containers(runtime, pool_id=neighbour_id)
    try:
        assert len(mine.present()) == 4
        # A container whose process is stopped does not end by itself with its channel.
        frozen = next(one for one in mine.present() if _owner_pid(one) == dead.pid)
        frozen.pause()
        dead.send_signal(signal.SIGKILL)
        dead.wait()
        own = mine.start()
        expected = sorted([os.getpid(), sibling.pid, sibling.pid])
        asyncio.run(eventually(lambda: sorted(map(_owner_pid, _reaped(mine))) == expected, 60))
        assert mine.run_in(own, "print('alive')").stdout == "alive\n"
        mine.loop.call(own.destroy())
        assert len(stranger.present()) == 2
    finally:
        for process in (sibling, neighbour):
            process.kill()
            process.wait()
        for each in (mine, stranger):
            asyncio.run(eventually(lambda each=each: _reaped(each) == [], 60))
            each.close()


def _reaped(containers: Containers) -> list[Any]:
    """What is there after another round: the engine may not be able to end all at once."""
    containers.loop.call(containers.launcher.reap_orphans())
    return containers.present()


def _owner_pid(container: Any) -> int:
    return int(container.labels[OWNER_LABEL].split("/")[1])


def test_a_container_that_came_after_its_caller_had_gone_is_removed(
    under_runc: Containers,
) -> None:
    launcher = under_runc.launcher
    labels = launcher._owner.labels
    recipe = launcher._recipe(
        "cofferdam/python", ["python3", "-c", "input()"], SandboxLimits(), "runc"
    )
    # Until it is there: the launcher looks for orphans at any time.
    name = launcher._reaper.new_name()
    started = Engine().start(name, recipe)
    assert recipe.labels == labels
    assert len(under_runc.present()) == 1
    launcher._reaper.forget(name)
    under_runc.loop.call(launcher.reap_orphans())
    started.stream.close()
    # A busy engine still lists for a moment what it removes.
    asyncio.run(eventually(lambda: under_runc.present() == [], 60))
