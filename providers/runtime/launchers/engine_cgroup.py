"""The cgroups of containers that an engine has made, where it runs on this machine."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from providers.runtime.guest.processes import read_small
from providers.runtime.pool.cgroup import ROOT, Cgroup, own_groups


class ProcessLimit:
    """The limit of processes and threads of a container's group."""

    def __init__(self, path: Path) -> None:
        self._events = f"{path}/pids.events"

    def refused(self) -> int:
        """How many were refused so far. 0 when the group is gone, with which this goes too."""
        try:
            return int(read_small(self._events).split()[1])
        except OSError:
            return 0


def find_process_limit(
    pid: int, container: str, root: Path = ROOT, proc: Path = Path("/proc")
) -> ProcessLimit | None:
    """That of a container, where the engine runs on this host and lets us read it."""
    with contextlib.suppress(OSError):
        for line in (proc / str(pid) / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            group = root / path.lstrip("/")
            if "pids" in controllers.split(","):
                group = root / "pids" / path.lstrip("/")
            if container in path and (group / "pids.events").exists():
                return ProcessLimit(group)
    return None


class MemoryWatch:
    """Whether memory ran out in a container's group, known also when the group is gone.

    The engine removes the group with the container, and notes the reason only where it learned of
    it before the end, which it sometimes does not.
    """

    def __init__(self, cgroup: Cgroup) -> None:
        self._cgroup = cgroup
        self._signals = 0
        self._eventfd = -1
        if cgroup.version == 1:
            with contextlib.suppress(OSError):
                self._register()

    def ran_out(self) -> bool:
        """As far as it is known now. The kernel's last word comes a moment after the end."""
        if self._cgroup.evidence().out_of_memory:
            return True
        if self._eventfd >= 0:
            with contextlib.suppress(BlockingIOError):
                self._signals += os.eventfd_read(self._eventfd)
        # One signal for each time that memory ran out, and one when the group is removed.
        return self._signals > (0 if self._cgroup.path.exists() else 1)

    def close(self) -> None:
        if self._eventfd >= 0:
            os.close(self._eventfd)
            self._eventfd = -1

    def _register(self) -> None:
        """Documentation/admin-guide/cgroup-v1/memory.rst of Linux, section 10."""
        eventfd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        try:
            control = os.open(self._cgroup.path / "memory.oom_control", os.O_RDONLY | os.O_CLOEXEC)
            try:
                path = self._cgroup.path / "cgroup.event_control"
                path.write_text(f"{eventfd} {control}")
            finally:
                os.close(control)
        except BaseException:
            os.close(eventfd)
            raise
        self._eventfd = eventfd


def find_cgroup(
    pid: int, container: str, root: Path = ROOT, proc: Path = Path("/proc")
) -> Cgroup | None:
    """The memory group of a container, where the engine runs on this host and lets us read it."""
    with contextlib.suppress(OSError):
        groups = {
            name: path for name, path in own_groups(proc, str(pid)).items() if container in path
        }
        if "memory" in groups:
            cpu = groups.get("cpuacct")
            return Cgroup(
                root / "memory" / groups["memory"].lstrip("/"),
                1,
                root / "cpuacct" / cpu.lstrip("/") if cpu else None,
            )
        if "" in groups and (root / "cgroup.controllers").exists():
            return Cgroup(root / groups[""].lstrip("/"), 2)
    return None
