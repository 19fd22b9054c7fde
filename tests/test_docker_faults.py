"""What the pool over Docker survives: containers, engines and processes that end or refuse."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import docker
import pytest

from providers.base import SANDBOX_ENDED, ExecutionResult, Limits
from providers.errors import CreationFailed, ProviderUnavailable, RateLimited, SandboxError
from providers.pool.launchers.docker import DockerLauncher, DockerSettings
from providers.pool.launchers.docker_engine import Engine
from providers.pool.launchers.docker_owner import OWNER_LABEL
from providers.pool.pool import Pool, PoolSettings
from providers.pool.requests import Job, make_template, run_request
from tests.docker_engine import (
    SMALL_IMAGE,
    Containers,
    EngineProxy,
    PrivateEngine,
    eventually,
    new_pool_id,
    refusal,
)
from tests.processes import ROOT

SMALL = {"python": SMALL_IMAGE}


async def open_pool(launcher: DockerLauncher, **settings: Any) -> Pool:
    await launcher.prepare()
    template = make_template("python", "python", launcher, Limits())
    pool = Pool(launcher, {"python": template}, PoolSettings(**settings))
    pool.open()
    return pool


async def run_once(pool: Pool, code: str, timeout: float = 10) -> str:
    """What the code prints, in a sandbox of the pool that is released afterwards."""
    sandbox = await pool.acquire("python")
    try:
        result = await sandbox.run(run_request(Job(code, "python", timeout), sandbox.template))
        return result.stdout
    finally:
        await pool.release(sandbox)


def test_a_container_killed_during_a_run_is_a_failure_of_the_run(containers: Containers) -> None:
    sandbox = containers.start()
    (container,) = containers.present()

    async def kill_it_while_it_runs() -> ExecutionResult:
        job = run_request(Job("import time; time.sleep(30)", "python", 60), sandbox.template)
        run = asyncio.create_task(sandbox.run(job))
        await asyncio.sleep(0.5)
        await asyncio.to_thread(container.kill)
        return await run

    began = time.monotonic()
    result = containers.loop.call(kill_it_while_it_runs())
    assert time.monotonic() - began < 8
    assert (result.exit_code, result.timed_out, result.out_of_memory) == (137, False, False)
    assert result.metadata[SANDBOX_ENDED] == "The engine saw it end with exit code 137"
    containers.loop.call(sandbox.destroy())
    assert containers.present() == []


def test_a_container_killed_while_it_waits_is_replaced(engine: docker.DockerClient) -> None:
    async def scenario() -> None:
        launcher = DockerLauncher(DockerSettings(pool_id=new_pool_id(), runtime="runc"))
        pool = await open_pool(launcher, size=1)
        await eventually(lambda: pool.stats()["idle"] == 1, 20)
        (name,) = launcher._known
        await asyncio.to_thread(engine.containers.get(name).kill)
        await eventually(lambda: pool.stats()["idle"] == 0, 10)
        assert await run_once(pool, "print('served')") == "served\n"
        await pool.close()
        launcher.close()

    asyncio.run(scenario())


def test_nothing_of_docker_is_asked_on_the_way_of_a_run(proxy: EngineProxy) -> None:
    async def scenario() -> None:
        launcher = DockerLauncher(DockerSettings(base_url=proxy.url, pool_id=new_pool_id()))
        # As many as there may be, so that no refill is under way at the same time.
        pool = await open_pool(launcher, size=2, capacity=2)
        await eventually(lambda: pool.stats()["idle"] == 2, 30)
        before = proxy.requests
        sandbox = await pool.acquire("python")
        job = run_request(Job("print(6 * 7)", "python", 10), sandbox.template)
        # Should anything ask the engine, it would wait for ever.
        proxy.on_create = lambda: time.sleep(60)
        result = await sandbox.run(job)
        assert (result.stdout, proxy.requests) == ("42\n", before)
        assert result.metadata["image_digest"].startswith("sha256:")
        proxy.on_create = lambda: None
        await pool.release(sandbox)
        await pool.close()
        launcher.close()

    asyncio.run(scenario())


def test_an_engine_that_refuses_is_sb004_and_forgiven_later(proxy: EngineProxy) -> None:
    async def scenario() -> None:
        launcher = DockerLauncher(
            DockerSettings(base_url=proxy.url, pool_id=new_pool_id(), runtime="runc")
        )
        pool = await open_pool(launcher, size=1, patience=10)
        await eventually(lambda: pool.stats()["idle"] == 1, 20)
        proxy.on_create = lambda: refusal("500 Internal Server Error", "no space left on device")
        already = proxy.created
        assert await run_once(pool, "print('warm')") == "warm\n"
        began = time.monotonic()
        with pytest.raises(CreationFailed) as caught:
            await pool.acquire("python")
        assert time.monotonic() - began < 5
        assert "no space left on device" in caught.value.message
        assert (caught.value.code, caught.value.may_retry) == ("SB004", True)
        await asyncio.sleep(1.5)
        # Asked again ever more rarely, not in a loop.
        assert proxy.created - already < 15
        proxy.on_create = lambda: None
        await eventually(lambda: pool.stats()["idle"] == 1, 15)
        assert await run_once(pool, "print('forgiven')") == "forgiven\n"
        await pool.close()
        launcher.close()

    asyncio.run(scenario())


def test_a_slow_engine_makes_callers_wait_no_longer_than_they_want(proxy: EngineProxy) -> None:
    async def scenario() -> None:
        launcher = DockerLauncher(
            DockerSettings(base_url=proxy.url, pool_id=new_pool_id(), runtime="runc")
        )
        pool = await open_pool(launcher, size=1, patience=1)
        await eventually(lambda: pool.stats()["idle"] == 1, 20)
        proxy.on_create = lambda: time.sleep(4)
        assert await run_once(pool, "print('warm')") == "warm\n"
        began = time.monotonic()
        with pytest.raises(RateLimited) as caught:
            await pool.acquire("python")
        assert 0.9 < time.monotonic() - began < 2
        assert caught.value.retry_after
        proxy.on_create = lambda: None
        await eventually(lambda: pool.stats()["idle"] == 1, 20)
        assert await run_once(pool, "print('again')") == "again\n"
        await pool.close()
        launcher.close()

    asyncio.run(scenario())


def test_a_memory_bomb_next_door_does_not_disturb(containers: Containers) -> None:
    bomb, neighbour = containers.start(), containers.start()

    async def side_by_side() -> tuple[Any, Any]:
        code = "held = []\nwhile True: held.append(bytearray(1 << 20))"
        jobs = [
            sandbox.run(run_request(Job(text, "python", 20), sandbox.template))
            for sandbox, text in ((bomb, code), (neighbour, "print('undisturbed')"))
        ]
        first, second = await asyncio.gather(*jobs)
        return first, second

    exploded, undisturbed = containers.loop.call(side_by_side())
    assert (exploded.out_of_memory, exploded.exit_code) == (True, None)
    assert (undisturbed.stdout, undisturbed.out_of_memory) == ("undisturbed\n", False)
    for sandbox in (bomb, neighbour):
        containers.loop.call(sandbox.destroy())


NUISANCES = {
    "a fork bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "a full disk": """
