"""Whatever a program writes in place of its runner, the host gets a well-formed answer."""

from __future__ import annotations

import json
import os
import signal
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from providers.runtime.guest import advice, wire
from providers.runtime.guest.request import Run, answer
from providers.runtime.pool.cgroup import ResourceUsage
from providers.runtime.pool.claims import read_answer
from providers.values import SANDBOX_ENDED, ExecutionResult, RunLimits
from tests.support.sandboxes import Local, command, family
from tests.support.waiting import wait_until

LIMITS = RunLimits()
_SLOW = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
MARK = ["sleep", "4711"]
REMARK = [1, "os", "reaches files and processes"]


class Ended:
    """A child that has ended with code 0 and left `report` in its pipe."""

    def __init__(self, report: bytes) -> None:
        self.pid = os.getpid()
        self.exit_code = 0
        self.cpu_seconds = 0.0
        self.memory_peak = self.sigsys = self.left = 0
        self.report, report_in = os.pipe()
        os.write(report_in, report)
        os.close(report_in)
        self.job = os.open("/dev/null", os.O_WRONLY)
        self.stdout, self.stderr = (os.open("/dev/null", os.O_RDONLY) for _ in range(2))

    def kill_all(self) -> None:
        """Nothing is left."""

    def close(self) -> None:
        for fd in (self.report, self.job, self.stdout, self.stderr):
            os.close(fd)


@contextmanager
def inside(folder: Path) -> Iterator[None]:
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def told(report: bytes, folder: Path, *, advised: bool = True) -> ExecutionResult:
    """What the host makes of a run whose report descriptor was written this."""
    child = Ended(report)
    request = {"timeout": 5, "limits": {"memory_bytes": 2**28, **asdict(LIMITS)}}
    run = Run(child, request, None, advised=advised)  # type: ignore[arg-type]
    with inside(folder):
        (folder / "artifacts").mkdir(exist_ok=True)
        run.finish()
        parser = wire.Parser(1 << 26)
        (frame,) = parser.feed(answer(run, 7, 0.1))
    child.close()
    return read_answer(frame, LIMITS, ResourceUsage(), {})


def frame(header: dict[str, Any], *parts: tuple[str, bytes]) -> bytes:
    named = {**header, "parts": [[name, len(content)] for name, content in parts]}
    text = json.dumps(named).encode()
    return struct.pack(">I", len(text)) + text + b"".join(content for _, content in parts)


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=12,
)
names = st.text(st.characters(), max_size=120)
headers = st.fixed_dictionaries(
    {"type": st.sampled_from(["advice", "output", "done", "ready"]) | anything},
    optional={"remarks": anything, "exit_code": anything, "id": anything, "reason": anything},
)
frames = st.builds(
    lambda header, parts: frame(header, *parts.items()),
    headers,
    st.dictionaries(names | st.just("result"), st.binary(max_size=50), max_size=4),
)


def assert_well_formed(result: ExecutionResult) -> None:
    assert result.exit_code is None or 0 <= result.exit_code <= 255
    assert result.timed_out is result.out_of_memory is False
    json.dumps([result.result, result.outputs, result.metadata], allow_nan=False).encode()
    (result.stdout + result.stderr).encode()


@settings(max_examples=80, deadline=None, suppress_health_check=_SLOW)
@given(reports=st.lists(frames | st.binary(max_size=60), max_size=6))
def test_whatever_is_reported_there_is_a_verdict(reports: list[bytes], tmp_path: Path) -> None:
    assert_well_formed(told(b"".join(reports)[:60_000], tmp_path))


MALFORMED = {
    "not a number": float("nan"),
    "a pair": [[1, "os"]],
    "an object": {"a": 1},
    "text": "x" * 50_000,
    "a lone surrogate": [[1, "\ud800", "x"]],
    "a line that is text": [["1", "os", "x"]],
    "a line below the first": [[0, "os", "x"]],
    "a name too long": [[1, "x" * 101, "x"]],
    "a control character": [[1, "\x1b[2J", "x"]],
    "nested deeply": json.loads("[" * 900 + "]" * 900),
}


