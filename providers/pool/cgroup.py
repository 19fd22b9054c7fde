"""A memory cgroup per sandbox, where this process may make one: the kernel's verdict on memory.

Both hierarchies are handled. On cgroup v1 the sandboxes hang below our own memory cgroup; on v2
below a group of ours at the top, because a group with processes in it cannot hand controllers to
its children. Without the right to either, the guest supervisor watches the memory itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from dataclasses import dataclass
from pathlib import Path

from providers.guest.processes import read_small

_ROOT = Path("/sys/fs/cgroup")
_numbers = itertools.count()


@dataclass(frozen=True)
class Evidence:
    """What is known of a sandbox from outside of it. None where nobody measured."""

    out_of_memory: bool = False
    memory_peak_bytes: int | None = None


class CgroupParent:
    """The group below which this process makes its sandboxes' groups."""

    def __init__(self, path: Path, version: int) -> None:
        self.path = path
        self.version = version

    @classmethod
    def create(cls, root: Path = _ROOT, proc: Path = Path("/proc")) -> CgroupParent | None:
        """Make our parent group and remove those of dead processes. None if we may not."""
        version = 2 if (root / "cgroup.controllers").exists() else 1
        base = root
        if version == 1:
            base = root / "memory"
            for line in (proc / "self/cgroup").read_text().splitlines():
                _, controllers, path = line.split(":", 2)
                if "memory" in controllers.split(","):
                    base = base / path.lstrip("/")
        # One for each launcher: the one that replaces another is made while that still runs.
        parent = cls(base / f"cofferdam-{os.getpid()}-{next(_numbers)}", version)
        try:
            _remove_abandoned(base, proc)
            parent.path.mkdir(exist_ok=True)
            if version == 2:
                (parent.path / "cgroup.subtree_control").write_text("+memory")
            probe = parent.new(1 << 30)
            probe.path.rmdir()
        except OSError:
            with contextlib.suppress(OSError):
                parent.path.rmdir()
            return None
        return parent

    def new(self, memory_bytes: int) -> Cgroup:
        """A group bounded to `memory_bytes`, swap included. Raises OSError."""
        path = self.path / str(next(_numbers))
        path.mkdir()
        if self.version == 2:
            (path / "memory.max").write_text(str(memory_bytes))
            bounds = ["memory.swap.max", "0"]
        else:
            (path / "memory.limit_in_bytes").write_text(str(memory_bytes))
            bounds = ["memory.memsw.limit_in_bytes", str(memory_bytes)]
        if (path / bounds[0]).exists():
            (path / bounds[0]).write_text(bounds[1])
        return Cgroup(path, self.version)

    def remove(self) -> None:
        """Remove the group; its sandboxes' groups are gone by now."""
        with contextlib.suppress(OSError):
            self.path.rmdir()


class Cgroup:
    """One sandbox's group. A process joins by writing its id to `procs`."""

    def __init__(self, path: Path, version: int) -> None:
        self.path = path
        self.version = version
        self._events = f"{path}/{'memory.events' if version == 2 else 'memory.oom_control'}"
        self._peak = f"{path}/{'memory.peak' if version == 2 else 'memory.max_usage_in_bytes'}"

    @property
    def procs(self) -> str:
        return str(self.path / "cgroup.procs")

    def evidence(self) -> Evidence:
        """Whether the kernel killed for memory here, and the most that was ever in use."""
        try:
            counters = dict(line.split() for line in read_small(self._events).splitlines())
        except OSError:
            return Evidence()
        try:
            most = int(read_small(self._peak))
        except OSError:  # memory.peak came with Linux 5.19
            return Evidence(out_of_memory=int(counters.get(b"oom_kill", 0)) > 0)
        return Evidence(int(counters.get(b"oom_kill", 0)) > 0, most)

    async def remove(self) -> None:
        """Remove the group once its last process has left it, which takes the kernel a moment."""
        for _ in range(100):
            try:
                self.path.rmdir()
                return
            except FileNotFoundError:
                return
            except OSError:
                await asyncio.sleep(0.02)


class ProcessLimit:
    """The limit of processes and threads of a container's group."""

    def __init__(self, path: Path) -> None:
        self._events = f"{path}/pids.events"

    def reached(self) -> bool:
        """Whether one was refused. False when the group is gone, with which this goes too."""
        try:
            return int(read_small(self._events).split()[1]) > 0
        except OSError:
            return False


def find_process_limit(
    pid: int, container: str, root: Path = _ROOT, proc: Path = Path("/proc")
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
    pid: int, container: str, root: Path = _ROOT, proc: Path = Path("/proc")
) -> Cgroup | None:
    """The memory group of a container, where the engine runs on this host and lets us read it."""
    with contextlib.suppress(OSError):
        for line in (proc / str(pid) / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if container not in path:
                continue
            if "memory" in controllers.split(","):
                return Cgroup(root / "memory" / path.lstrip("/"), 1)
            if not controllers and (root / "cgroup.controllers").exists():
                return Cgroup(root / path.lstrip("/"), 2)
    return None


def _remove_abandoned(base: Path, proc: Path) -> None:
    for path in base.glob("cofferdam-*"):
        if not (proc / path.name.split("-")[1]).exists():
            for child in path.iterdir():
                if child.is_dir():
                    with contextlib.suppress(OSError):
                        child.rmdir()
            with contextlib.suppress(OSError):
                path.rmdir()
