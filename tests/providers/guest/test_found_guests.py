"""A guest that a former process has left is believed nothing, and nobody waits for it for ever."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import pytest

from providers.errors import CreationFailed, KeptSandboxLost
from providers.runtime.guest import wire
from providers.runtime.launchers.container_guest import After
from providers.runtime.pool.kept import Kept
from providers.runtime.pool.launcher import Launcher
from providers.runtime.pool.protocol import GuestChannel
from providers.runtime.pool.state_store import SandboxRecord, boot, now
from providers.runtime.pool.template import Template
from providers.runtime.service import registry
from providers.runtime.service.adoption import find_again
from tests.providers.guest.kept_puppet import Answers, Puppet
from tests.support.puppets import PuppetGuest, pass_seconds

MARKER = secrets.token_bytes(32)


def remembered() -> SandboxRecord:
    return SandboxRecord(
        container="a" * 64,
        ref="ref",
        owner="alice",
        template="python",
        language="python",
        runtime="runc",
        limits={},
        interpreter="",
        marker=MARKER.hex(),
        found={},
        version=1,
        boot=boot(),
        opened_at=now(),
        expires_at=now() + 100,
        seconds=100,
    )


class LeftGuest(PuppetGuest):
    """A puppet as a container is one that was found."""

    container = "a" * 64
    found: Mapping[str, Any] = {}

    def __init__(self, echo: bytes) -> None:
        super().__init__()
        self.echo = echo
        self.is_left = False

    async def open(self) -> GuestChannel:
        after = After(self.echo)
        return await GuestChannel.open(self._channel, after.feed, greets=False)

    async def stay(self) -> None:
        """It does."""

    def leave(self) -> None:
        self.is_left = True
        self._channel.close()


class LeftLauncher(Launcher):
    runtime = "runc"
    rest_seconds = 0.0
    enforced_by: dict[str, str] = {}
    guest: LeftGuest

    async def adopt(
        self, container: str, runtime: str, found: Mapping[str, Any], echo: bytes
    ) -> LeftGuest:
        self.guest = LeftGuest(echo)
        return self.guest


Script = Callable[[Puppet, Answers], Awaitable[None]]


def found(script: Script, then: Callable[[Kept, Puppet], Awaitable[Any]] | None = None) -> Any:
    """Look for a guest that does what the script says once it was spoken to."""

    async def stage() -> Any:
        launcher = LeftLauncher()
        looking = asyncio.create_task(
            find_again(launcher, remembered(), Template("python", "python"))  # type: ignore[arg-type]
        )
        while not hasattr(launcher, "guest"):
            await asyncio.sleep(0)
        guest = launcher.guest
        guest.inside.setblocking(False)
        loop = asyncio.get_running_loop()
        said = b""
        while len(said) < len(MARKER):
            said += await loop.sock_recv(guest.inside, len(MARKER) - len(said))
        assert said == MARKER
        puppet = Puppet(guest)
        operation = await puppet.hear("resume")
        assert operation[0]["echo"] == guest.echo.hex()
        playing = asyncio.create_task(script(puppet, Answers(puppet, operation)))
        try:
            async with asyncio.timeout(60):
                kept = await looking
                return await then(kept, puppet) if then else kept
        except CreationFailed:
            # Its end is for whoever may end containers.
            assert guest.is_left
            raise
        finally:
            playing.cancel()
            puppet.leave()

    return asyncio.run(stage())


def echo_of(answers: Answers) -> bytes:
    return bytes.fromhex(str(answers.operation[0]["echo"]))


async def silent(puppet: Puppet, answers: Answers) -> None:
    """Until it has been waited for; what was said before is read by then."""
    for _ in range(100):
        await asyncio.sleep(0)
    pass_seconds(registry.RESUME_SECONDS)
    await asyncio.sleep(60)


async def flooding(puppet: Puppet, answers: Answers) -> None:
    for _ in range(100):
        await puppet.say_bytes(b"\0" * 65536)
    pass_seconds(registry.RESUME_SECONDS)
    while True:
        await puppet.say_bytes(b"\0" * 65536)


async def without_an_echo(puppet: Puppet, answers: Answers) -> None:
    await answers.say("done", {"contexts": []})
    await silent(puppet, answers)


async def with_a_guessed_echo(puppet: Puppet, answers: Answers) -> None:
    await puppet.say_bytes(secrets.token_bytes(32))
    await answers.say("done", {"contexts": []})
    await silent(puppet, answers)


async def for_another(puppet: Puppet, answers: Answers) -> None:
    await puppet.say_bytes(echo_of(answers))
    await puppet.say({"id": 4711, "seq": 0, "event": "done", "contexts": []})
    await silent(puppet, answers)


async def with_no_frame(puppet: Puppet, answers: Answers) -> None:
    await puppet.say_bytes(echo_of(answers) + b"\xff" * 100)
    await silent(puppet, answers)


async def with_too_much(puppet: Puppet, answers: Answers) -> None:
    await puppet.say_bytes(echo_of(answers))
    await puppet.say_bytes(
        wire.pack({"id": answers.number, "seq": 0, "event": "done"}, [("x", b"x" * (9 << 20))])
    )


async def refusing(puppet: Puppet, answers: Answers) -> None:
    await puppet.say_bytes(echo_of(answers))
    await answers.say("failed", {"reason": "\x1b[2Jno", "code": "refused"})
    await silent(puppet, answers)


async def leaving(puppet: Puppet, answers: Answers) -> None:
    puppet.leave()


@pytest.mark.parametrize(
    "script",
    [
        silent,
        flooding,
        without_an_echo,
        with_a_guessed_echo,
        for_another,
        with_no_frame,
        with_too_much,
        refusing,
        leaving,
    ],
    ids=lambda script: script.__name__,
)
def test_whatever_it_says_it_is_not_found(script: Script) -> None:
    with pytest.raises(CreationFailed, match="does not answer"):
        found(script)


async def as_it_should(puppet: Puppet, answers: Answers) -> None:
    await puppet.say_bytes(b"the rest of an answer" + echo_of(answers))
    await answers.say("done", {"contexts": []})


def test_what_it_says_later_is_judged_as_before() -> None:
    async def forge(kept: Kept, puppet: Puppet) -> None:
        assert kept.alive
        asking = asyncio.create_task(kept.ask("context.list", {}))
        await puppet.hear("context.list")
        await puppet.say({"id": 4711, "seq": 0, "event": "done"})
        await asking

    with pytest.raises(KeptSandboxLost, match="unknown request"):
        found(as_it_should, forge)
