"""Whatever comes over a sandbox's channel, only that sandbox is lost, and nobody waits for ever."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from providers.errors import CreationFailed, ProviderUnavailable, SandboxError
from providers.guest import wire
from providers.pool.cgroup import Evidence
from providers.pool.channel import GuestChannel
from providers.pool.sandbox import Sandbox
from providers.pool.template import Template
from providers.values import SANDBOX_ENDED, ExecutionResult, Job, RunLimits

READY = wire.pack({"type": "ready"}, [])
REQUEST = Job("1", timeout=0.5, limits=RunLimits(output_bytes=1000))


@pytest.fixture(autouse=True)
def numbered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests are numbered from 1, so that a guest's answers can be written beforehand."""
    numbers = itertools.count(1)
    monkeypatch.setattr(secrets, "randbits", lambda _: next(numbers))


def answer(number: int = 1, parts: list[tuple[str, bytes]] | None = None, **header: Any) -> bytes:
    given = {"type": "result", "id": number, "exit_code": 0, "seconds": 0.1, **header}
    return wire.pack(given, parts or [])


class PuppetGuest:
    """A guest that says what a test tells it to say."""

    sharing = "execution"

    def __init__(self) -> None:
        self._channel, self.inside = socket.socketpair()
        self._channel.setblocking(False)
        self.destroyed = False

    async def open(self) -> GuestChannel:
        return await GuestChannel.open(self._channel)

    def evidence(self) -> Evidence:
        return Evidence()

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


class PuppetLauncher:
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

    def interpreter(self, language: str) -> str | None:
        return None

    def node_runner(self) -> list[str]:
        return [""]

    def hurry(self, *, is_wanted: bool) -> None:
        """There is nothing to weigh."""

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


def run_and_answer(data: bytes, *, reusable: bool = False) -> ExecutionResult:
    async def script(sandbox: Sandbox, guest: PuppetGuest) -> ExecutionResult:
        sandbox.give_to("alice", reusable=reusable)
        run = asyncio.create_task(sandbox.run(REQUEST))
        await asyncio.sleep(0.02)
        guest.say(data)
        return await run

    result: ExecutionResult = play(script)
    return result


GARBAGE = {
    "no frame": b"\0\0\0\5hello",
    "a header without end": b"\xff\xff\xff\xff" + b"x" * 1000,
    "no object": wire.dumps([]).encode().rjust(6, b"\0"),
    "parts of a wrong shape": b'\0\0\0\x14{"type":1,"parts":1}',
    "negative size": b'\0\0\0\x17{"parts":[["x",-1]]}   ',
    "another's answer": answer(number=7),
    "no result": wire.pack({"type": "ready"}, []),
    "deep": b"\0\0\x75\x30" + b"[" * 30_000,
}


@pytest.mark.parametrize("data", GARBAGE.values(), ids=GARBAGE)
def test_garbage_ends_the_sandbox_and_fails_the_run(data: bytes) -> None:
    result = run_and_answer(data)
    assert (result.exit_code, bool(result.metadata[SANDBOX_ENDED])) == (137, True)


def test_an_answer_that_is_too_large_is_refused_before_it_is_read() -> None:
    header = wire.dumps({"type": "result", "id": 1, "parts": [["stdout", 1 << 40]]}).encode()
    result = run_and_answer(len(header).to_bytes(4, "big") + header)
    assert "over the limit" in result.metadata[SANDBOX_ENDED]


def test_a_second_answer_ends_the_sandbox() -> None:
    async def script(sandbox: Sandbox, guest: PuppetGuest) -> bool:
        run = asyncio.create_task(sandbox.run(REQUEST))
        await asyncio.sleep(0.02)
        guest.say(answer() + answer())
        await asyncio.wait({run})
        return sandbox.alive

    assert play(script) is False


def test_silence_is_a_timeout() -> None:
    assert run_and_answer(b"").timed_out


def test_half_an_answer_is_a_timeout() -> None:
    assert run_and_answer(answer(parts=[("stdout", b"x" * 100)])[:-50]).timed_out


def test_speaking_out_of_turn_ends_an_idle_sandbox() -> None:
    async def script(sandbox: Sandbox, guest: PuppetGuest) -> None:
        guest.say(answer())
        await asyncio.wait_for(asyncio.shield(sandbox.closed), 1)
        assert not sandbox.alive
        with pytest.raises(ProviderUnavailable) as failure:
            await sandbox.run(REQUEST)
        assert not failure.value.started

    play(script)


def test_a_late_answer_is_not_taken_for_the_next() -> None:
    async def script(sandbox: Sandbox, guest: PuppetGuest) -> None:
        sandbox.give_to("alice", reusable=True)
        assert (await sandbox.run(REQUEST)).timed_out
        guest.say(answer(parts=[("stdout", b"late")]) + READY)
        with pytest.raises(ProviderUnavailable):
            await sandbox.run(REQUEST)

    play(script)


@pytest.mark.parametrize("second", [b"", answer(), wire.pack({"type": "failed"}, []), b"\0\0\0\1x"])
def test_only_a_guest_that_says_it_is_clean_is_used_again(second: bytes) -> None:
    async def script(sandbox: Sandbox, guest: PuppetGuest) -> bool:
        sandbox.give_to("alice", reusable=True)
        run = asyncio.create_task(sandbox.run(REQUEST))
        await asyncio.sleep(0.02)
        guest.say(answer())
        assert (await run).exit_code == 0
        guest.say(second)
        if not second:
            guest.inside.close()
        return await sandbox.renewed()

    assert play(script) is False


def test_a_clean_guest_is_used_again() -> None:
    async def script(sandbox: Sandbox, guest: PuppetGuest) -> list[str]:
        sandbox.give_to("alice", reusable=True)
        seen = []
        for number in (1, 2):
            run = asyncio.create_task(sandbox.run(REQUEST))
            await asyncio.sleep(0.02)
            guest.say(answer(number, [("stdout", b"%d" % number)]) + READY)
            seen.append((await run).stdout)
        return seen

    assert play(script) == ["1", "2"]


@pytest.mark.parametrize(
    "first", [answer(), b"\0\0\0\1x", wire.pack({"type": "ready"}, [("x", b"x")])]
)
def test_a_guest_that_does_not_begin_well_is_not_started(first: bytes) -> None:
    async def script(sandbox: Sandbox, guest: PuppetGuest) -> None:
        raise AssertionError("it must not start")

    with pytest.raises(CreationFailed):
        play(script, first)


def test_why_a_guest_gave_up_is_told() -> None:
    async def script(sandbox: Sandbox, guest: PuppetGuest) -> None:
        raise AssertionError("it must not start")

    failed = wire.pack({"type": "failed", "reason": "the module 'x' cannot be preloaded"}, [])
    with pytest.raises(SandboxError, match="'x' cannot be preloaded"):
        play(script, failed)