while True:
    try:
        with open("filler", "wb") as file:
            while True: file.write(bytes(1 << 20))
    except OSError: pass
""",
    "a flood of output": "while True: print('x' * 10_000)",
}


@pytest.mark.parametrize("code", NUISANCES.values(), ids=NUISANCES)
def test_a_nuisance_leaves_the_others_their_latency(containers: Containers, code: str) -> None:
    nuisance = containers.start()
    others = [containers.start() for _ in range(6)]
    times: list[float] = []

    async def side_by_side() -> Any:
        job = run_request(Job(code, "python", 4), nuisance.template)
        going_on = asyncio.create_task(nuisance.run(job))
        await asyncio.sleep(0.5)
        for sandbox in others:
            began = time.monotonic()
            small = run_request(Job("print(1)", "python", 10), sandbox.template)
            assert (await sandbox.run(small)).stdout == "1\n"
            times.append(time.monotonic() - began)
        (ended,) = await asyncio.gather(going_on, return_exceptions=True)
        return ended

    try:
        ended = containers.loop.call(side_by_side())
    finally:
        for sandbox in (nuisance, *others):
            containers.loop.call(sandbox.destroy())
    # What fills the memory is ended for that, what only makes noise when its time is over.
    assert ended.timed_out or ended.out_of_memory
    # One CPU is the most the nuisance has of this machine.
    assert statistics.median(times) < 0.25
    assert containers.present() == []


HOLDER = """
import asyncio, sys
from providers.pool.launchers.docker import DockerLauncher, DockerSettings
from providers.pool.requests import Job, make_template, run_request
from providers.pool.sandbox import Sandbox
from providers.base import Limits

