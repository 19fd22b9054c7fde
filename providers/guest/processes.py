"""The other processes of the sandbox: counted, measured, ended."""

import os
import resource


def others() -> "list[int]":
    """Every other process of the sandbox.

    Process 1 sees only its own namespace. Without one (the unisolated opt-out) the sandbox is
    what descends from us.
    """
    present = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    if os.getpid() == 1:
        return [pid for pid in present if pid != 1]
    parents = {}
    for pid in present:
        try:
            with open(f"/proc/{pid}/stat", "rb") as stat:
                parents[pid] = int(stat.read().rpartition(b")")[2].split()[1])
        except OSError:
            continue
    family = {os.getpid()}
    grown = True
    while grown:
        grown = False
        for pid, parent in parents.items():
            if parent in family and pid not in family:
                family.add(pid)
                grown = True
    return sorted(family - {os.getpid()})


def kill_others() -> bool:
    """SIGKILL to every other process of the sandbox. False when there is none."""
    if os.getpid() == 1:
        try:
            os.kill(-1, 9)
        except ProcessLookupError:
            return False
        return True
    found = others()
    for pid in found:
        try:
            os.kill(pid, 9)
        except ProcessLookupError:
            continue
    return bool(found)


def memory_in_use(limit: int) -> int:
    """Bytes of memory that all other processes have to themselves.

    Used where no cgroup bounds the memory. The cheap figure counts pages that are shared
    copy-on-write once per process, so above `limit` the exact one is asked for.
    """
    pids = others()
    rough = sum(_unshared_pages(pid) for pid in pids) * resource.getpagesize()
    return rough if rough <= limit else sum(_proportional_bytes(pid) for pid in pids)


def _unshared_pages(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm", "rb") as statm:
            fields = statm.read().split()
    except OSError:
        return 0
    return int(fields[1]) - int(fields[2])


def _proportional_bytes(pid: int) -> int:
    """Anonymous memory, with what is shared divided among those who share it."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as rollup:
            for line in rollup:
                if line.startswith(b"Pss_Anon:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        return _unshared_pages(pid) * resource.getpagesize()
    return 0


def cpu_seconds(pid: int) -> float:
    """CPU time a single-threaded process has used; 0 where the kernel does not tell (gVisor)."""
    try:
        with open(f"/proc/{pid}/schedstat", "rb") as schedstat:
            return int(schedstat.read().split()[0]) / 1e9
    except OSError:
        return 0.0
