"""What the kernel has counted, in ms: for all processors together, and for processes (proc(5))."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.service import Service, processes_of

TICK_MS = 1000 / os.sysconf("SC_CLK_TCK")


def busy_ms() -> float:
    """Time in which a processor did something for this machine."""
    user, nice, system, _idle, _waiting, interrupts, soft_interrupts, *_ = _counted()
    return (user + nice + system + interrupts + soft_interrupts) * TICK_MS


def stolen_ms() -> float:
    """Time in which a processor had something to do and the machine's host did not let it."""
    return _counted()[7] * TICK_MS


def _counted() -> list[int]:
    first = Path("/proc/stat").read_text().partition("\n")[0]
    return [int(ticks) for ticks in first.split()[1:]]


@dataclass(frozen=True)
class Usage:
    """What a group of processes has used: processor time in ms, and resident memory in MiB."""

    processor_ms: float
    memory_mib: float


def usage_of(pid: int) -> Usage:
    """Read what a process and its ended children have used (proc(5)). One that is gone: nothing."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return Usage(0, 0)
    ticks = sum(int(each) for each in fields[11:15])
    return Usage(ticks * TICK_MS, pages * os.sysconf("SC_PAGE_SIZE") / 2**20)


def service_usage(service: Service) -> dict[str, Usage]:
    """Return what the web process, the pool service and the workers have used."""
    found: dict[str, Usage] = {}
    for pid in processes_of(service):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
        except OSError:
            continue
        for word, part in (("gunicorn", "web"), ("manage.py pool", "pool"), ("qcluster", "worker")):
            if word in command:
                found[part] = add_usage(found.get(part), usage_of(pid))
    return found


def add_usage(first: Usage | None, second: Usage) -> Usage:
    """Return the usage of both together."""
    if first is None:
        return second
    return Usage(first.processor_ms + second.processor_ms, first.memory_mib + second.memory_mib)


def processor_ms_each(
    before: Mapping[str, Usage],
    after: Mapping[str, Usage],
    count: int,
    seconds: float = 0.0,
    idle: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """Return the processor time of each component for one of `count` things, in ms.

    `idle` is what each component uses in a second without them, which is subtracted.
    """
    return {
        name: round(
            (
                after[name].processor_ms
                - before[name].processor_ms
                - (idle or {}).get(name, 0.0) * seconds
            )
            / count,
            2,
        )
        for name in after
        if name in before
    }
