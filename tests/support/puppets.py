"""A guest that says what a test has it say."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from providers.runtime.guest import wire
from providers.runtime.pool.cgroup import ResourceUsage
from providers.runtime.pool.launcher import Guest, Launcher
from providers.runtime.pool.protocol import GuestChannel
from providers.runtime.pool.sandbox import Sandbox
from providers.runtime.pool.template import Template
from providers.values import Job, RunLimits

READY = wire.pack({"type": "ready"}, [])
REQUEST = Job("1", timeout=60, limits=RunLimits(output_bytes=1000))


@pytest.fixture(autouse=True)
def numbered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests are numbered from 1, so that a guest's answers can be written beforehand."""
    numbers = itertools.count(1)
    monkeypatch.setattr(secrets, "randbits", lambda _: next(numbers))


def answer(number: int = 1, parts: list[tuple[str, bytes]] | None = None, **header: Any) -> bytes:
    given = {"type": "result", "id": number, "exit_code": 0, "seconds": 0.1, **header}
    return wire.pack(given, parts or [])


class PuppetGuest(Guest):
    """A guest that says what a test tells it to say."""

    sharing = "execution"

    def __init__(self) -> None:
        self._channel, self.inside = socket.socketpair()
        self._channel.setblocking(False)
        self.destroyed = False

    async def open(self) -> GuestChannel:
        return await GuestChannel.open(self._channel)

    def evidence(self) -> ResourceUsage:
        return ResourceUsage()

    def watch(self, is_running: bool) -> None:
        """Nothing is seen of it but what it says."""

    def memory_bytes(self) -> int | None:
        return None

    def yield_processors(self, *, yields: bool) -> None:
        """There is nothing to weigh."""

    def last_words(self) -> str | None:
        return "It ended by itself"

    def complaint(self) -> str:
        return ""

    async def destroy(self) -> None:
        self.destroyed = True
        self._channel.close()

    def say(self, data: bytes) -> None:
        self.inside.setblocking(False)
        self.inside.sendall(data)


class PuppetLauncher(Launcher):
    runtime = "puppet"
    rest_seconds = 0.0
    enforced_by: dict[str, str] = {}

    def __init__(self, first: bytes) -> None:
        self.guest = PuppetGuest()
        self._first = first

    async def prepare(self) -> None:
        """Nothing is needed."""

    def languages(self) -> list[str]:
        return ["python"]

    def interpreter(self, language: str, template: str = "") -> str | None:
        return None

    def node_runner(self) -> list[str]:
        return [""]

    def close(self) -> None:
        """Nothing is held."""

    async def start(self, template: Template) -> PuppetGuest:
        self.guest.say(self._first)
        return self.guest


def play(script: Callable[[Sandbox, PuppetGuest], Awaitable[Any]], first: bytes = READY) -> Any:
    async def stage() -> Any:
        launcher = PuppetLauncher(first)
        sandbox = await Sandbox.start(launcher, Template("python", "python"))
        try:
            return await script(sandbox, launcher.guest)
        finally:
            await sandbox.destroy()

    return asyncio.run(stage())


def pass_seconds(seconds: float) -> None:
    """Put the running loop's clock on: what was to last for no longer is over now."""
    loop = asyncio.get_running_loop()
    former = loop.time
    loop.time = lambda: former() + seconds  # type: ignore[method-assign]
