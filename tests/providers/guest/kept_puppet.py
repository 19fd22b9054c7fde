"""A guest of a kept sandbox that says what a test tells it to say."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from providers.runtime.guest import wire
from providers.runtime.pool.kept import Kept
from providers.runtime.pool.protocol import Frame
from providers.runtime.pool.sandbox import Sandbox
from providers.runtime.pool.template import Template
from tests.support.puppets import READY, PuppetGuest, PuppetLauncher


class Puppet:
    """Reads what the host sends, and answers as it is told."""

    def __init__(self, guest: PuppetGuest) -> None:
        self._socket = guest.inside
        self._socket.setblocking(False)
        self._parser = wire.Parser(wire.REQUEST_LIMIT)
        self._frames: list[Frame] = []
        self.heard: list[Frame] = []

    async def hear(self, name: str) -> Frame:
        """The next frame of the host's with this operation; those before it are only noted."""
        while True:
            while self._frames:
                frame = self._frames.pop(0)
                self.heard.append(frame)
                if frame[0]["op"] == name:
                    return frame
            data = await asyncio.get_running_loop().sock_recv(self._socket, 1 << 16)
            assert data, f"the host has left before {name}"
            self._frames += self._parser.feed(data)

    async def say(self, header: dict[str, object], **parts: bytes) -> None:
        data = wire.pack(header, list(parts.items()))
        await asyncio.get_running_loop().sock_sendall(self._socket, data)

    async def say_bytes(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self._socket, data)

    def leave(self) -> None:
        self._socket.close()


class Answers:
    """What a guest says for one operation, counted as it has to be."""

    def __init__(self, puppet: Puppet, operation: Frame) -> None:
        self.puppet = puppet
        self.operation = operation
        self.number = operation[0]["id"]
        self.seq = 0

    async def say(
        self, event: str, header: dict[str, object] | None = None, **parts: bytes
    ) -> None:
        known: dict[str, object] = {"id": self.number, "seq": self.seq, "event": event}
        self.seq += 1
        await self.puppet.say({**(header or {}), **known}, **parts)


Script = Callable[[Kept, Puppet], Awaitable[Any]]


def play(script: Script) -> Any:
    """What a script returns, with a kept sandbox and the puppet in it."""

    async def stage() -> Any:
        launcher = PuppetLauncher(READY)
        sandbox = await Sandbox.start(launcher, Template("python", "python"))
        puppet = Puppet(launcher.guest)
        try:
            opening = asyncio.create_task(Kept.open(sandbox, {}, {}))
            await Answers(puppet, await puppet.hear("keep")).say("done", {"contexts": []})
            async with asyncio.timeout(60):
                return await script(await opening, puppet)
        finally:
            await sandbox.destroy()

    return asyncio.run(stage())
