"""A cgroup per sandbox, where this process may make one: the kernel's verdict on memory and time.

Both hierarchies are handled. On cgroup v1 the sandboxes hang below our own memory cgroup, and for
their processor time below our own group of that kind. On v2 they hang below a group of ours at the
top, or below the one that was delegated to us (`systemd-run --user -p Delegate=yes`). A group with
processes in it cannot hand controllers to its children, so that ours are moved to a leaf of it.
Without the right to any, the guest supervisor watches the memory itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import os
import time
from dataclasses import dataclass
from pathlib import Path

from providers.guest.processes import read_small

_ROOT = Path("/sys/fs/cgroup")
_numbers = itertools.count()

# Where the processes of a delegated group go.
_LEAF = "service-of-cofferdam"
_ATTEMPTS = 10

_REMOVALS, _REMOVAL_SECONDS = 100, 0.02


@dataclass(frozen=True)
class Evidence:
    """What is known of a sandbox from outside of it. None where nobody measured.

    `oom_kills` is how often the kernel killed for memory, and `refused_processes` how many
    processes and threads it refused, where it counts that.
    """

    out_of_memory: bool = False
    memory_peak_bytes: int | None = None
    cpu_seconds: float | None = None
    oom_kills: int = 0
    refused_processes: int = 0


class CgroupParent:
    """The group below which this process makes its sandboxes' groups."""

    def __init__(self, path: Path, version: int, cpu: Path | None = None) -> None:
        self.path = path
        self.version = version
        self.cpu = cpu

    @classmethod
    def create(cls, root: Path = _ROOT, proc: Path = Path("/proc")) -> CgroupParent | None:
        """Make our parent group and remove those of dead processes. None if we may not."""
        own = _own_groups(proc)
        # One for each launcher: the one that replaces another is made while that still runs.
        name = f"cofferdam-{os.getpid()}-{next(_numbers)}"
        if (root / "cgroup.controllers").exists():
            delegated = root / own.get("", "/").lstrip("/")
            if delegated.name == _LEAF:
                delegated = delegated.parent
            return cls._create(root / name, 2, None, proc) or (
                cls._create(delegated / name, 2, None, proc) if _make_room(delegated) else None
            )
        cpu = None
        if "cpuacct" in own:
            cpu = root / "cpuacct" / own["cpuacct"].lstrip("/") / name
        return cls._create(root / "memory" / own.get("memory", "").lstrip("/") / name, 1, cpu, proc)

    @classmethod
    def _create(cls, path: Path, version: int, cpu: Path | None, proc: Path) -> CgroupParent | None:
        parent = cls(path, version)
        try:
            _remove_abandoned(path.parent, proc)
            parent.path.mkdir(exist_ok=True)
            if version == 2:
                (parent.path / "cgroup.subtree_control").write_text("+memory")
            probe = parent.new(1 << 30)
            probe.path.rmdir()
        except OSError:
            with contextlib.suppress(OSError):
                parent.path.rmdir()
            return None
        if cpu is not None:
            with contextlib.suppress(OSError):
                _remove_abandoned(cpu.parent, proc)
                cpu.mkdir()
                parent.cpu = cpu
        return parent

    def new(self, memory_bytes: int) -> Cgroup:
        """A group bounded to `memory_bytes`, swap included. Raises OSError."""
        number = str(next(_numbers))
        path = self.path / number
        path.mkdir()
        if self.version == 2:
            (path / "memory.max").write_text(str(memory_bytes))
            bounds = [("memory.swap.max", 0)]
        else:
            (path / "memory.limit_in_bytes").write_text(str(memory_bytes))
            bounds = [
                ("memory.memsw.limit_in_bytes", memory_bytes),
                # Here buffers of TCP are counted only where they are bounded.
                ("memory.kmem.tcp.limit_in_bytes", memory_bytes // 4),
            ]
        for name, bound in bounds:
            if (path / name).exists():
                (path / name).write_text(str(bound))
        cpu = None
        if self.cpu is not None:
            cpu = self.cpu / number
            cpu.mkdir()
        return Cgroup(path, self.version, cpu)

    def remove(self) -> None:
        """Remove the group; its sandboxes' groups are gone by now."""
        for path in (self.path, self.cpu):
            if path is not None:
                with contextlib.suppress(OSError):
                    path.rmdir()


class Cgroup:
    """One sandbox's group. A process joins by writing its id to each of `procs`."""

    def __init__(self, path: Path, version: int, cpu: Path | None = None) -> None:
        self.path = path
        self.version = version
        self._cpu = cpu
        self._events = f"{path}/{'memory.events' if version == 2 else 'memory.oom_control'}"
        self._peak = f"{path}/{'memory.peak' if version == 2 else 'memory.max_usage_in_bytes'}"

    @property
    def procs(self) -> list[str]:
        return [f"{path}/cgroup.procs" for path in (self.path, self._cpu) if path is not None]

    def resize(self, memory_bytes: int) -> None:
        """Bound it to so many bytes from now on, swap included. Raises OSError.

        It is not made smaller than what is in use: version 2 would kill for that.
        """
        if self.version == 2:
            if memory_bytes > (self.memory_bytes() or 0):
                (self.path / "memory.max").write_text(str(memory_bytes))
            return
        both = self.path / "memory.memsw.limit_in_bytes"
        names = [self.path / "memory.limit_in_bytes", *([both] if both.exists() else [])]
        if int(read_small(str(names[0]))) < memory_bytes:
            # Memory alone may never have a larger bound than with swap.
            names.reverse()
        for name in names:
            name.write_text(str(memory_bytes))

    def evidence(self) -> Evidence:
        """Whether the kernel killed for memory here, and the most that was ever in use."""
        try:
            counters = dict(line.split() for line in read_small(self._events).splitlines())
        except OSError:
            return Evidence()
        kills = int(counters.get(b"oom_kill", 0))
        try:
            most = int(read_small(self._peak))
        except OSError:  # memory.peak came with Linux 5.19
            most = None
        return Evidence(kills > 0, most, self.cpu_seconds(), kills)

    def memory_bytes(self) -> int | None:
        """What is in use now, files in memory included, None where nobody counts it."""
        name = "memory.current" if self.version == 2 else "memory.usage_in_bytes"
        try:
            return int(read_small(f"{self.path}/{name}"))
        except (OSError, ValueError):
            return None

    def cpu_seconds(self) -> float | None:
        """What all processes that were ever in it have used, None where nobody counts it."""
        try:
            if self._cpu is not None:
                return int(read_small(f"{self._cpu}/cpuacct.usage")) / 1e9
            if self.version == 2:
                first = read_small(f"{self.path}/cpu.stat").split()
                return int(first[first.index(b"usage_usec") + 1]) / 1e6
        except (OSError, ValueError):
            return None
        return None

    async def remove(self) -> None:
        """Remove the group once its last process has left it, which takes the kernel a moment."""
        for path in (self.path, self._cpu):
            if path is not None:
                await _remove(path)

    def remove_now(self) -> None:
        """The same without an event loop."""
        for path in (self.path, self._cpu):
            for _ in range(_REMOVALS):
                if path is None or _removed(path):
                    break
                time.sleep(_REMOVAL_SECONDS)


async def _remove(path: Path) -> None:
    for _ in range(_REMOVALS):
        if _removed(path):
            return
        await asyncio.sleep(_REMOVAL_SECONDS)


def _removed(path: Path) -> bool:
    try:
        path.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def memory_keeper(parent: CgroupParent | None) -> dict[str, str]:
    """Who bounds memory and measures time below `parent`, in words for those who read results."""
    if parent is None:
        return {"memory": "supervisor and rlimits", "cpu_seconds": "supervisor"}
    counted = parent.version == 2 or parent.cpu is not None
    name = f"cgroup v{parent.version}"
    return {"memory": name, "cpu_seconds": name if counted else "supervisor"}


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
        groups = {
            name: path for name, path in _own_groups(proc, str(pid)).items() if container in path
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


def _own_groups(proc: Path, pid: str = "self") -> dict[str, str]:
    """The group of a process by controller; that of version 2 has no name. Raises OSError."""
    groups: dict[str, str] = {}
    for line in (proc / pid / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        groups |= dict.fromkeys(controllers.split(","), path)
    return groups


def _make_room(group: Path) -> bool:
    """Have a delegated group hand out memory. False where it is not ours.

    Every process in it goes to a leaf: the service's others are as much its own as we are.
    """
    leaf = group / _LEAF
    try:
        leaf.mkdir(exist_ok=True)
        for _ in range(_ATTEMPTS):
            for pid in (group / "cgroup.procs").read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    (leaf / "cgroup.procs").write_text(pid)
            try:
                (group / "cgroup.subtree_control").write_text("+memory")
                return True
            except OSError as error:
                # Something was started there meanwhile.
                if error.errno != errno.EBUSY:
                    raise
    except OSError:
        with contextlib.suppress(OSError):
            leaf.rmdir()
    return False


def _remove_abandoned(base: Path, proc: Path) -> None:
    for path in base.glob("cofferdam-*"):
        if not (proc / path.name.split("-")[1]).exists():
            for child in path.iterdir():
                if child.is_dir():
                    with contextlib.suppress(OSError):
                        child.rmdir()
            with contextlib.suppress(OSError):
                path.rmdir()
