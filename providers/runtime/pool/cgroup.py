"""A cgroup per sandbox, where we may make one: the kernel's verdict on memory and time, and a
weight by which idle sandboxes yield the processors.

Both hierarchies are handled. On cgroup v1 the sandboxes hang below our own memory cgroup, and for
their processor time below our own group of that kind. On v2 they hang below a group of ours at the
top, or below the one that was delegated to us (`systemd-run --user -p Delegate=yes`). A group with
processes in it cannot hand controllers to its children, so that ours are moved to a leaf of it.
Without the right to any, the guest supervisor watches the memory itself.

The weights are the kernel's own: every sandbox's group has a weight, which is small unless
something of a caller's runs in it. The group above them has the sum of theirs, so that beside the
service a sandbox counts like one process. It has a bound: the kernel gives the whole weight to
those that run, and a hundred idle sessions would let the program in one of them starve the service.
On v1 the service's processes are weighed one by one, and the bound is that of one per processor. On
v2 they are a group themselves, and the bound is the weight of a group. Nothing is held back while a
processor has nothing else to do.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import itertools
import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

from providers.runtime.guest.processes import read_small

ROOT = Path("/sys/fs/cgroup")
_numbers = itertools.count()

# Where the processes of a delegated group go.
_LEAF = "service-of-cofferdam"
_ATTEMPTS = 10

_REMOVALS, _REMOVAL_SECONDS = 100, 0.02


@dataclass(frozen=True)
class ResourceUsage:
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
        self.weights: Weights | None = None
        self._held: dict[tuple[int, int], int] = {}

    @classmethod
    def create(cls, root: Path = ROOT, proc: Path = Path("/proc")) -> CgroupParent | None:
        """Make our parent group and remove those of dead processes. None if we may not."""
        own = own_groups(proc)
        # One for each launcher: the one that replaces another is made while that still runs. In
        # another container a process may have our id.
        name = f"cofferdam-{os.getpid()}-{secrets.token_hex(4)}"
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
        memory = root / "memory" / own.get("memory", "").lstrip("/") / name
        found = cls._create(memory, 1, cpu, proc)
        if found is not None and "cpu" in own:
            # Often the same group as that of the time used, under another name.
            found._weigh(root / "cpu" / own["cpu"].lstrip("/") / name, proc)
        return found

    @classmethod
    def _create(cls, path: Path, version: int, cpu: Path | None, proc: Path) -> CgroupParent | None:
        parent = cls(path, version)
        try:
            parent._make_own(path, proc)
            if version == 2:
                (parent.path / "cgroup.subtree_control").write_text("+memory")
                parent._weigh(parent.path, proc)
            probe = parent.new(1 << 30)
            probe.path.rmdir()
        except OSError:
            parent.remove()
            return None
        if cpu is not None:
            with contextlib.suppress(OSError):
                parent._make_own(cpu, proc)
                parent.cpu = cpu
        return parent

    def _make_own(self, path: Path, proc: Path) -> None:
        """Make a group that is held as long as this process lives, and remove those of dead ones.

        Held by a lock: a process id means nothing to who has process ids of its own, as in another
        container. Raises OSError.
        """
        _remove_abandoned(path.parent, proc)
        for _ in range(_ATTEMPTS):
            path.mkdir(exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                # The same group may be there under two names.
                if _identity(path) in self._held:
                    return
                handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                fcntl.flock(handle, fcntl.LOCK_EX)
                self._held[_identity(handle)] = handle
                # Until the lock was ours it was there to be removed.
                if _identity(path) in self._held:
                    return
        raise FileNotFoundError(path)

    def _weigh(self, path: Path, proc: Path) -> None:
        """Have the groups below `path` weighed against each other, where that can be."""
        with contextlib.suppress(OSError):
            if self.version == 2:
                for group in (path.parent, path):
                    if "cpu" not in (group / "cgroup.controllers").read_text().split():
                        return
                    (group / "cgroup.subtree_control").write_text("+cpu")
            else:
                self._make_own(path, proc)
            self.weights = Weights(path, self.version)

    def new(self, memory_bytes: int) -> Cgroup:
        """A group bounded to `memory_bytes`, swap included. Raises OSError.

        What is in it yields the processors until it is told not to.
        """
        number = str(next(_numbers))
        try:
            return self._new(number, memory_bytes)
        except OSError:
            for parent in (self.path, self.cpu, self.weights.parent if self.weights else None):
                if parent is not None:
                    with contextlib.suppress(OSError):
                        (parent / number).rmdir()
            raise

    def _new(self, number: str, memory_bytes: int) -> Cgroup:
        path = self.path / number
        path.mkdir()
        if self.version == 2:
            _write(f"{path}/memory.max", memory_bytes)
            bounds = [("memory.swap.max", 0)]
        else:
            _write(f"{path}/memory.limit_in_bytes", memory_bytes)
            bounds = [
                ("memory.memsw.limit_in_bytes", memory_bytes),
                # Here buffers of TCP are counted only where they are bounded.
                ("memory.kmem.tcp.limit_in_bytes", memory_bytes // 4),
            ]
        for name, bound in bounds:
            if os.path.exists(f"{path}/{name}"):
                _write(f"{path}/{name}", bound)
        cpu = None
        if self.cpu is not None:
            cpu = self.cpu / number
            cpu.mkdir()
        if self.weights is None:
            return Cgroup(path, self.version, cpu)
        weighed = self.weights.parent / number
        weighed.mkdir(exist_ok=True)
        self.weights.add(weighed)
        return Cgroup(path, self.version, cpu, self.weights, weighed)

    def hurry(self, *, is_wanted: bool) -> None:
        """While somebody waits for what is being made, it does not yield."""
        if self.weights is not None:
            self.weights.hurry(is_wanted=is_wanted)

    def remove(self) -> None:
        """Remove the group; its sandboxes' groups are gone by now."""
        weighed = self.weights.parent if self.weights else None
        for path in (self.path, self.cpu, weighed):
            if path is not None:
                with contextlib.suppress(OSError):
                    path.rmdir()
        while self._held:
            os.close(self._held.popitem()[1])


