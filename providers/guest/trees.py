"""The processes that come from one: found, measured, ended.

To it belong its descendants, and whoever is in its session or process group. What has left both
and outlived its parent is found by nobody but `kill_others`, at a reset or at the end.
"""

import os

from .processes import read_small

_PAGE = os.sysconf("SC_PAGE_SIZE")
# What forks faster than it is looked for is left to the bound of processes.
ROUNDS = 50


def members(root: int) -> "list[int]":
    """The living processes of the tree, `root` included. Zombies do not count."""
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
        if root in (int(fields[2]), int(fields[3])):
            found.add(pid)
    grown = True
    while grown:
        grown = False
        for pid, parent in parents.items():
            if parent in found and pid not in found:
                found.add(pid)
                grown = True
    return [pid for pid in alive if pid in found and pid != os.getpid()]


def kill(root: int) -> None:
    """SIGKILL to all of the tree, as often as there is something new in it."""
    for _ in range(ROUNDS):
        found = members(root)
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
