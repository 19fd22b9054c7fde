"""Whatever comes over a sandbox's channel, only that sandbox is lost, and nobody waits for ever."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from providers.errors import CreationFailed, ProviderUnavailable, SandboxError
from providers.runtime.guest import wire
from providers.runtime.pool.sandbox import Sandbox
from providers.values import SANDBOX_ENDED, ExecutionResult, Job
from tests.support.puppets import READY, REQUEST, PuppetGuest, answer, play
from tests.support.puppets import numbered as numbered

# For what is waited for in vain.
BRIEF = replace(REQUEST, timeout=0.5)


def run_and_answer(
    data: bytes, *, request: Job = REQUEST, reusable: bool = False
) -> ExecutionResult:
    async def script(sandbox: Sandbox, guest: PuppetGuest) -> ExecutionResult:
        sandbox.give_to("alice", reusable=reusable)
        run = asyncio.create_task(sandbox.run(request))
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
    assert run_and_answer(b"", request=BRIEF).timed_out


def test_half_an_answer_is_a_timeout() -> None:
    half = answer(parts=[("stdout", b"x" * 100)])[:-50]
    assert run_and_answer(half, request=BRIEF).timed_out


def test_speaking_out_of_turn_ends_an_idle_sandbox() -> None:
    async def script(sandbox: Sandbox, guest: PuppetGuest) -> None:
        guest.say(answer())
        await asyncio.wait_for(asyncio.shield(sandbox.closed), 60)
        assert not sandbox.alive
        with pytest.raises(ProviderUnavailable) as failure:
            await sandbox.run(REQUEST)
        assert not failure.value.started

    play(script)


def test_a_late_answer_is_not_taken_for_the_next() -> None:
    async def script(sandbox: Sandbox, guest: PuppetGuest) -> None:
        sandbox.give_to("alice", reusable=True)
        assert (await sandbox.run(BRIEF)).timed_out
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