class Cgroup:
    """One sandbox's group. A process joins by writing its id to each of `procs`."""

    def __init__(
        self,
        path: Path,
        version: int,
        cpu: Path | None = None,
        weights: Weights | None = None,
        weighed: Path | None = None,
    ) -> None:
        self.path = path
        self.version = version
        self._cpu = cpu
        self._weights = weights
        self._weighed = weighed
        # On version 2 all of them are one, and often two of them on version 1.
        self._folders: list[Path] = []
        for each in (path, cpu, weighed):
            if each is not None and not any(_is_same(each, other) for other in self._folders):
                self._folders.append(each)
        self._events = f"{path}/{'memory.events' if version == 2 else 'memory.oom_control'}"
        self._peak = f"{path}/{'memory.peak' if version == 2 else 'memory.max_usage_in_bytes'}"

    @property
    def procs(self) -> list[str]:
        return [f"{path}/cgroup.procs" for path in self._folders]

    def yield_processors(self, *, yields: bool) -> None:
        """Whether what is in it lets those go first that run something, from now on."""
        if self._weights is not None and self._weighed is not None:
            self._weights.set(self._weighed, yields=yields)

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

    def evidence(self) -> ResourceUsage:
        """Whether the kernel killed for memory here, and the most that was ever in use."""
        try:
            counters = dict(line.split() for line in read_small(self._events).splitlines())
        except OSError:
            return ResourceUsage()
        kills = int(counters.get(b"oom_kill", 0))
        try:
            most = int(read_small(self._peak))
        except OSError:  # memory.peak came with Linux 5.19
            most = None
        return ResourceUsage(kills > 0, most, self.cpu_seconds(), kills)

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
        self._weigh_no_more()
        for path in self._folders:
            await _remove(path)

    def remove_now(self) -> None:
        """The same without an event loop."""
        self._weigh_no_more()
        for path in self._folders:
            for _ in range(_REMOVALS):
                if _removed(path):
                    break
                time.sleep(_REMOVAL_SECONDS)

    def _weigh_no_more(self) -> None:
        if self._weights is not None and self._weighed is not None:
            self._weights.forget(self._weighed)


def _is_same(one: Path, other: Path) -> bool:
    if one == other:
        return True
    try:
        return os.path.samefile(one, other)
    except FileNotFoundError:
        return False


