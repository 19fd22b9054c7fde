"""A tenant's gVisor kernel from its first run to its end."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from providers.errors import ProviderUnavailable, SandboxError
from providers.runtime.guest import lanes
from providers.runtime.launchers import tenant_kernel
from providers.runtime.launchers.tenant_kernel import Lane
from providers.runtime.pool.sandbox import Sandbox
from tests.conftest import require
from tests.providers.launchers.tenant_kernels import Kernels
from tests.support.processes import ROOT
from tests.support.sandboxes import gone, wait_until_gone
from tests.support.waiting import wait_until

SLEEP = "import time\nprint('begun', flush=True)\ntime.sleep(60)"


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernels]:
    require("runsc")
    kernels = Kernels(tmp_path_factory.mktemp("kernels"))
    yield kernels
    kernels.close()


def ended(kernel: Any) -> None:
    """The kernel is gone, and its processes with it."""
    pid = kernel.sentry._process.pid
    wait_until_gone({pid})


def test_a_result_says_where_it_ran(kernels: Kernels) -> None:
    sandbox = kernels.start("alice")
    assert sandbox.sharing == "tenant-kernel"
    result = kernels.run("alice", "def main(n):\n    return n + 1", arguments={"n": 1})
    assert (result.result, result.metadata["runtime"]) == (2, "gvisor")
    assert "gVisor" in result.metadata["enforced_by"]["memory"]
    kernels.loop.call(sandbox.destroy())


@pytest.mark.parametrize(
    ("language", "code"), [("bash", "echo $((1 + 1))"), ("nodejs", "console.log(1 + 1)")]
)
def test_other_languages_run_in_it(kernels: Kernels, language: str, code: str) -> None:
    require({"bash": "bash", "nodejs": "node"}[language])
    assert kernels.run("alice", code, language).stdout == "2\n"


def test_large_frames_pass_in_both_directions(kernels: Kernels) -> None:
    """Many times what may be under way at once."""
    sent = "x" * (8 * lanes.WINDOW)
    result = kernels.run("alice", "def main(sent):\n    return len(sent)", arguments={"sent": sent})
    assert result.result == len(sent), result.stderr
    result = kernels.run("alice", "open('artifacts/a', 'wb').write(b'x' * 3_000_000)")
    assert [len(artifact.content) for artifact in result.artifacts] == [3_000_000]


def test_a_run_that_is_ended_leaves_nothing(kernels: Kernels) -> None:
    """No process, and no descriptor, mount or group of the kernel's: each run can be the last."""
    going = kernels.begin("alice", SLEEP)
    kernel = kernels.kernel("alice")
    going.end()
    with pytest.raises(ProviderUnavailable) as raised:
        going.result()
    assert raised.value.started
    assert kernel.usable
    assert kernel.stream.count == kernel.count == 0


