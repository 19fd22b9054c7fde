"""What the pool over Docker survives: containers, engines and processes that end or refuse."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from pathlib import Path
from typing import Any

import docker
import pytest

from providers.errors import CreationFailed, ProviderUnavailable, RateLimited, SandboxError
from providers.runtime.launchers.docker import DockerLauncher, DockerSettings
from providers.runtime.pool.pool import Pool, PoolSettings
from providers.runtime.pool.requests import make_template
from providers.values import SANDBOX_ENDED, ExecutionResult, Job, SandboxLimits
from tests.support.docker_engine import (
    SMALL_IMAGE,
    Containers,
    EngineProxy,
    PrivateEngine,
    eventually,
    new_pool_id,
    refusal,
)

SMALL = {"python": SMALL_IMAGE}


async def open_pool(launcher: DockerLauncher, **settings: Any) -> Pool:
    await launcher.prepare()
    template = make_template("python", "python", launcher, SandboxLimits())
    pool = Pool(launcher, {"python": template}, PoolSettings(**settings))
    pool.open()
    return pool


async def run_once(pool: Pool, code: str, timeout: float = 10) -> str:
    """What the code prints, in a sandbox of the pool that is released afterwards."""
    sandbox = await pool.acquire("python")
    try:
        result = await sandbox.run(Job(code, "python", timeout))
        return result.stdout
    finally:
        await pool.release(sandbox)


@pytest.mark.parametrize(
    "containers", ["runc", pytest.param("runsc", marks=pytest.mark.slow)], indirect=True
)
def test_a_container_killed_during_a_run_is_a_failure_of_the_run(containers: Containers) -> None:
    sandbox = containers.start()
    (container,) = containers.present()

    async def kill_it_while_it_runs() -> ExecutionResult:
        # Nobody waits for what is dead: as long as it would have run, it would be timed out.
        job = Job("import time; time.sleep(60)", "python", 30)
        run = asyncio.create_task(sandbox.run(job))
        await asyncio.sleep(0.2)
        await asyncio.to_thread(container.kill)
        return await run

    result = containers.loop.call(kill_it_while_it_runs())
    assert (result.exit_code, result.timed_out, result.out_of_memory) == (137, False, False)
    assert result.metadata[SANDBOX_ENDED] == "The engine saw it end with exit code 137"
    containers.loop.call(sandbox.destroy())
    assert containers.present() == []


def test_a_container_killed_while_it_waits_is_replaced(engine: docker.DockerClient) -> None:
    async def scenario() -> None:
        launcher = DockerLauncher(DockerSettings(pool_id=new_pool_id(), runtime="runc"))
        pool = await open_pool(launcher, size=1)
        await eventually(lambda: pool.stats()["idle"] == 1, 60)
        (name,) = launcher._reaper.known
        await asyncio.to_thread(engine.containers.get(name).kill)
        await eventually(lambda: pool.stats()["idle"] == 0, 60)
        assert await run_once(pool, "print('served')") == "served\n"
        await pool.close()
        launcher.close()

    asyncio.run(scenario())


def test_nothing_of_docker_is_asked_on_the_way_of_a_run(proxy: EngineProxy) -> None:
    async def scenario() -> None:
        launcher = DockerLauncher(
            DockerSettings(base_url=proxy.url, pool_id=new_pool_id(), runtime="runc")
        )
        # As many as there may be, so that no refill is under way at the same time.
        pool = await open_pool(launcher, size=2, capacity=2)
        await eventually(lambda: pool.stats()["idle"] == 2, 60)
        before = proxy.requests
        sandbox = await pool.acquire("python")
        job = Job("print(6 * 7)", "python", 10)
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
        pool = await open_pool(launcher, size=1, patience=60)
        await eventually(lambda: pool.stats()["idle"] == 1, 60)
        proxy.on_create = lambda: refusal("500 Internal Server Error", "no space left on device")
        already = proxy.created
        assert await run_once(pool, "print('warm')") == "warm\n"
        # Whose patience is at an end is told otherwise.
        with pytest.raises(CreationFailed) as caught:
            await pool.acquire("python")
        assert "no space left on device" in caught.value.message
        assert (caught.value.code, caught.value.may_retry) == ("SB004", True)
        # Asked again ever more rarely, not in a loop.
        assert proxy.created - already < 15
        proxy.on_create = lambda: None
        await eventually(lambda: pool.stats()["idle"] == 1, 60)
        assert await run_once(pool, "print('forgiven')") == "forgiven\n"
        await pool.close()
        launcher.close()

    asyncio.run(scenario())


def test_a_slow_engine_makes_callers_wait_no_longer_than_they_want(proxy: EngineProxy) -> None:
    is_quick = threading.Event()

    def be_slow() -> None:
        assert is_quick.wait(120)

    async def scenario() -> None:
        launcher = DockerLauncher(
            DockerSettings(base_url=proxy.url, pool_id=new_pool_id(), runtime="runc")
        )
        pool = await open_pool(launcher, size=1, patience=0.5)
        await eventually(lambda: pool.stats()["idle"] == 1, 60)
        proxy.on_create = be_slow
        assert await run_once(pool, "print('warm')") == "warm\n"
        began = time.monotonic()
        with pytest.raises(RateLimited) as caught:
            await pool.acquire("python")
        assert time.monotonic() - began > 0.4
        assert caught.value.retry_after
        is_quick.set()
        await eventually(lambda: pool.stats()["idle"] == 1, 60)
        assert await run_once(pool, "print('again')") == "again\n"
        await pool.close()
        launcher.close()

    asyncio.run(scenario())


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
    private_engine.register({"runsc": {"path": "/bin/false"}})
    try:
        with pytest.raises(ProviderUnavailable, match="runsc does not work"):
            Containers(base_url=private_engine.url, images=SMALL, require_gvisor=True)
        fallen_back = Containers(base_url=private_engine.url, images=SMALL)
        assert fallen_back.launcher.runtime == "runc"
        fallen_back.close()
    finally:
        private_engine.register({})


def test_an_engine_that_stops_and_starts_is_used_again(private_engine: PrivateEngine) -> None:
    async def scenario() -> None:
        launcher = DockerLauncher(
            DockerSettings(base_url=private_engine.url, images=SMALL, pool_id=new_pool_id())
        )
        pool = await open_pool(launcher, size=2, patience=5)
        await eventually(lambda: pool.stats()["idle"] == 2, 60)
        sandbox = await pool.acquire("python")
        job = Job("import time; time.sleep(60)", "python", 90)
        running = asyncio.create_task(sandbox.run(job))
        await asyncio.sleep(0.3)

        await asyncio.to_thread(private_engine.stop)
        # An engine that ends tells how its containers ended, or cannot be asked any more.
        with contextlib.suppress(ProviderUnavailable):
            assert (await running).metadata[SANDBOX_ENDED]
        await pool.release(sandbox)
        await eventually(lambda: pool.stats()["idle"] == 0, 60)
        with pytest.raises(SandboxError) as refused:
            await asyncio.wait_for(pool.acquire("python"), 60)
        assert refused.value.code in ("SB004", "SB008", "SB009")

        await asyncio.to_thread(private_engine.start)
        await eventually(lambda: pool.stats()["idle"] == 2, 60)
        assert await run_once(pool, "print('back')") == "back\n"
        await launcher.reap_orphans()
        await pool.close()
        await launcher.reap_orphans()
        with private_engine.client() as client:
            assert client.containers.list(all=True) == []
        launcher.close()

    asyncio.run(scenario())
