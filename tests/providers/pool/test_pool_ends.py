"""However a sandbox or the whole pool ends, who waits for it is told, and nothing is left of it."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from providers.errors import CreationFailed, SandboxError
from providers.runtime.launchers.oci import GvisorGuest, GvisorLauncher
from providers.runtime.launchers.unisolated import UnisolatedLauncher, _UnisolatedGuest
from providers.runtime.pool.launcher import Launcher, ProcessGuest
from providers.runtime.pool.sandbox import Sandbox
from providers.runtime.pool.template import Template
from providers.values import SANDBOX_ENDED
from tests.conftest import require
from tests.support.impostor_pools import REQUEST, guests, idle, pool_over, until, use
from tests.support.impostors import Impostor


def test_closing_ends_busy_and_warm_sandboxes_and_tells_who_waits() -> None:
    async def scenario() -> None:
        async with pool_over(Impostor(), size=1, capacity=1) as pool:
            held = await pool.acquire("python")
            waiting = asyncio.create_task(pool.acquire("python"))
            await until(lambda: pool.stats()["waiting"] == 1)
            await pool.close()
            assert not held.alive
            with pytest.raises(CreationFailed, match="shutting down"):
                await waiting
            began = time.monotonic()
            with pytest.raises(SandboxError, match="shutting down"):
                await pool.acquire("python")
            assert time.monotonic() - began < 20

    asyncio.run(scenario())


def test_closing_does_not_wait_for_a_guest_that_does_not_get_ready() -> None:
    async def scenario() -> float:
        async with pool_over(Impostor("time.sleep(1000)")) as pool:
            await until(lambda: bool(guests()))
            began = time.monotonic()
            await pool.close()
            return time.monotonic() - began

    assert asyncio.run(scenario()) < 20


def test_a_release_may_be_asked_for_twice_and_at_the_same_time() -> None:
    async def scenario() -> None:
        async with pool_over(Impostor(), size=1) as pool:
            sandbox = await pool.acquire("python")
            await asyncio.gather(*(pool.release(sandbox) for _ in range(3)))
            await pool.release(sandbox)
            assert pool.stats()["busy"] == 0
            await use(pool)

    asyncio.run(scenario())


def test_destroying_a_sandbox_ends_the_run_in_it() -> None:
    async def scenario() -> None:
        async with pool_over(Impostor("say(READY)\nlisten()\ntime.sleep(1000)")) as pool:
            sandbox = await pool.acquire("python")
            running = asyncio.create_task(sandbox.run(REQUEST))
            await asyncio.sleep(0.1)
            began = time.monotonic()
            await pool.release(sandbox)
            with pytest.raises(SandboxError) as caught:
                await running
            assert caught.value.started
            assert time.monotonic() - began < 20

    asyncio.run(scenario())


def test_a_sandbox_that_ends_during_a_run_is_told_at_once() -> None:
    async def scenario() -> None:
        async with pool_over(Impostor("say(READY)\nlisten()\ntime.sleep(1000)"), size=1) as pool:
            await until(idle(pool, 1))
            (pid,) = guests()
            sandbox = await pool.acquire("python")
            running = asyncio.create_task(sandbox.run(REQUEST))
            await asyncio.sleep(0.1)
            began = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            result = await running
            assert result.metadata[SANDBOX_ENDED].endswith("ended with signal 9")
            assert time.monotonic() - began < 20

    asyncio.run(scenario())


def test_no_descriptor_is_left_of_a_sandbox() -> None:
    def descriptors() -> int:
        return len(list(Path(f"/proc/{os.getpid()}/fd").iterdir()))

    async def scenario() -> None:
        before = descriptors()
        async with pool_over(Impostor(), size=1) as pool:
            for _ in range(20):
                await use(pool)
        async with pool_over(Impostor("say(READY[:3]); sys.exit()")) as pool:
            for _ in range(3):
                with pytest.raises(CreationFailed):
                    await pool.acquire("python")
        # One for each would be 23. Other tests of this process have pools that come and go.
        assert descriptors() - before < 15

    asyncio.run(scenario())


async def give_up_ending(sandbox: Sandbox) -> None:
    """End it as a caller does who leaves in the middle of that."""
    ending = asyncio.create_task(sandbox.destroy())
    await asyncio.sleep(0)
    ending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await ending


def test_an_end_that_a_caller_gives_up_is_waited_for_by_the_next() -> None:
    """The pool does, and has no place for another sandbox until then."""

    async def scenario() -> None:
        sandbox = await Sandbox.start(Impostor(), Template("python", "python"))
        await give_up_ending(sandbox)
        await asyncio.wait_for(sandbox.destroy(), 60)
        assert not guests()

    asyncio.run(scenario())


def test_an_end_that_fails_is_told_to_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        guest = await Impostor().start(Template("python", "python"))
        assert isinstance(guest, ProcessGuest)
        end = guest._end

        async def fail() -> None:
            await end()
            raise OSError("it is still there")

        monkeypatch.setattr(guest, "_end", fail)
        for _ in range(2):
            with pytest.raises(OSError, match="still there"):
                await asyncio.wait_for(guest.destroy(), 60)

    asyncio.run(scenario())


@pytest.mark.parametrize("kind", ["gvisor", "unisolated"])
def test_no_folder_is_left_of_a_sandbox_whose_end_a_caller_gives_up(
    tmp_path: Path, kind: str
) -> None:
    if kind == "gvisor":
        require("runsc")

    async def scenario() -> None:
        launcher: Launcher = (
            GvisorLauncher(tmp_path, "ptrace") if kind == "gvisor" else UnisolatedLauncher(tmp_path)
        )
        await launcher.prepare()
        try:
            sandbox = await Sandbox.start(launcher, Template("python", "python"))
            guest = sandbox.guest
            assert isinstance(guest, GvisorGuest | _UnisolatedGuest)
            folder = guest._state if isinstance(guest, GvisorGuest) else Path(guest._workspace)
            assert folder.exists()
            await give_up_ending(sandbox)
            await until(lambda: not folder.exists(), 60)
            await sandbox.destroy()
        finally:
            launcher.close()

    asyncio.run(scenario())
