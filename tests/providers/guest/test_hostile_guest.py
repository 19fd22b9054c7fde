"""Whatever comes out of a sandbox, the host answers with a verdict and goes on."""

from __future__ import annotations

import asyncio
import contextlib
import math
import resource
import time
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

import pytest

from providers.errors import CreationFailed, ProviderUnavailable
from providers.runtime.guest.names import shorten
from providers.runtime.pool import sandbox as sandbox_module
from providers.runtime.pool import shelf
from providers.runtime.pool.pool import Pool, PoolSettings
from providers.values import SANDBOX_ENDED, ExecutionResult, RunLimits
from tests.support.hostile_guests import TEMPLATES, impostors, request, served
from tests.support.impostors import Impostor
from tests.support.waiting import wait_until


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(coroutine)


BEFORE_READY = {
    "garbage": "say(b'garbage' * 1000); time.sleep(100)",
    "a flood": "while True: say(bytes(1 << 20))",
    "the end": "sys.exit(3)",
    "a complaint": "sys.stderr.write('no kernel here'); sys.exit(3)",
    "another type": "say(frame({'type': 'result'})); time.sleep(100)",
    "no type": "say(frame({})); time.sleep(100)",
    "ready with a part": "say(frame({'type': 'ready'}, ('x', b'x'))); time.sleep(100)",
    "a header of 4 GiB": "say(b'\\xff' * 4); time.sleep(100)",
    "half a frame": "say(READY[:-1]); sys.exit()",
}


@pytest.mark.parametrize("script", BEFORE_READY.values(), ids=BEFORE_READY)
def test_a_guest_that_does_not_get_ready_is_a_failed_creation(script: str) -> None:
    async def scenario() -> CreationFailed:
        pool = Pool(Impostor(script), TEMPLATES, PoolSettings(size=1, patience=60))
        try:
            with pytest.raises(CreationFailed) as caught:
                await pool.acquire("python")
            return caught.value
        finally:
            await pool.close()

    error = run(scenario())
    wait_until(lambda: not impostors(), seconds=60)
    assert error.message.startswith("impostor: sandbox did not start: ")
    assert not error.started
    if "no kernel" in script:
        assert "no kernel here" in error.message


def test_a_guest_that_never_gets_ready_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox_module, "START_SECONDS", 0.2)
    monkeypatch.setattr(shelf, "LONGEST_BACKOFF_SECONDS", 0.5)

    async def scenario() -> None:
        launcher = Impostor("time.sleep(1000)")
        pool = Pool(launcher, TEMPLATES, PoolSettings(size=1, patience=60))
        for _ in range(3):
            with pytest.raises(CreationFailed):
                await pool.acquire("python")
        # Descriptors are used again; a forgotten watch on
        # one of them would show here.
        launcher.script = Impostor().script
        monkeypatch.setattr(sandbox_module, "START_SECONDS", 30)
        sandbox = None
        while sandbox is None:
            # One of the others may still have been on its way.
            with contextlib.suppress(CreationFailed):
                sandbox = await pool.acquire("python")
        assert (await sandbox.run(request())).stdout == "print(1)"
        await pool.close()

    run(scenario())
    wait_until(lambda: not impostors(), seconds=60)


ANSWERS = {
    "garbage": "say(b'garbage' * 1000)",
    "a flood": "while True: say(bytes(1 << 20))",
    "the end": "sys.exit()",
    "a header of 4 GiB": "say(b'\\xff' * 4)",
    "no JSON": "say(struct.pack('>I', 3) + b'{{{')",
    "parts over the limit": "say(answer(header, ('stdout', bytes(100_000_000))))",
    "a part that is promised only": "say(frame({'type': 'result', 'id': header['id'], 'parts': 1})[:-1]); sys.exit()",
    "another id": "say(answer({'id': header['id'] + 1}))",
    "no id": "say(frame({'type': 'result'}))",
    "an id of another type": "say(answer({'id': str(header['id'])}))",
    "another type": "say(answer(header, type='ready'))",
    "ready again": "say(READY)",
}  # fmt: skip


@pytest.mark.parametrize("script", ANSWERS.values(), ids=ANSWERS)
def test_an_answer_that_is_none_is_a_failure_of_the_run(script: str) -> None:
    """Code that brought its supervisor down must not look like a provider that is ill."""
    assert_ended(run(served(f"say(READY)\nheader, parts = listen()\n{script}\ntime.sleep(1000)")))


def assert_ended(result: ExecutionResult) -> None:
    assert (result.exit_code, result.stdout, result.has_result) == (137, "", False)
    assert (result.timed_out, result.out_of_memory) == (False, False)
    assert result.metadata[SANDBOX_ENDED] in result.stderr


