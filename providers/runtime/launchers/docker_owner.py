"""Whose a container is: labels and names by which a pool finds, removes or takes over what its
predecessors left.

A container's labels stay as they were made. One that is kept and outlives its pool has its present
owner in its name, which the engine lets us change.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import logging
import os
import re
import secrets
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from providers import process_liveness
from providers.errors import CreationFailed, SandboxError
from providers.runtime.launchers.docker_engine import (
    Engine,
    Listed,
    Started,
    differences,
    shape_of,
    weaknesses,
)
from providers.runtime.pool.state_store import StateStore

logger = logging.getLogger(__name__)

POOL_LABEL = "cofferdam.pool"
OWNER_LABEL = "cofferdam.maker"
# Which pool of this name it is: those of another data directory are others.
HOME_LABEL = "cofferdam.home"

# A container of our pool whose owner is on another machine, where we cannot look, is an orphan
# when it is older than any run can be.
FOREIGN_SECONDS = 3600.0
# A kept container of another pool whose process is gone, for as long as that may be started again.
ABSENT_SECONDS = 900.0

_KEPT = re.compile(r"cofferdam-kept-([0-9a-f]{12})-(\d+)-(\d+)-([0-9a-f]{8})-\d+")

# The launchers of this process that are still open.
_open_here: set[str] = set()


class Owner:
    """One launcher's mark on its containers: its process, and which of the process's launchers."""

    def __init__(self, pool_id: str, memory: StateStore | None = None) -> None:
        """`memory` has what the pool's processes tell one another of what they keep."""
        birth = process_liveness.birth(os.getpid())
        self.mark = f"{_machine()}/{os.getpid()}/{birth}/{secrets.token_hex(4)}"
        self._pool_id = pool_id
        self._memory = memory
        self._absent_since: dict[str, float] = {}
        _open_here.add(self.mark)

    @property
    def labels(self) -> dict[str, str]:
        home = {} if self._memory is None else {HOME_LABEL: self._memory.home}
        return {POOL_LABEL: self._pool_id, OWNER_LABEL: self.mark, **home}

    def kept_name(self, number: int) -> str:
        """The name of a container that this owner keeps."""
        _, process = self.mark.split("/", 1)
        pid, birth, token = process.split("/")
        return f"cofferdam-kept-{_machine_digest()}-{pid}-{birth}-{token}-{number}"

    def has_made(self, labels: Mapping[str, str]) -> bool:
        """Whether a process of this very pool made the container with these labels."""
        if self._memory is None:
            return False
        return all(labels.get(name) == self.labels[name] for name in (POOL_LABEL, HOME_LABEL))

    def release(self) -> None:
        """From now on this owner's containers are orphans."""
        _open_here.discard(self.mark)

    def is_orphan(self, container: Listed, known: set[str], now: float) -> bool:
        """Whether nobody will ever ask for this container again. `known` are our own names.

        What a dead process of this machine left is an orphan whichever pool it was of: a pool
        whose name was its own process's would never find it again.
        """
        labels = container.labels
        mark = labels.get(OWNER_LABEL, "")
        if (kept := _KEPT.fullmatch(container.name)) and container.is_running:
            return self._is_orphan_that_was_kept(container, kept, known, now)
        if mark == self.mark:
            return container.name not in known
        machine, _, process = mark.partition("/")
        if machine == _machine():
            return not _lives(mark, process)
        same_pool = container.labels.get(POOL_LABEL) == self._pool_id
        return same_pool and now - container.created > FOREIGN_SECONDS

    def _is_orphan_that_was_kept(
        self, container: Listed, kept: re.Match[str], known: set[str], now: float
    ) -> bool:
        machine, pid, birth, token = kept.groups()
        mark = f"{_machine()}/{pid}/{birth}/{token}"
        if mark == self.mark and container.name in known:
            return False
        is_here = machine == _machine_digest()
        if mark != self.mark and is_here and _lives(mark, f"{pid}/{birth}/{token}"):
            self._absent_since.pop(container.id, None)
            return False
        if self._memory is not None and container.labels.get(HOME_LABEL) == self._memory.home:
            remembered = self._memory.of_container(container.id)
            return remembered is None or remembered.is_over
        if mark == self.mark:
            return True
        # Its pool may be on its way. A guest that is not hostile ends by itself, at its lease.
        since = self._absent_since.setdefault(container.id, now)
        if is_here:
            return now - since > ABSENT_SECONDS
        same_pool = container.labels.get(POOL_LABEL) == self._pool_id
        return same_pool and now - container.created > FOREIGN_SECONDS