async def main():
    launcher = DockerLauncher(DockerSettings(pool_id=sys.argv[1], runtime=sys.argv[2]))
    await launcher.prepare()
    template = make_template("python", "python", launcher, Limits())
    idle, busy = [await Sandbox.start(launcher, template) for _ in range(2)]
    job = run_request(Job("import time; time.sleep(600)", "python", 900), template)
    run = asyncio.create_task(busy.run(job))
    await asyncio.sleep(0.2)
    print("running", flush=True)
    await run

asyncio.run(main())
"""


def hold(pool_id: str, runtime: str) -> subprocess.Popen[str]:
    """Another process of the same pool, with one container that waits and one that runs."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, pool_id, runtime],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "DJANGO_SETTINGS_MODULE": "tests.settings"},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "running\n"
    return process


def test_what_a_killed_pool_left_behind_is_removed_and_nothing_else(
    containers: Containers,
) -> None:
    runtime = containers.settings.runtime
    pool_id, neighbour_id = new_pool_id(), new_pool_id()
    dead, neighbour = hold(pool_id, runtime), hold(neighbour_id, runtime)
    sibling = hold(pool_id, runtime)
    mine = Containers(runtime, pool_id=pool_id)
    try:
        assert len(mine.present()) == 4
        # A container whose process is stopped does not end by itself with its channel.
        frozen = next(one for one in mine.present() if _owner_pid(one) == dead.pid)
        frozen.pause()
        dead.send_signal(signal.SIGKILL)
        dead.wait()
        own = mine.start()
        expected = sorted([os.getpid(), sibling.pid, sibling.pid])
        asyncio.run(eventually(lambda: sorted(map(_owner_pid, _reaped(mine))) == expected, 20))
        assert mine.run_in(own, "print('alive')").stdout == "alive\n"
        mine.loop.call(own.destroy())
        stranger = Containers(runtime, pool_id=neighbour_id)
        assert len(stranger.present()) == 2
        stranger.close()
    finally:
        for process in (sibling, neighbour):
            process.kill()
            process.wait()
        for each in (mine, Containers(runtime, pool_id=neighbour_id)):
            asyncio.run(eventually(lambda each=each: _reaped(each) == [], 20))
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
    recipe = launcher._recipe("cofferdam/python", ["python3", "-c", "input()"], Limits(), "runc")
    started = Engine().start(f"late-{new_pool_id()}", recipe)
    assert recipe.labels == labels
    assert len(under_runc.present()) == 1
    under_runc.loop.call(launcher.reap_orphans())
    started.stream.close()
    assert under_runc.present() == []


def test_an_engine_that_does_not_answer_is_sb009(tmp_path: Path) -> None:
    launcher = DockerLauncher(DockerSettings(base_url=f"unix://{tmp_path}/nobody"))
    with pytest.raises(ProviderUnavailable, match="Start the Docker engine") as caught:
        asyncio.run(launcher.prepare())
    assert caught.value.code == "SB009"
    launcher.close()


