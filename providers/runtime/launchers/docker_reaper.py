"""Removes containers that nobody owns any more, and knows the names of those that we own."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import secrets
import time
from concurrent.futures import ThreadPoolExecutor

from providers.errors import SandboxError
from providers.runtime.launchers.docker_engine import Engine
from providers.runtime.launchers.docker_owner import POOL_LABEL, Owner

logger = logging.getLogger(__name__)

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
