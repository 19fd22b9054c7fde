"""Whatever a kept sandbox's guest says, only that sandbox is lost, and nobody waits for ever."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import pytest

from providers.errors import InvalidConfiguration, KeptSandboxLost, RateLimited
from providers.runtime.guest import wire
from providers.runtime.guest.protocol import AHEAD, CHUNK_BYTES, CREDIT, EVENT_COST
from providers.runtime.pool import kept as kept_module
from providers.runtime.pool.kept import Kept
from providers.runtime.pool.protocol import Frame
from providers.values import SANDBOX_ENDED, ExecutionResult, Job, RunLimits
from tests.providers.guest.kept_puppet import Answers, Puppet, play
from tests.support.puppets import pass_seconds

LIMITS = RunLimits(output_bytes=1000, result_bytes=1000, rich_output_count=2, rich_output_bytes=500)
JOB = Job("1", limits=LIMITS, timeout=5)

Attack = Callable[[Puppet, Answers], Awaitable[None]]


def ignore(frame: Frame) -> None:
    """Nobody looks at the events."""


async def forged(puppet: Puppet, answers: Answers) -> None:
    await puppet.say({"id": 4711, "seq": 0, "event": "done", "exit_code": 0})


async def without_id(puppet: Puppet, answers: Answers) -> None:
    await puppet.say({"seq": 0, "event": "done"})


async def with_a_list_as_id(puppet: Puppet, answers: Answers) -> None:
    await puppet.say({"id": [answers.number], "seq": 0, "event": "done"})


async def out_of_order(puppet: Puppet, answers: Answers) -> None:
    await puppet.say({"id": answers.number, "seq": 1, "event": "done", "exit_code": 0})


async def with_true_for_one(puppet: Puppet, answers: Answers) -> None:
    await answers.say("stdout", data=b"x")
    await puppet.say({"id": answers.number, "seq": True, "event": "done", "exit_code": 0})


async def again_after_the_end(puppet: Puppet, answers: Answers) -> None:
    await answers.say("stdout", data=b"x")
    await puppet.say({"id": answers.number, "seq": 0, "event": "stdout"}, data=b"x")


async def an_event_of_another_operation(puppet: Puppet, answers: Answers) -> None:
    await answers.say("entries", data=b"[]")


async def more_output_than_allowed(puppet: Puppet, answers: Answers) -> None:
    await answers.say("stdout", data=b"x" * 600)
    await answers.say("stdout", data=b"x" * 600)


async def more_outputs_than_allowed(puppet: Puppet, answers: Answers) -> None:
    for _ in range(3):
        await answers.say("output", **{"text/plain": b"x"})


async def larger_outputs_than_allowed(puppet: Puppet, answers: Answers) -> None:
    await answers.say("output", **{"text/plain": b"x" * 501})


async def an_oversized_answer(puppet: Puppet, answers: Answers) -> None:
    await puppet.say_bytes(b"\0\0\0\x20" + b'{"parts":[["x",123456789012345]]}'[:32])


async def a_header_without_end(puppet: Puppet, answers: Answers) -> None:
    await puppet.say_bytes(b"\xff\xff\xff\xff" + b"x" * 1000)


async def a_failure_with_parts(puppet: Puppet, answers: Answers) -> None:
    await answers.say("failed", {"reason": "x"}, stdout=b"x")


ATTACKS = [
    forged,
    without_id,
    with_a_list_as_id,
    out_of_order,
    with_true_for_one,
    again_after_the_end,
    an_event_of_another_operation,
    more_output_than_allowed,
    more_outputs_than_allowed,
    larger_outputs_than_allowed,
    an_oversized_answer,
    a_header_without_end,
    a_failure_with_parts,
]


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_a_guest_that_breaks_the_protocol_is_ended(attack: Attack) -> None:
    async def script(kept: Kept, puppet: Puppet) -> ExecutionResult:
        run = asyncio.create_task(kept.run(JOB, ignore))
        await attack(puppet, Answers(puppet, await puppet.hear("run")))
        result = await run
        with pytest.raises(KeptSandboxLost):
            await kept.ask("context.list", {})
        return result

    result: ExecutionResult = play(script)
    assert "broke the protocol" in result.metadata[SANDBOX_ENDED]
    assert (result.exit_code, result.metadata["context_kept"]) == (137, False)


def test_a_run_that_is_never_answered_has_timed_out_by_the_hosts_clock() -> None:
    async def script(kept: Kept, puppet: Puppet) -> ExecutionResult:
        run = asyncio.create_task(kept.run(JOB, ignore))
        answers = Answers(puppet, await puppet.hear("run"))
        await answers.say("stdout", data=b"alive")
        pass_seconds(JOB.timeout + kept_module.STOP_SECONDS + kept_module.GRACE_SECONDS)
        result = await run
        assert not kept.alive
        return result

    result: ExecutionResult = play(script)
    assert (result.timed_out, result.exit_code) == (True, None)


@pytest.mark.parametrize("name", ["context.list", "file.stat", "reset", "process.list"])
def test_what_is_never_answered_ends_the_sandbox(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def script(kept: Kept, puppet: Puppet) -> None:
        with pytest.raises(KeptSandboxLost, match="in time"):
            await kept.ask(name, {}, seconds=0.1)
        assert not kept.alive

    play(script)


@pytest.mark.parametrize("size", [CHUNK_BYTES, 0], ids=["large events", "small events"])
def test_a_guest_may_not_send_more_than_it_has_credit_for(size: int) -> None:
    async def script(kept: Kept, puppet: Puppet) -> None:
        async with aclosing(kept.stream("file.read", {"path": "x"})) as events:
            reading = asyncio.ensure_future(anext(events))
            answers = Answers(puppet, await puppet.hear("file.read"))
            await answers.say("data", data=b"x")
            await reading
            with pytest.raises(OSError, match=r"Broken pipe|reset"):
                while True:
                    await answers.say("data", data=b"x" * size)
            # What came before it was sent too much is still what was sent.
            taken = 0
            with pytest.raises(KeptSandboxLost, match="credit"):
                async for _, parts in events:
                    taken += len(parts["data"]) + EVENT_COST
            assert taken <= CREDIT

    play(script)


def test_credit_is_given_only_as_events_are_taken() -> None:
    async def script(kept: Kept, puppet: Puppet) -> None:
        events = kept.stream("file.read", {"path": "x"})
        reading = asyncio.ensure_future(anext(events))
        answers = Answers(puppet, await puppet.hear("file.read"))
        half = CREDIT // 2 // CHUNK_BYTES
        for _ in range(half):
            await answers.say("data", data=b"x" * CHUNK_BYTES)
        await reading
        assert not await _is_there(puppet)
        for _ in range(half - 1):
            await anext(events)
        header, _ = await puppet.hear("credit")
        assert (header["target"], header["bytes"]) == (
            answers.number,
            half * (CHUNK_BYTES + EVENT_COST),
        )
        await events.aclose()

    play(script)


async def _is_there(puppet: Puppet) -> bool:
    """Whether the host gives credit, with everything that is on its way taken in."""
    hearing = asyncio.create_task(puppet.hear("credit"))
    done, _ = await asyncio.wait([hearing], timeout=0.1)
    hearing.cancel()
    return bool(done)


def test_a_runs_output_is_taken_at_once_whoever_reads_it() -> None:
    async def script(kept: Kept, puppet: Puppet) -> ExecutionResult:
        big = Job("1", limits=RunLimits(output_bytes=4 * CREDIT))
        run = asyncio.create_task(kept.run(big, ignore))
        answers = Answers(puppet, await puppet.hear("run"))
        for _ in range(4 * CREDIT // CHUNK_BYTES):
            await answers.say("stdout", data=b"x" * CHUNK_BYTES)
        await answers.say("done", {"exit_code": 0, "context_kept": True})
        return await run

    result: ExecutionResult = play(script)
    assert (result.exit_code, result.metadata["context_kept"]) == (0, True)


def test_events_are_handed_over_in_their_order() -> None:
    async def script(kept: Kept, puppet: Puppet) -> list[Any]:
        seen: list[Any] = []
        run = asyncio.create_task(
            kept.run(JOB, lambda frame: seen.append((frame[0]["event"], frame[1])))
        )
        answers = Answers(puppet, await puppet.hear("run"))
        await answers.say("stdout", data=b"1")
        await answers.say("stderr", data=b"2")
        await answers.say("output", **{"text/plain": b"3"})
        await answers.say("done", {"exit_code": 0})
        await run
        return seen

    assert play(script) == [
        ("stdout", {"data": b"1"}),
        ("stderr", {"data": b"2"}),
        ("output", {"text/plain": b"3"}),
    ]


@pytest.mark.parametrize(
    ("code", "field", "kind", "named"),
    [
        ("refused", "cwd", InvalidConfiguration, "cwd"),
        ("missing", None, InvalidConfiguration, "path"),
        ("exhausted", None, RateLimited, None),
        ("anything", None, InvalidConfiguration, None),
        (["list"], {"x": 1}, InvalidConfiguration, None),
    ],
)
def test_a_refusal_is_the_requests_fault(
    code: Any, field: Any, kind: type[Exception], named: str | None
) -> None:
    async def script(kept: Kept, puppet: Puppet) -> Any:
        asked = asyncio.create_task(kept.ask("file.stat", {"path": "x"}))
        answers = Answers(puppet, await puppet.hear("file.stat"))
        await answers.say("failed", {"reason": "no\x1b[31m", "code": code, "field": field})
        with pytest.raises(kind) as caught:
            await asked
        assert kept.alive
        return caught.value

    error = play(script)
    assert (error.message, error.field) == ("no\ufffd[31m", named)


def test_pieces_are_sent_ahead_only_as_far_as_agreed() -> None:
    async def script(kept: Kept, puppet: Puppet) -> list[int]:
        async def content() -> AsyncIterator[bytes]:
            yield b"x" * (CHUNK_BYTES * 10)

        writing = asyncio.create_task(kept.write("file.write", {"path": "x"}, content()))
        answers = Answers(puppet, await puppet.hear("file.write"))
        sizes = []
        for _ in range(AHEAD):
            sizes.append(len((await puppet.hear("data"))[1]["data"]))
        hearing = asyncio.create_task(puppet.hear("data"))
        done, _ = await asyncio.wait([hearing], timeout=0.1)
        assert not done
        for _ in range(10):
            await answers.say("taken")
        await puppet.hear("end") if (await hearing) else None
        await answers.say("done", {"entry": {"path": "x"}})
        assert (await writing)[0]["entry"] == {"path": "x"}
        return sizes

    assert play(script) == [CHUNK_BYTES] * AHEAD


def test_a_guest_that_does_not_take_what_is_written_is_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kept_module, "OPERATION_SECONDS", 0.1)

    async def script(kept: Kept, puppet: Puppet) -> None:
        async def content() -> AsyncIterator[bytes]:
            while True:
                yield b"x" * CHUNK_BYTES

        with pytest.raises(KeptSandboxLost, match="in time"):
            await kept.write("file.write", {"path": "x"}, content())

    play(script)


def test_whoever_leaves_a_stream_has_it_stopped_and_the_sandbox_stays() -> None:
    async def script(kept: Kept, puppet: Puppet) -> None:
        events = kept.stream("file.watch", {"path": ""})
        reading = asyncio.ensure_future(anext(events))
        answers = Answers(puppet, await puppet.hear("file.watch"))
        await answers.say("ready")
        await reading
        await events.aclose()
        assert (await puppet.hear("stop"))[0]["target"] == answers.number
        await answers.say("done")
        asked = asyncio.create_task(kept.ask("context.list", {}))
        await Answers(puppet, await puppet.hear("context.list")).say("done", {"contexts": []})
        await asked
        assert not kept.busy

    play(script)


def test_whoever_leaves_a_run_has_it_interrupted_and_the_next_one_waits_for_its_end() -> None:
    async def script(kept: Kept, puppet: Puppet) -> None:
        first = asyncio.create_task(kept.run(JOB, ignore))
        answers = Answers(puppet, await puppet.hear("run"))
        second = asyncio.create_task(kept.run(JOB, ignore))
        first.cancel()
        # This run of the context, which is no other's.
        assert (await puppet.hear("stop"))[0]["target"] == answers.number
        assert [frame[0]["op"] for frame in puppet.heard].count("run") == 1
        await answers.say("done", {"exit_code": 130})
        await Answers(puppet, await puppet.hear("run")).say("done", {"exit_code": 0})
        assert (await second).exit_code == 0

    play(script)


def test_whoever_leaves_a_detached_run_has_it_go_on() -> None:
    async def script(kept: Kept, puppet: Puppet) -> None:
        run = asyncio.create_task(kept.run(JOB, ignore, detach=True))
        answers = Answers(puppet, await puppet.hear("run"))
        run.cancel()
        await asyncio.wait([run])
        assert kept.busy
        await answers.say("done", {"exit_code": 0})
        following = asyncio.create_task(kept.run(JOB, ignore))
        await Answers(puppet, await puppet.hear("run")).say("done", {"exit_code": 0})
        await following
        assert "interrupt" not in [frame[0]["op"] for frame in puppet.heard]

    play(script)


def test_runs_of_different_contexts_go_side_by_side() -> None:
    async def script(kept: Kept, puppet: Puppet) -> None:
        one = asyncio.create_task(kept.run(Job("1", context="a"), ignore))
        first = Answers(puppet, await puppet.hear("run"))
        other = asyncio.create_task(kept.run(Job("1", context="b"), ignore))
        second = Answers(puppet, await puppet.hear("run"))
        await second.say("done", {"exit_code": 2})
        await first.say("done", {"exit_code": 1})
        assert ((await one).exit_code, (await other).exit_code) == (1, 2)

    play(script)


def test_a_sandbox_that_was_closed_during_a_run_is_nobodys_verdict() -> None:
    async def script(kept: Kept, puppet: Puppet) -> None:
        run = asyncio.create_task(kept.run(JOB, ignore))
        await puppet.hear("run")
        await kept.destroy()
        with pytest.raises(KeptSandboxLost, match="closed") as caught:
            await run
        assert caught.value.started

    play(script)


def test_a_guest_that_ends_is_the_runs_verdict_and_everything_else_is_lost() -> None:
    async def script(kept: Kept, puppet: Puppet) -> ExecutionResult:
        run = asyncio.create_task(kept.run(JOB, ignore))
        asked = asyncio.create_task(kept.ask("context.list", {}))
        await puppet.hear("context.list")
        puppet.leave()
        with pytest.raises(KeptSandboxLost, match="ended by itself"):
            await asked
        return await run

    result: ExecutionResult = play(script)
    assert result.metadata[SANDBOX_ENDED] == "It ended by itself"


def test_a_sandbox_that_speaks_before_it_is_kept_is_not_kept() -> None:
    async def script(kept: Kept, puppet: Puppet) -> None:
        await puppet.say_bytes(wire.pack({"id": 1, "seq": 0, "event": "done"}, []))
        with pytest.raises(KeptSandboxLost, match="unknown request"):
            while True:
                await kept.ask("context.list", {})

    play(script)
