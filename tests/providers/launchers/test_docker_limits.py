"""How much a program in a container can use: files, processes, memory, CPU and time."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from providers.values import SANDBOX_ENDED
from tests.support.docker_engine import Containers


@pytest.mark.parametrize("folder", ["/workspace", "/tmp", "/dev/shm"])
def test_a_folder_that_is_full_refuses_more(containers: Containers, folder: str) -> None:
    size = 8 * 1024 * 1024
    written, error = containers.look(
        f"""
        import errno, json
        written = 0
        try:
            with open({folder + "/big"!r}, "wb", buffering=0) as file:
                while True:
                    written += file.write(bytes(1 << 16))
        except OSError as error:
            print(json.dumps([written, errno.errorcode[error.errno]]))
        """,
        workspace_bytes=size,
    )
    assert error == "ENOSPC"
    assert size * 0.9 < written <= size


def test_a_file_does_not_grow_over_its_limit(containers: Containers) -> None:
    assert containers.look(
        """
        import errno, json
        written = 0
        try:
            with open("big", "wb", buffering=0) as file:
                while True:
                    written += file.write(bytes(1 << 16))
        except OSError as error:
            print(json.dumps([written, errno.errorcode[error.errno]]))
        """,
        file_bytes=1 << 20,
    ) == [1 << 20, "EFBIG"]


def test_only_so_many_files_are_open_at_once(containers: Containers) -> None:
    count, error = containers.look(
        """
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
        open_files=64,
    )
    assert error == "EMFILE"
    assert 40 < count < 64


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
    result = under_gvisor.run_in(bomb, code, timeout=8)
    assert result.out_of_memory or result.timed_out or result.exit_code == 1
    assert SANDBOX_ENDED not in result.metadata
    assert under_gvisor.run_in(neighbour, "print('undisturbed')").stdout == "undisturbed\n"
    for sandbox in (bomb, neighbour):
        under_gvisor.loop.call(sandbox.destroy())


def test_only_so_much_memory_can_be_used_and_no_swap(containers: Containers) -> None:
    memory = 128 * 1024 * 1024
    result = containers.run(
        "data = [bytearray(1 << 20) for _ in range(1000)]\nprint(len(data))", memory_bytes=memory
    )
    assert (result.out_of_memory, result.exit_code, result.stdout) == (True, None, "")
    sandbox = containers.start(memory_bytes=memory)
    host = containers.present()[0].attrs["HostConfig"]
    containers.loop.call(sandbox.destroy())
    # gVisor's kernel needs some for itself.
    extra = (64 << 20) if containers.launcher.runtime == "gvisor" else 0
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
    code = "import os\nos.fork()\nwhile True: pass"
    running = threading.Thread(
        target=containers.run_in, args=(sandbox, code), kwargs={"timeout": 4}
    )
    running.start()
    time.sleep(0.5)
    began, before = time.monotonic(), cpu_seconds(pid)
    time.sleep(2)
    used = (cpu_seconds(pid) - before) / (time.monotonic() - began)
    running.join()
    containers.loop.call(sandbox.destroy())
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
