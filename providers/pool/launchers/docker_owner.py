"""Whose container it is: labels by which a pool finds what its predecessors left behind."""

from __future__ import annotations

import os
import secrets
from functools import cache
from pathlib import Path

from providers.pool.launchers.docker_engine import Listed

POOL_LABEL = "cofferdam.pool"
OWNER_LABEL = "cofferdam.owner"

# A container of our pool whose owner is on another machine, where we cannot look, is an orphan
# when it is older than any run can be.
FOREIGN_SECONDS = 3600.0

# The launchers of this process that are still open.
_open_here: set[str] = set()


class Owner:
    """One launcher's mark on its containers: its process, and which of the process's launchers."""

    def __init__(self, pool_id: str) -> None:
        self.mark = f"{_machine()}/{os.getpid()}/{_birth(os.getpid())}/{secrets.token_hex(4)}"
        self._pool_id = pool_id
        _open_here.add(self.mark)

    @property
    def labels(self) -> dict[str, str]:
        return {POOL_LABEL: self._pool_id, OWNER_LABEL: self.mark}

    def release(self) -> None:
        """From now on this owner's containers are orphans."""
        _open_here.discard(self.mark)

    def is_orphan(self, container: Listed, known: set[str], now: float) -> bool:
        """Whether nobody will ever ask for this container again. `known` are our own names.

        What a dead process of this machine left is an orphan whichever pool it was of: a pool
        whose name was its own process's would never find it again.
        """
        mark = container.labels.get(OWNER_LABEL, "")
        if mark == self.mark:
            return container.name not in known
        machine, _, process = mark.partition("/")
        if machine == _machine():
            return not _lives(mark, process)
        same_pool = container.labels.get(POOL_LABEL) == self._pool_id
        return same_pool and now - container.created > FOREIGN_SECONDS


def _lives(mark: str, process: str) -> bool:
    pid, birth, _ = process.split("/")
    if _birth(int(pid)) != birth:
        return False
    return int(pid) != os.getpid() or mark in _open_here


@cache
def _machine() -> str:
    """This boot of this machine, and the namespace in which process ids mean anything."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}:{os.readlink('/proc/self/ns/pid')}"


def _birth(pid: int) -> str:
    """When a living process was started, in clock ticks since the boot; empty when it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
    except OSError:
        return ""
    state, *fields = text.rpartition(") ")[2].split()
    return "" if state in "ZX" else fields[18]
