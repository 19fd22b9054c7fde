"""How much a program in a container can use: files, processes, memory, CPU and time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from providers.errors import ProviderUnavailable
from providers.values import SANDBOX_ENDED, Job
from tests.support.docker_engine import Containers

SPACE, FILE_SIZE, OPEN_FILES = 8 << 20, 1 << 20, 64
LOOKS = {
    "a file": """
        import errno, json
        written = 0
        try:
            with open("big", "wb", buffering=0) as file:
                while True:
                    written += file.write(bytes(1 << 16))
        except OSError as error:
            print(json.dumps([written, errno.errorcode[error.errno]]))
    """,
    "open files": """
        import errno, json, os
        files = []
        try:
            while True:
                files.append(open("/dev/null"))
        except OSError as error:
            count = len(files)
            files.clear()
            print(json.dumps([count, errno.errorcode[error.errno]]))
    """,
    **{
        folder: f"""
        import errno, itertools, json, os
        if os.path.exists("big"):
            os.unlink("big")
        written = 0
        try:
            for number in itertools.count():
                with open(f"{folder}/{{number}}", "wb", buffering=0) as file:
                    for _ in range({FILE_SIZE} >> 16):
                        written += file.write(bytes(1 << 16))
        except OSError as error:
            print(json.dumps([written, errno.errorcode[error.errno]]))
        """
        for folder in ("/workspace", "/tmp", "/dev/shm")
    },
}


@pytest.fixture(scope="module", params=["runc", "runsc"])
def seen(
    request: pytest.FixtureRequest, containers_of: Callable[[str], Containers]
) -> dict[str, Any]:
    """What programs in a container of each runtime have found its bounds to be."""
    containers = containers_of(request.param)
    sandbox = containers.start(workspace_bytes=SPACE, file_bytes=FILE_SIZE, open_files=OPEN_FILES)
    try:
        return containers.look_at_all_in(sandbox, LOOKS)
    finally:
        containers.loop.call(sandbox.destroy())


@pytest.mark.parametrize("folder", ["/workspace", "/tmp", "/dev/shm"])
def test_a_folder_that_is_full_refuses_more(seen: dict[str, Any], folder: str) -> None:
    written, error = seen[folder]
    assert error == "ENOSPC"
    assert SPACE * 0.9 < written <= SPACE


def test_a_file_does_not_grow_over_its_limit(seen: dict[str, Any]) -> None:
    assert seen["a file"] == [FILE_SIZE, "EFBIG"]


def test_only_so_many_files_are_open_at_once(seen: dict[str, Any]) -> None:
    count, error = seen["open files"]
    assert error == "EMFILE"
    assert 40 < count < OPEN_FILES


def test_a_fork_bomb_ends_at_the_process_limit(under_runc: Containers) -> None:
    count = under_runc.look(
        """
        import json, os, time
        count = 0
        try:
            while True:
                if os.fork() == 0:
                    time.sleep(60)
                count += 1
        except OSError:
            print(json.dumps(count))
        """,
        processes=32,
    )
    assert 16 < count <= 32


def test_a_fork_bomb_under_gvisor_stays_in_its_container(under_gvisor: Containers) -> None:
    """gVisor's kernel counts the processes; what they cost it may be more memory than there is."""
    neighbour = under_gvisor.start()
    bomb = under_gvisor.start()
    code = "import os\nwhile True: os.fork()"
    result = under_gvisor.run_in(bomb, code, timeout=2)
    assert result.out_of_memory or result.timed_out or result.exit_code == 1
    assert SANDBOX_ENDED not in result.metadata
    assert under_gvisor.run_in(neighbour, "print('undisturbed')").stdout == "undisturbed\n"
    for sandbox in (bomb, neighbour):
        under_gvisor.loop.call(sandbox.destroy())


def test_only_so_much_memory_can_be_used_and_no_swap(containers: Containers) -> None:
    memory = 128 * 1024 * 1024
    sandbox = containers.start(memory_bytes=memory)
    (container,) = containers.present()
    result = containers.run_in(
        sandbox, "data = [bytearray(1 << 20) for _ in range(1000)]\nprint(len(data))"
    )
    containers.loop.call(sandbox.destroy())
    assert (result.out_of_memory, result.exit_code, result.stdout) == (True, None, "")
    # gVisor's kernel needs some for itself.
    extra = (64 << 20) if containers.launcher.runtime == "gvisor" else 0
    host = container.attrs["HostConfig"]
    assert host["Memory"] == host["MemorySwap"] == memory + extra


def test_files_in_the_workspace_count_as_memory(under_runc: Containers) -> None:
    result = under_runc.run(
        """
        for number in range(8):
            with open(f"file{number}", "wb") as file:
                file.write(bytes(10 << 20))
        print("written")
        """,
        memory_bytes=64 << 20,
    )
    assert (result.out_of_memory, result.stdout) == (True, "")


def test_text_that_looks_like_a_lack_of_memory_is_no_evidence(containers: Containers) -> None:
    result = containers.run("import sys\nprint('MemoryError', file=sys.stderr)\nsys.exit(137)")
    assert (result.out_of_memory, result.exit_code) == (False, 137)


def test_two_processes_share_one_cpu(containers: Containers) -> None:
    sandbox = containers.start()
    pid = containers.present()[0].attrs["State"]["Pid"]
    code = "import os\nprint('begun', flush=True)\nos.fork()\nwhile True: pass"
    began = threading.Event()
    # Ended as soon as it was measured.
    running = containers.loop.submit(sandbox.run(Job(code, "python", 60), lambda _: began.set()))
    assert began.wait(60)
    since, before = time.monotonic(), cpu_seconds(pid)
    time.sleep(1.5)
    used = (cpu_seconds(pid) - before) / (time.monotonic() - since)
    containers.loop.call(sandbox.destroy())
    with pytest.raises(ProviderUnavailable):
        running.result(60)
    assert 0.05 < used < 1.2


def cpu_seconds(pid: int) -> float:
    """CPU time of all processes in the control group of a process."""
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "cpuacct" in controllers.split(","):
            usage = Path(f"/sys/fs/cgroup/cpuacct{path}/cpuacct.usage")
            return int(usage.read_text()) / 1e9
        if not controllers and (stat := Path(f"/sys/fs/cgroup{path}/cpu.stat")).exists():
            return (
                int(dict(row.split() for row in stat.read_text().splitlines())["usage_usec"]) / 1e6
            )
    raise AssertionError("the process has no CPU accounting")


def test_a_program_that_stops_itself_is_timed_out(containers: Containers) -> None:
    result = containers.run("import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)", timeout=1)
    assert (result.timed_out, result.exit_code) == (True, None)