def _lives(mark: str, process: str) -> bool:
    pid, birth, _ = process.split("/")
    if process_liveness.has_ended(int(pid), birth):
        return False
    return int(pid) != os.getpid() or mark in _open_here


def _machine() -> str:
    return ":".join(process_liveness.here())


def _machine_digest() -> str:
    return hashlib.sha256(_machine().encode()).hexdigest()[:12]


REAP_SECONDS = 15.0


class Reaper:
    """One launcher's. What bears the launcher's mark under a name not known here is an orphan."""

    def __init__(self, engine: Engine, owner: Owner, threads: ThreadPoolExecutor) -> None:
        self.known: set[str] = set()
        self._engine = engine
        self._owner = owner
        self._threads = threads
        self._renamed: dict[str, str] = {}
        self._numbers = itertools.count(1)
        self._prefix = f"cofferdam-{secrets.token_hex(4)}"
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def new_name(self) -> str:
        """For a container that is about to be made."""
        name = f"{self._prefix}-{next(self._numbers)}"
        self.known.add(name)
        return name

    def new_kept_name(self, former: str = "") -> str:
        """For one that may outlive this process, and had the former name."""
        kept = self._owner.kept_name(next(self._numbers))
        self.known.add(kept)
        if former:
            self._renamed[former] = kept
        return kept

    def forget(self, name: str) -> None:
        """It is an orphan if it is still there, whatever it is called now."""
        self.known.discard(name)
        self.known.discard(self._renamed.pop(name, name))

    def reap(self) -> int:
        """Remove what nobody owns any more. Returns how many. Raises SandboxError."""
        now = time.time()
        found = self._engine.containers(POOL_LABEL)
        orphans = [one for one in found if self._owner.is_orphan(one, self.known, now)]
        removed = 0
        for one in orphans:
            logger.warning("removing an orphaned container", extra={"container": one.name})
            try:
                self._engine.remove(one.id)
                removed += 1
            except SandboxError as error:
                # One that the engine cannot end now must not keep the others; it is tried again.
                logger.warning("orphan not removed", extra={"reason": error.message})
        return removed

    def go_on(self) -> None:
        """Look for orphans every REAP_SECONDS from now on."""
        self._loop = asyncio.get_running_loop()
        self._later()

    def close(self) -> None:
        """No longer. What is being removed is removed."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()

    def _later(self) -> None:
        if self._loop is not None and not self._closed:
            self._timer = self._loop.call_later(REAP_SECONDS, self._threads.submit, self._reap_now)

    def _reap_now(self) -> None:
        try:
            self.reap()
        except SandboxError as error:
            logger.warning("cannot look for orphans", extra={"reason": error.message})
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._later)


def attach_again(
    engine: Engine,
    owner: Owner,
    name: str,
    container: str,
    runtime: str,
    shape: Mapping[str, Any],
) -> Started:
    """Attach to a container of this pool, by its id, and give it the `name` of its new owner.

    `shape` is how it was made, `runtime` of which class. Raises CreationFailed for one that has
    ended, is not as it was made, or was not made by this pool, and ProviderUnavailable where the
    engine cannot be asked.
    """
    inspected = engine.inspect(container)
    if inspected is None or not inspected["State"]["Running"]:
        raise CreationFailed("It has ended.")
    seen = shape_of(inspected)
    wrong = [*differences(seen, shape), *weaknesses(seen, runtime)]
    if inspected["Id"] != container or not owner.has_made(seen["Labels"] or {}):
        wrong.append("Labels")
    if wrong:
        raise CreationFailed(f"It is not as it was made: {', '.join(dict.fromkeys(wrong))}.")
    if inspected["Name"].lstrip("/") != name:
        engine.rename(container, name)
    return engine.attach(inspected)