def test_a_run_may_end_late_while_libraries_are_imported_for_another(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    going = kernels.begin("gina", SLEEP)
    kernel = kernels.kernel("gina")
    held: list[tuple[Lane, bytes]] = []
    monkeypatch.setattr(tenant_kernel, "END_SECONDS", 0.001)
    # Nothing is heard of the other for as long as it takes.
    monkeypatch.setattr(Lane, "receive", lambda lane, data: held.append((lane, data)))

    async def hear() -> None:
        monkeypatch.undo()
        for lane, data in held:
            lane.receive(data)

    with ThreadPoolExecutor(1) as thread:
        other = thread.submit(kernels.start, "gina", "python", "decimal")
        wait_until(lambda: kernel.stream.count == 2 and kernel.is_starting, seconds=60)
        going.end()
        kernels.loop.call(hear())
        started = other.result()
    with pytest.raises(ProviderUnavailable):
        going.result()
    assert kernel.usable
    assert not kernel.is_starting
    kernels.loop.call(started.destroy())


def test_runs_leave_nothing_behind_in_it(kernels: Kernels) -> None:
    """Seen from outside. `benchmarks.kernels` does the same over ten thousand runs."""

    def look() -> tuple[int, int, int, int]:
        cgroup = kernels.kernel("frank").sentry._cgroup
        pids = {int(pid) for path in cgroup.procs for pid in Path(path).read_text().split()}
        # gVisor's own: those that hold the memory of a process have some of it open, too.
        descriptors = max(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids if not gone({pid}))
        runs = kernels.kernel("frank").count
        return len(pids), descriptors, cgroup.memory_bytes() >> 20, runs

    leave = """
        import os, socket, subprocess
        subprocess.Popen(["sleep", "1000"], start_new_session=True)
        kept = [os.open("/dev/null", os.O_RDONLY) for _ in range(100)] + [socket.socketpair()]
        open("/dev/shm/left", "wb").write(bytes(1 << 20))
    """
    for _ in range(3):
        kernels.run("frank", leave)
    processes, descriptors, memory, runs = look()
    for _ in range(12):
        kernels.run("frank", leave)
    now = look()
    # Each run has had three, and a hundred descriptors. gVisor lets go of the last ones late.
    assert now[0] <= processes + 6, (now, processes)
    assert now[1] <= descriptors + 100, (now, descriptors)
    assert now[2] <= memory + 16, (now, memory)
    assert (runs, now[3]) == (0, 0)


def test_it_is_renewed_after_so_many_runs(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    going = kernels.begin("alice", SLEEP)
    former = kernels.kernel("alice")
    monkeypatch.setattr(tenant_kernel, "MOST_RUNS", 1)
    assert kernels.run("alice", "print(1)").stdout == "1\n"
    assert kernels.kernel("alice") is not former
    # What runs in the former one may finish.
    assert going.came is None
    going.end()
    ended(former)


def test_it_ends_when_nobody_uses_it(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenant_kernel, "IDLE_SECONDS", 0.01)
    kernels.run("bob", "print(1)")
    wait_until(lambda: "bob" not in kernels.launcher._kernels._current, seconds=60)  # type: ignore[union-attr]


def test_idle_kernels_make_room_for_those_of_others(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tenant_kernel, "MOST_IDLE", 1)
    kernels.run("alice", "print(1)")
    first = kernels.kernel("alice")
    kernels.run("bob", "print(1)")
    ended(first)


def test_a_run_that_breaks_the_protocol_ends_the_trust_in_its_kernel(kernels: Kernels) -> None:
    going = kernels.begin("alice", SLEEP)
    former = kernels.kernel("alice")
    warm = kernels.start("alice")
    liar = kernels.begin("alice", SLEEP)

    async def lie() -> None:
        liar.sandbox.guest.lane.receive(b"\xff" * 64)

    kernels.loop.call(lie())
    assert "protocol" in liar.result().stderr
    # Warm ones are not used any more, what runs may finish, and the next is in another kernel.
    wait_until(lambda: not warm.alive, seconds=60)
    kernels.loop.call(warm.destroy())
    assert going.came is None
    assert kernels.run("alice", "print(1)").stdout == "1\n"
    assert kernels.kernel("alice") is not former
    going.end()
    ended(former)


@pytest.mark.parametrize(
    "message",
    [
        lanes.pack(4711, lanes.DATA, b"x"),
        lanes.pack(1, lanes.START, b"{}"),
        lanes.HEAD.pack(1, lanes.DATA, 1 << 31),
        lanes.pack(1, 99),
        lanes.pack(1, lanes.ENDED, b"[]"),
        lanes.pack(1, lanes.ENDED, b'{"code": 0, "reason": "its processes have not ended"}'),
        lanes.pack(1, lanes.CREDIT, b"\xff\xff\xff\xff"),
    ],
)
def test_a_kernel_that_breaks_the_protocol_is_ended(kernels: Kernels, message: bytes) -> None:
    """A run that has broken out into gVisor's kernel speaks to us by its stream."""
    from providers.runtime.launchers.tenant_kernel import Lanes

    async def speak() -> tuple[bool, bool]:
        stream = Lanes(lambda: None)
        lane, end = await stream.open(b"{}")
        stream.data_received(message)
        end.close()
        return stream.alive, lane.ended.done()

    assert kernels.loop.call(speak()) == (False, True)


def test_memory_of_the_whole_kernel_is_nobodys_fault(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its end for memory is told from that of a run, and siblings are not blamed."""
    # Together they may have less than each may have alone.
    monkeypatch.setattr(tenant_kernel, "RUN_BYTES", -(150 << 20))
    sibling = kernels.begin("carol", SLEEP)
    kernel = kernels.kernel("carol")
    taken = "held = bytearray(180 << 20)\nimport time\ntime.sleep(60)"
    for going in (kernels.begin("carol", f"print(1, flush=True)\n{taken}"), sibling):
        with pytest.raises(ProviderUnavailable) as raised:
            going.result()
        assert raised.value.started
        assert not raised.value.nothing_ran
    ended(kernel)
    monkeypatch.undo()
    assert kernels.run("carol", "print('again')").stdout == "again\n"


def test_a_kernel_that_is_gone_complains_of_nobody_else(kernels: Kernels) -> None:
    """Its descriptors may be another's by now."""
    kernels.run("erin", "print(1)")
    kernel = kernels.kernel("erin")

    async def end() -> str:
        kernel.end("a test")
        await kernel._ending
        others = [os.memfd_create("other") for _ in range(16)]
        try:
            for each in others:
                os.write(each, b"of another")
            told: str = kernel.complaint()
        finally:
            for each in others:
                os.close(each)
        return told

    assert "of another" not in kernels.loop.call(end())


def test_a_kernel_that_is_not_gvisor_makes_no_run(kernels: Kernels) -> None:
    """The right to mount is gVisor's own there, and would be the machine's anywhere else."""
    code = "import sys; sys.path.insert(0, sys.argv[1]); from providers.runtime.guest import tenant_kernel; sys.argv[1:] = ['{}']; tenant_kernel.main()"

    async def start() -> bytes:
        process = await asyncio.create_subprocess_exec(
            *("python3", "-I", "-c", code, str(ROOT)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        told, _ = await process.communicate()
        assert process.returncode == 70
        return told

    told = kernels.loop.call(start())
    assert told == lanes.pack(0, lanes.FAILED, b"this kernel is not gVisor")


def test_a_template_that_cannot_be_loaded_says_so(kernels: Kernels) -> None:
    with pytest.raises(SandboxError, match="no_such_module"):
        kernels.start("dave", "python", "no_such_module")
    loaded: Sandbox = kernels.start("dave", "python", "decimal")
    kernels.loop.call(loaded.destroy())