@pytest.mark.parametrize(
    "script",
    [
        "time.sleep(1000)",
        "say(answer(header)[:-1]); time.sleep(1000)",
        "for byte in answer(header): say(bytes([byte])); time.sleep(0.2)",
        "time.sleep(1.6); say(answer(header))",
    ],
)
def test_a_guest_that_does_not_answer_in_time_is_timed_out(script: str) -> None:
    began = time.monotonic()
    waiting = f"say(READY)\nheader, parts = listen()\n{script}\ntime.sleep(1000)"
    result = run(served(waiting, timeout=0.1))
    # Longer than that by what an answer has on top.
    assert time.monotonic() - began > 0.1 + sandbox_module.ANSWER_GRACE_SECONDS
    assert (result.timed_out, result.exit_code, result.stdout) == (True, None, "")


def test_an_endless_answer_does_not_fill_our_memory() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    flood = (
        "say(READY)\nlisten()\nsay(struct.pack('>I', 200_000))\nwhile True: say(b'{' * (1 << 20))"
    )
    assert_ended(run(served(flood)))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000


def test_only_the_first_of_two_answers_counts() -> None:
    script = "say(READY)\nheader, _ = listen()\nsay(answer(header, ('stdout', b'1')) + answer(header, ('stdout', b'2')))"  # fmt: skip
    assert run(served(script)).stdout == "1"


@pytest.mark.parametrize(
    "script",
    [
        "say(READY + frame({'type': 'result', 'id': 1, 'exit_code': 0}))\ntime.sleep(1000)",
        "say(READY)\ntime.sleep(0.05)\nsay(frame({'type': 'result', 'id': 1}))\ntime.sleep(1000)",
        "say(READY)\nsys.exit()",
    ],
)
def test_a_guest_that_does_not_wait_for_its_turn_is_never_believed(script: str) -> None:
    async def scenario() -> int:
        launcher = Impostor(script)
        pool = Pool(launcher, TEMPLATES, PoolSettings(size=1, patience=60))
        pool.open()
        await asyncio.sleep(0.2)
        sandbox = await pool.acquire("python")
        # Not started where it is known in time, else a failure of the run.
        with contextlib.suppress(ProviderUnavailable):
            assert_ended(await sandbox.run(request()))
        await pool.release(sandbox)
        async with asyncio.timeout(30):
            while launcher.attempts < 2:
                await asyncio.sleep(0.01)
        await pool.close()
        return launcher.attempts

    # It is replaced, but not as fast as the machine can start processes.
    assert 2 <= run(scenario()) < 20
    wait_until(lambda: not impostors(), seconds=60)


CLAIMS: dict[str, dict[str, Any]] = {
    "an exit code beyond all bounds": {"exit_code": 10**30},
    "a negative exit code": {"exit_code": -1},
    "an exit code that is text": {"exit_code": "0"},
    "seconds that are no number": {"seconds": math.nan},
    "seconds without end": {"seconds": math.inf},
    "seconds below zero": {"seconds": -5.0},
    "seconds that are a list": {"seconds": [1]},
    "no seconds": {"seconds": None},
    "measurements of another type": {"cpu_seconds": {"a": 1}, "memory_peak_bytes": "much"},
    "measurements beyond all bounds": {"cpu_seconds": 1e308, "memory_peak_bytes": 10**400},
    "measurements that are no numbers": {"cpu_seconds": math.nan, "memory_peak_bytes": math.inf},
    "verdicts of another type": {"timed_out": "yes", "out_of_memory": 1, "stdout_truncated": []},
    "skipped files of another type": {"artifacts_skipped": "all"},
    "skipped files that are no pairs": {"artifacts_skipped": [1, [], ["a"], ["a", 1], ["a", "b", "c"], {}]},
    "skipped files with odd names": {"artifacts_skipped": [["\ud800", "x"], ["\0", "x"], ["a", "\x1b"]]},
    "endlessly many skipped files": {"artifacts_skipped": [["a" * 300, "b" * 300]] * 100},
}  # fmt: skip