def test_missing_images_name_the_command_that_builds_them(engine: docker.DockerClient) -> None:
    launcher = DockerLauncher(DockerSettings(images={"python": "cofferdam/no-such-image"}))
    with pytest.raises(ProviderUnavailable, match=r"manage\.py build_images"):
        asyncio.run(launcher.prepare())
    launcher.close()


def test_gvisor_is_taken_where_the_engine_has_it(engine: docker.DockerClient) -> None:
    containers = Containers("auto", require_gvisor=True)
    try:
        assert containers.launcher.runtime == "gvisor"
        assert containers.run("print(1)").metadata["runtime"] == "gvisor"
    finally:
        containers.close()


def test_a_runtime_is_what_runs_and_not_what_it_is_called(engine: docker.DockerClient) -> None:
    with pytest.raises(ProviderUnavailable, match="gVisor is required"):
        Containers("runc", require_gvisor=True)


def test_an_engine_without_gvisor_is_refused_or_recorded_as_what_it_is(
    private_engine: PrivateEngine,
) -> None:
    with pytest.raises(ProviderUnavailable, match=r"no runtime runsc.*Install gVisor") as caught:
        Containers(base_url=private_engine.url, images=SMALL, require_gvisor=True)
    assert caught.value.code == "SB009"
    with pytest.raises(ProviderUnavailable, match="no runtime runsc"):
        Containers("runsc", base_url=private_engine.url, images=SMALL)
    plain = Containers(base_url=private_engine.url, images=SMALL)
    result = plain.run("print('served')")
    assert (result.stdout, result.metadata["runtime"]) == ("served\n", "runc")
    assert plain.launcher.languages() == ["python", "bash"]
    plain.close()

    # Registered, and not working.
    private_engine.stop()
    broken = '{"runtimes": {"runsc": {"path": "/bin/false"}}}'
    (private_engine.folder / "daemon.json").write_text(broken)
    private_engine.start()
    with pytest.raises(ProviderUnavailable, match="runsc does not work"):
        Containers(base_url=private_engine.url, images=SMALL, require_gvisor=True)
    fallen_back = Containers(base_url=private_engine.url, images=SMALL)
    assert fallen_back.launcher.runtime == "runc"
    fallen_back.close()


def test_an_engine_that_stops_and_starts_is_used_again(private_engine: PrivateEngine) -> None:
    async def scenario() -> None:
        launcher = DockerLauncher(
            DockerSettings(base_url=private_engine.url, images=SMALL, pool_id=new_pool_id())
        )
        pool = await open_pool(launcher, size=2, patience=5)
        await eventually(lambda: pool.stats()["idle"] == 2, 20)
        sandbox = await pool.acquire("python")
        job = run_request(Job("import time; time.sleep(60)", "python", 90), sandbox.template)
        running = asyncio.create_task(sandbox.run(job))
        await asyncio.sleep(0.3)

        await asyncio.to_thread(private_engine.stop)
        # An engine that ends tells how its containers ended, or cannot be asked any more.
        with contextlib.suppress(ProviderUnavailable):
            assert (await running).metadata[SANDBOX_ENDED]
        await pool.release(sandbox)
        await eventually(lambda: pool.stats()["idle"] == 0, 10)
        began = time.monotonic()
        with pytest.raises(SandboxError) as refused:
            await pool.acquire("python")
        assert refused.value.code in ("SB004", "SB008", "SB009")
        assert time.monotonic() - began < 7

        await asyncio.to_thread(private_engine.start)
        await eventually(lambda: pool.stats()["idle"] == 2, 30)
        assert await run_once(pool, "print('back')") == "back\n"
        await launcher.reap_orphans()
        await pool.close()
        await launcher.reap_orphans()
        with private_engine.client() as client:
            assert client.containers.list(all=True) == []
        launcher.close()

    asyncio.run(scenario())
