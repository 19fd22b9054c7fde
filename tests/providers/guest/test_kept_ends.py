"""What is said to a kept sandbox that has just ended is said to nobody, and ends nothing else."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from providers.errors import KeptSandboxLost
from providers.runtime.guest.protocol import CHUNK_BYTES, CREDIT
from providers.runtime.pool.kept import Kept
from providers.runtime.pool.protocol import GuestChannel
from providers.runtime.pool.state_store import SandboxRecord, StateStore, boot, now
from providers.runtime.service import registry as keeping_module
from providers.runtime.service.registry import DurableSandboxes, SandboxRegistry, Session
from providers.values import Job
from tests.providers.guest.kept_puppet import Answers, Puppet, play
from tests.support.impostor_pools import until
from tests.support.puppets import PuppetGuest


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """What guests ended of is still being asked for until this is set."""
    event = asyncio.Event()

    async def ask() -> None:
        await event.wait()

    async def opened(guest: PuppetGuest) -> GuestChannel:
        return await GuestChannel.open(guest._channel, before_end=ask)

    monkeypatch.setattr(PuppetGuest, "open", opened)
    return event


async def end(kept: Kept, puppet: Puppet) -> None:
    """Up to where its end is there and nobody has been told."""
    puppet.leave()
    await until(lambda: kept.sandbox._channel.ending)


def test_a_lease_is_told_to_nobody(known: asyncio.Event) -> None:
    async def script(kept: Kept, puppet: Puppet) -> None:
        await end(kept, puppet)
        assert kept.alive
        kept.lives_for(60)
        known.set()

    play(script)


def test_a_call_of_a_tool_is_answered_for_nobody(known: asyncio.Event) -> None:
    async def script(kept: Kept, puppet: Puppet) -> Any:
        job = Job("1", timeout=60, run="named", tools=["tool"])
        run = asyncio.create_task(kept.run(job, lambda _: None))
        await puppet.hear("run")
        await end(kept, puppet)
        assert kept.answer("named", 1, b"1")
        assert await kept.interrupt("default", "named")
        known.set()
        return await run

    assert play(script).exit_code == 137


def test_whoever_reads_a_file_is_told_that_the_sandbox_is_gone(known: asyncio.Event) -> None:
    pieces = CREDIT // 2 // CHUNK_BYTES + 1

    async def script(kept: Kept, puppet: Puppet) -> None:
        events = kept.stream("file.read", {"path": "x"})
        first = asyncio.ensure_future(anext(events))
        answers = Answers(puppet, await puppet.hear("file.read"))
        for _ in range(pieces):
            await answers.say("data", data=b"x" * (CHUNK_BYTES - 1))
        await first
        await end(kept, puppet)
        # With one of these it would be said that there is room for more.
        for _ in range(pieces - 1):
            await anext(events)
        known.set()
        with pytest.raises(KeptSandboxLost, match="ended by itself"):
            await anext(events)

    play(script)


def test_whoever_writes_a_file_is_told_that_the_sandbox_is_gone(known: asyncio.Event) -> None:
    async def script(kept: Kept, puppet: Puppet) -> None:
        async def content() -> AsyncIterator[bytes]:
            await puppet.hear("file.write")
            await end(kept, puppet)
            yield b"a piece"
            known.set()

        with pytest.raises(KeptSandboxLost, match="ended by itself"):
            await kept.write("file.write", {"path": "x"}, content())

    play(script)


class StillKept:
    """One of which only its lease is told, or cannot be."""

    busy = False

    def __init__(self, *, is_broken: bool = False) -> None:
        self.alive = not is_broken
        self.sandbox = SimpleNamespace(closed=asyncio.get_running_loop().create_future())
        self.told: list[float] = []

    def lives_for(self, seconds: float) -> None:
        if not self.alive:
            raise RuntimeError("there is nobody")
        self.told.append(seconds)


def remembered(seconds: float, container: str = "0" * 12) -> SandboxRecord:
    return SandboxRecord(
        container, container, "alice", "python", "python", "runc", {}, "", "", {}, 1, boot(),
        now(), now() + seconds, seconds,
    )  # fmt: skip


def test_one_that_cannot_be_told_of_its_lease_keeps_it_from_no_other() -> None:
    """Nor a service that ends from leaving the others to the next."""

    async def scenario() -> None:
        outliving = DurableSandboxes(None)
        broken, fine = StillKept(is_broken=True), StillKept()
        sessions = [
            Session(name, "alice", cast(Any, kept), None, time.monotonic() + 600)
            for name, kept in (("broken", broken), ("fine", fine))
        ]
        for session in sessions:
            outliving.go_on(session, remembered(60))
        outliving.look()
        assert len(fine.told) == 1
        assert outliving.leave() == sessions[1:]

    asyncio.run(scenario())


class Keeper:
    """Ends instances, of which the first do not let it."""

    def __init__(self, failures: int) -> None:
        self.ended: list[Any] = []
        self._failures = failures

    def take_over(self, line: Any, kept: Any, owner: str) -> Any:
        return kept

    def leave_end(self, instance: Any) -> None:
        """Nothing else ends them."""

    def end(self, instance: Any) -> None:
        self.ended.append(instance)
        if len(self.ended) <= self._failures:
            raise RuntimeError("it does not end")


@pytest.mark.parametrize(("failures", "in_the_way"), [(1, False), (0, True)])
def test_one_that_cannot_be_ended_or_forgotten_keeps_no_other_from_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failures: int, in_the_way: bool
) -> None:
    monkeypatch.setattr(keeping_module, "REAP_SECONDS", 0.01)
    memory = StateStore(tmp_path, "pool")

    async def scenario() -> None:
        manager = Keeper(failures)
        keeping = SandboxRegistry(cast(Any, manager), memory)
        for number in range(2):
            over = remembered(-1, f"{number:012}")
            keeping._go_on(cast(Any, None), cast(Any, StillKept()), over)
            if in_the_way:
                # No file, so that it cannot be removed like one.
                memory._path(over.container).mkdir(parents=True)
        reaping = asyncio.create_task(keeping.reap())
        try:
            await until(lambda: len(manager.ended) == 2, 60)
            assert not reaping.done()
        finally:
            reaping.cancel()

    asyncio.run(scenario())
