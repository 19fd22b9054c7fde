"""How much memory the service needs: the same concurrent runs within smaller and smaller groups.

Each line is a memory cgroup of that size, with nothing but this program and a service in it. Ten
callers at once run a program that holds 64 MiB for a second. `idle` is the memory of all processes
of the service before the first run (PSS), its sandboxes apart, `peak` the most that the group had,
files it read included. Needs root.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from benchmarks.service import Service, own_memory, running_service

CALLERS = 10
PROGRAM = "import time\nheld = bytearray(64 << 20)\ntime.sleep(1)"
_CGROUPS = Path("/sys/fs/cgroup")
_UNIFIED = (_CGROUPS / "cgroup.controllers").exists()
_TOP = _CGROUPS if _UNIFIED else _CGROUPS / "memory"
_LIMIT, _PEAK = (
    ("memory.max", "memory.peak")
    if _UNIFIED
    else ("memory.limit_in_bytes", "memory.max_usage_in_bytes")
)


@contextmanager
def within(mebibytes: int) -> Iterator[Path]:
    """This process, and all that it starts, in a group with so much memory. Raises OSError."""
    group = _TOP / f"cofferdam-bench-{os.getpid()}"
    before = _TOP / _own_group().lstrip("/") / "cgroup.procs"
    group.mkdir()
    try:
        (group / _LIMIT).write_text(str(mebibytes << 20))
        (group / "cgroup.procs").write_text(str(os.getpid()))
        yield group
    finally:
        before.write_text(str(os.getpid()))
        _remove(group)


def _own_group() -> str:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "" if _UNIFIED else "memory" in controllers.split(","):
            return path
    raise OSError("no memory cgroup")


def _remove(group: Path) -> None:
    """Remove it with what the service made in it, once the last process has ended."""
    deadline = time.monotonic() + 30
    while True:
        try:
            for each in sorted(group.glob("**/"), key=lambda path: -len(path.parts)):
                each.rmdir()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
        else:
            return


def call(service: Service) -> tuple[str, float]:
    """The status of one run, and its seconds."""
    began = time.perf_counter()
    connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=120)
    headers = {"X-API-Key": service.api_key, "Content-Type": "application/json"}
    body = json.dumps({"code": PROGRAM})
    try:
        connection.request("POST", "/api/v1/executions?fields=status", body, headers)
        answer = json.loads(connection.getresponse().read())
    except OSError as error:
        return type(error).__name__, time.perf_counter() - began
    finally:
        connection.close()
    status = answer.get("status") or answer["error"]["code"]
    return status, time.perf_counter() - began


def measured(mebibytes: int) -> str:
    with (
        tempfile.TemporaryDirectory(prefix="cofferdam-bench-") as folder,
        within(mebibytes) as group,
        running_service(Path(folder), {}, DOCKER_HOST="unix:///nowhere/docker.sock") as service,
    ):
        time.sleep(5)
        _, idle = own_memory(service)
        with ThreadPoolExecutor(CALLERS) as callers:
            answers = list(callers.map(lambda _: call(service), range(2 * CALLERS)))
        peak = int((group / _PEAK).read_text()) >> 20
    ends = ", ".join(
        f"{count} {status}" for status, count in Counter(a for a, _ in answers).items()
    )
    seconds = [taken for _, taken in answers]
    return (
        f"{mebibytes:6} MiB: idle {idle:4.0f} MiB, peak {peak:5} MiB, {ends}, "
        f"median {statistics.median(seconds):.1f} s, longest {max(seconds):.1f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, nargs="+", default=[4096, 2048, 1536, 1024])
    for mebibytes in parser.parse_args().mib:
        print(measured(mebibytes), flush=True)


if __name__ == "__main__":
    main()