@pytest.mark.parametrize("claims", CLAIMS.values(), ids=CLAIMS)
def test_claims_that_make_no_sense_do_no_harm(claims: dict[str, Any]) -> None:
    script = f"""
from math import inf, nan
say(READY)
header, parts = listen()
say(answer(header, ("stdout", b"x"), **{claims!r}))
time.sleep(1000)
"""
    result = run(served(script))
    assert result.stdout == "x"
    assert result.exit_code is None or 0 <= result.exit_code <= 255
    assert math.isfinite(result.execution_time)
    assert result.execution_time >= 0
    assert (result.timed_out, result.out_of_memory, result.truncated) == (False, False, False)
    for name in ("cpu_seconds", "memory_peak_bytes"):
        measured = result.metadata[name]
        assert measured is None or 0 <= measured < 2**53
    skipped = result.metadata.get("artifacts_skipped", [])
    assert len(skipped) <= 51
    for entry in skipped:
        assert len(entry) == 2
        assert all(len(text) <= 200 and text == shorten(text) for text in entry)


@pytest.mark.parametrize(
    "claimed",
    ["/etc/passwd", "../x", "a/../../x", "..", "", "a\nb", "a\0b", "\x1b[2J", "x" * 513],
)
def test_an_artifact_with_a_dangerous_name_is_left_out(claimed: str) -> None:
    script = f"""
say(READY)
header, parts = listen()
say(answer(header, ("artifact:" + {claimed!r}, b"x"), ("artifact:good", b"y"), ("other", b"z")))
time.sleep(1000)
"""
    assert [artifact.name for artifact in run(served(script)).artifacts] == ["good"]


def test_the_host_counts_and_measures_artifacts_itself() -> None:
    script = """
say(READY)
header, parts = listen()
say(answer(header, ("artifact:over", b"x" * 11), ("artifact:a", b"x" * 10), ("artifact:b", b"x" * 9),
    ("artifact:c", b"x" * 2), ("artifact:d", b"x"), ("artifact:e", b"")))
time.sleep(1000)
"""  # fmt: skip
    limits = replace(RunLimits(), artifact_bytes=10, artifacts_total_bytes=20, artifact_count=3)
    result = run(served(script, limits=limits))
    assert [artifact.name for artifact in result.artifacts] == ["a", "b", "d"]


def test_output_over_the_bound_is_cut_by_the_host() -> None:
    script = """
say(READY)
header, parts = listen()
say(answer(header, ("stdout", b"x" * 1000), ("stderr", b"y" * 1000)))
time.sleep(1000)
"""
    result = run(served(script, limits=replace(RunLimits(), output_bytes=10)))
    assert (result.stdout, result.stdout_truncated) == ("x" * 10, True)
    assert (result.stderr, result.stderr_truncated) == ("y" * 10, True)


@pytest.mark.parametrize(
    "claimed",
    [b"NaN", b"1e999", b'"\\ud800"', b'"\xed\xa0\x80"', b"{", b"", b"[" * 50_000, b"\xff\xfe1\x00", b"9" * 5000],
)  # fmt: skip
def test_a_result_that_is_not_json_is_an_error_of_the_program(claimed: bytes) -> None:
    script = f"say(READY)\nheader, parts = listen()\nsay(answer(header, ('result', {claimed!r})))\ntime.sleep(1000)"  # fmt: skip
    result = run(served(script))
    assert (result.has_result, result.result, result.exit_code) == (False, None, 1)
    assert "not JSON" in result.stderr


def test_a_result_over_the_bound_is_an_error_of_the_program() -> None:
    script = """
say(READY)
header, parts = listen()
say(answer(header, ("result", b'"' + b"x" * 100 + b'"')))
time.sleep(1000)
"""
    result = run(served(script, limits=replace(RunLimits(), result_bytes=50)))
    assert (result.has_result, result.exit_code) == (False, 1)


def test_a_guest_that_ignores_everything_is_ended_all_the_same() -> None:
    script = """
import signal
for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
    signal.signal(number, signal.SIG_IGN)
say(READY)
listen()
os.close(0)
os.close(1)
while True: pass
"""
    assert_ended(run(served(script)))
    wait_until(lambda: not impostors(), seconds=60)


def test_an_honest_answer_is_taken_as_it_is() -> None:
    """The counterpart of all the above: the impostors fail for what they say."""
    script = """
say(READY)
header, parts = listen()
say(answer(header, ("stdout", parts["code"]), ("result", b'{"a": 1}'), ("artifact:x/y.txt", b"1"),
    cpu_seconds=0.5, memory_peak_bytes=7, artifacts_skipped=[["z", "too large"]]))
"""
    result = run(served(script))
    assert (result.stdout, result.result, result.exit_code) == ("print(1)", {"a": 1}, 0)
    assert [(one.name, one.mime_type, one.content) for one in result.artifacts] == [("x/y.txt", "text/plain", b"1")]  # fmt: skip
    assert result.metadata["cpu_seconds"] == 0.5
    assert result.metadata["memory_peak_bytes"] == 7
    assert result.metadata["artifacts_skipped"] == [["z", "too large"]]