def _write(path: str, number: int) -> None:
    """Write a file of the kernel's, as `read_small` reads one. Raises OSError."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        os.write(fd, b"%d" % number)
    finally:
        os.close(fd)


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


def machine_memory(root: Path = ROOT, proc: Path = Path("/proc")) -> int:
    """Bytes that this process and all it starts can have: the machine's, or a group's around it.

    Raises OSError where the machine does not say.
    """
    words = (proc / "meminfo").read_text().partition("MemTotal:")[2].split()
    found = [int(words[0]) * 1024]
    own = own_groups(proc)
    if (root / "cgroup.controllers").exists():
        top, path, name = root, own.get("", "/"), "memory.max"
    else:
        top, path, name = root / "memory", own.get("memory", "/"), "memory.limit_in_bytes"
    group = top / path.lstrip("/")
    # In a container the path may be another one than what is mounted.
    for each in (group, *group.parents):
        if each.is_relative_to(top):
            with contextlib.suppress(OSError, ValueError):
                found.append(int(read_small(f"{each}/{name}")))
    return min(found)


def memory_keeper(parent: CgroupParent | None) -> dict[str, str]:
    """Who bounds memory and measures time below `parent`, in words for those who read results."""
    if parent is None:
        return {"memory": "supervisor and rlimits", "cpu_seconds": "supervisor"}
    counted = parent.version == 2 or parent.cpu is not None
    name = f"cgroup v{parent.version}"
    return {"memory": name, "cpu_seconds": name if counted else "supervisor"}


def own_groups(proc: Path, pid: str = "self") -> dict[str, str]:
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


def _identity(path: Path | int) -> tuple[int, int]:
    found = os.stat(path)
    return found.st_dev, found.st_ino


def _remove_abandoned(base: Path, proc: Path) -> None:
    for path in base.glob("cofferdam-*"):
        if not (proc / path.name.split("-")[1]).exists():
            with contextlib.suppress(OSError):
                _remove_unheld(path)


def _remove_unheld(path: Path) -> None:
    """Remove a group that no process holds, with what is empty in it. Raises OSError."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for child in path.iterdir():
            if child.is_dir():
                with contextlib.suppress(OSError):
                    child.rmdir()
        path.rmdir()
    finally:
        os.close(handle)


# By version of cgroups: the file, the weight of one that runs (the kernel's default, of a process
# too), and that of one that yields.
_FILES = {1: ("cpu.shares", 1024, 128), 2: ("cpu.weight", 100, 12)}


class Weights:
    """Those of the groups below `parent`."""

    def __init__(self, parent: Path, version: int) -> None:
        """Raises OSError where the kernel weighs nothing there."""
        self.parent = parent
        self._name, self._full, self._small = _FILES[version]
        self._most = self._full * (len(os.sched_getaffinity(0)) if version == 1 else 1)
        self._yields: dict[Path, bool] = {}
        # Until there is a pool, somebody waits for each: it is tried whether any can be made.
        self._hurried = True
        self._sum = 0
        _write(f"{parent}/{self._name}", self._full)

    def add(self, group: Path) -> None:
        """A new group, which yields from the start."""
        self._yields[group] = True
        self._weigh(group)

    def set(self, group: Path, *, yields: bool) -> None:
        """Whether this one yields, from now on."""
        if self._yields.get(group, yields) != yields:
            self._yields[group] = yields
            self._weigh(group)

    def hurry(self, *, is_wanted: bool) -> None:
        """While somebody waits for what is being made, nothing yields."""
        if is_wanted != self._hurried:
            self._hurried = is_wanted
            for group in [each for each, yields in self._yields.items() if yields]:
                self._weigh(group)

    def forget(self, group: Path) -> None:
        """One that is about to be removed."""
        if self._yields.pop(group, None) is not None:
            self._weigh_parent()

    def _weigh(self, group: Path) -> None:
        # What has ended meanwhile weighs nothing.
        with contextlib.suppress(OSError):
            yields = self._yields[group] and not self._hurried
            _write(f"{group}/{self._name}", self._small if yields else self._full)
        self._weigh_parent()

    def _weigh_parent(self) -> None:
        small = 0 if self._hurried else sum(self._yields.values())
        total = small * self._small + (len(self._yields) - small) * self._full
        total = min(self._most, max(self._small, total))
        if total != self._sum:
            self._sum = total
            with contextlib.suppress(OSError):
                _write(f"{self.parent}/{self._name}", total)