@pytest.mark.parametrize("remarks", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_remark_is_dropped_and_noted(remarks: Any, tmp_path: Path) -> None:
    result = told(frame({"type": "advice", "remarks": remarks}), tmp_path)
    assert_well_formed(result)
    assert (result.exit_code, result.metadata["advice"]) == (0, [])
    assert result.metadata["advice_dropped"] == 1


def test_the_sound_remarks_beside_a_malformed_one_are_kept(tmp_path: Path) -> None:
    result = told(frame({"type": "advice", "remarks": [REMARK, "x", REMARK]}), tmp_path)
    assert result.metadata["advice"] == [REMARK, REMARK]
    assert result.metadata["advice_dropped"] == 1
    assert advice.checked(advice.remarks("import os\neval('1')"))[1] == 0


def test_remarks_that_nobody_asked_for_are_dropped(tmp_path: Path) -> None:
    result = told(frame({"type": "advice", "remarks": [REMARK]}), tmp_path, advised=False)
    assert "advice" not in result.metadata
    assert result.metadata["advice_dropped"] == 1


def test_a_pipe_that_outlives_every_process_is_not_waited_for(bubblewrap: Local) -> None:
    """Its writing end lies in a message on a socket that itself lies in that message."""
    result = bubblewrap.survive(
        """
        import array, os, socket
        print("before", flush=True)
        one, other = socket.socketpair()
        kept = array.array("i", [1, 2, 4, one.fileno(), other.fileno()])
        one.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, kept)])
        os._exit(3)
        """,
        timeout=20,
    )
    assert (result.stdout, result.exit_code, result.timed_out) == ("before\n", 3, False)
    assert result.execution_time < 15


UNREADABLE = {
    "a folder that cannot be entered": ("os.chmod('artifacts/a', 0o444)", "a/x"),
    "a folder that cannot be listed": ("os.chmod('artifacts/a', 0o311)", "a/"),
    "a folder that is closed": ("os.chmod('artifacts/a', 0)", "a/"),
    "a file that cannot be read": ("os.chmod('artifacts/a/x', 0)", "a/x"),
}


@pytest.mark.parametrize(("change", "skipped"), UNREADABLE.values(), ids=UNREADABLE)
def test_what_cannot_be_read_costs_no_other_artifact(
    bubblewrap: Local, change: str, skipped: str
) -> None:
    result = bubblewrap.run(
        f"""
        import os
        os.mkdir("artifacts/a")
        for name in ("a/x", "sound.txt"):
            with open(f"artifacts/{{name}}", "w") as file:
                file.write(name)
        {change}
        """
    )
    assert result.exit_code == 0
    assert [artifact.name for artifact in result.artifacts] == ["sound.txt"]
    assert result.metadata["artifacts_skipped"] == [[skipped, "unreadable"]]


REACHING = {
    "its limits": "resource.prlimit(1, resource.RLIMIT_AS, (0, 0))",
    "its open files": "resource.prlimit(1, resource.RLIMIT_NOFILE, (0, 0))",
    "its priority": "os.setpriority(os.PRIO_PROCESS, 1, 19)",
    "its group's priority": "os.setpriority(os.PRIO_PGRP, 1, 19)",
    "its user's priority": "os.setpriority(os.PRIO_USER, os.getuid(), 19)",
    "its cores": "os.sched_setaffinity(1, {0})",
    "its scheduler": "os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0))",
    "its scheduler's parameters": "os.sched_setparam(1, os.sched_param(0))",
    "its share of the disk": "call(251, 1, 1, 3 << 13)",
    "its group's share of the disk": "call(251, 2, 1, 3 << 13)",
    "its user's share of the disk": "call(251, 3, os.getuid(), 3 << 13)",
    "its memory score": "open('/proc/1/oom_score_adj', 'w').write('1000')",
}
REACH = """
import ctypes, os, resource
libc = ctypes.CDLL(None, use_errno=True)
def call(*arguments):
    if libc.syscall(*arguments) < 0:
        raise OSError(ctypes.get_errno(), "refused")
try:
    {reach}
except OSError as error:
    print(error.errno)
"""


@pytest.mark.parametrize("reach", REACHING.values(), ids=REACHING)
def test_the_supervisor_is_out_of_reach(bubblewrap: Local, reach: str) -> None:
    if "call(" in reach and os.uname().machine != "x86_64":
        pytest.skip("the number is of another architecture")
    result = bubblewrap.run(REACH.format(reach=reach))
    assert (result.stdout, result.exit_code) in (("1\n", 0), ("13\n", 0))


def test_a_program_may_still_change_its_own_limits(local: Local) -> None:
    result = local.run(
        """
        import os, resource
        resource.setrlimit(resource.RLIMIT_NOFILE, (50, 50))
        resource.prlimit(os.getpid(), resource.RLIMIT_CPU, (9, 9))
        os.setpriority(os.PRIO_PROCESS, 0, 5)
        os.sched_setaffinity(0, os.sched_getaffinity(0))
        """
    )
    assert (result.exit_code, result.stderr) == (0, "")


def test_a_sandbox_that_dies_is_a_verdict_on_the_run(own: Local) -> None:
    """As when an administrator ends it, or the kernel."""

    def first_process_of_the_run() -> set[int]:
        found = set()
        for pid in set().union(*map(family, own.tools())):
            with suppress(OSError):
                status = Path(f"/proc/{pid}/status").read_text("utf-8", "replace")
                numbers = status.partition("NSpid:")[2].partition("\n")[0].split()
                if len(numbers) == 3 and numbers[-1] == "1":
                    found.add(pid)
        return {pid for pid in found if any(command(child) == MARK for child in family(pid))}

    def is_running() -> bool:
        return any(command(pid) == MARK for tool in own.tools() for pid in family(tool))

    with ThreadPoolExecutor(1) as threads:
        code = f"import subprocess\nsubprocess.run({MARK})"
        running = threads.submit(own.run, code, timeout=120)
        wait_until(is_running, seconds=60)
        for pid in first_process_of_the_run():
            os.kill(pid, signal.SIGKILL)
        result = running.result(60)
    assert (result.exit_code, result.timed_out, result.out_of_memory) == (137, False, False)
    assert result.metadata[SANDBOX_ENDED] in result.stderr
    assert own.run("print('again')").stdout == "again\n"
