"""The processes that come from one: found, measured, ended.

To it belong its descendants, and whoever is in its session or process group. What has left both
and outlived its parent has still the mark of the program that it comes from, where that has one. By
no mark it is found by nobody but `kill_others`, at a reset or at the end.
"""

import itertools
import os
import resource

from .processes import read_small

_PAGE = os.sysconf("SC_PAGE_SIZE")
# What forks faster than it is looked for is left to the bound of processes.
ROUNDS = 50
# A limit that means nothing to a program without realtime scheduling, and is inherited: it can be
# lowered and never raised. `resource` has no name for it everywhere.
_RLIMIT_RTTIME = 15
_marks = itertools.count(1 << 61)


class Mark:
    """What the processes of one program have in common, however they were started.

    The group that the program was given, or else a limit of its own.
    """

    def __init__(self, group: "int | None") -> None:
        self._limit = next(_marks)
        self._group = None if group is None else b"%d" % group

    def put_on(self) -> None:
        """Mark this process, and with it all that it starts."""
        if self._group is None:
            try:
                resource.setrlimit(_RLIMIT_RTTIME, (self._limit, self._limit))
            except (OSError, ValueError):
                # Nothing is lost but the mark: somebody has set a lower limit.
                return

    def is_on(self, pid: int) -> bool:
        """Whether the process has the mark. One that is gone has not."""
        try:
            if self._group is not None:
                groups = read_small(f"/proc/{pid}/status").partition(b"\nGroups:")[2]
                return self._group in groups.partition(b"\n")[0].split()
            limits = read_small(f"/proc/{pid}/limits").partition(b"Max realtime timeout")[2]
            return limits.split()[1:2] == [b"%d" % self._limit]
        except OSError:
            return False


def members(root: int, mark: "Mark | None" = None) -> "list[int]":
    """The living processes of the tree, `root` included, and those with the mark and what comes of
    them. Zombies do not count."""
    parents, found = {}, {root}
    alive = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or name == "1":
            continue
        pid = int(name)
        try:
            fields = read_small(f"/proc/{pid}/stat").rpartition(b")")[2].split()
        except OSError:
            continue
        if fields[0] in (b"Z", b"X"):
            continue
        alive.append(pid)
        parents[pid] = int(fields[1])
        if root in (int(fields[2]), int(fields[3])) or (mark is not None and mark.is_on(pid)):
            found.add(pid)
    grown = True
    while grown:
        grown = False
        for pid, parent in parents.items():
            if parent in found and pid not in found:
                found.add(pid)
                grown = True
    return [pid for pid in alive if pid in found and pid != os.getpid()]


def kill(root: int, mark: "Mark | None" = None) -> None:
    """SIGKILL to all of the tree, as often as there is something new in it."""
    for _ in range(ROUNDS):
        found = members(root, mark)
        if not found:
            return
        # What is stopped makes nothing new while the others are ended.
        for signal in (19, 9):
            for pid in found:
                try:
                    os.kill(pid, signal)
                except ProcessLookupError:
                    continue


def resident_bytes(root: int) -> int:
    """What the tree has in memory, counting what is shared once for each process."""
    pages = 0
    for pid in members(root):
        try:
            pages += int(read_small(f"/proc/{pid}/statm").split()[1])
        except (OSError, IndexError, ValueError):
            continue
    return pages * _PAGE
