"""A thread that does the same thing again and again, for as long as somebody needs it."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable

from django.db import close_old_connections, connection

from providers.errors import RateLimited

logger = logging.getLogger(__name__)

_RETRY_SECONDS = 1.0
_RETRY_AFTER_SECONDS = 5.0


class Ticker:
    """Calls `tick` in a daemon thread with a database connection of its own.

    `tick` returns after how many seconds it is called again, or None to end the thread. The next
    `start` begins another one. What `tick` raises is logged, and it is called again.
    """

    def __init__(self, name: str, tick: Callable[[], float | None]) -> None:
        self._name = name
        self._tick = tick
        # Reentrant: the garbage collector may end a generator that needs the thread, in any thread.
        self._lock = threading.RLock()
        self._woken = threading.Event()
        self._is_running = False
        self._is_wanted = False
        os.register_at_fork(after_in_child=self._forget)

    def start(self) -> None:
        """Have the thread run, and call `tick` at least once from now. Raises RateLimited where the
        system has no thread left."""
        with self._lock:
            self._is_wanted = True
            if self._is_running:
                return
            try:
                threading.Thread(target=self._work, name=self._name, daemon=True).start()
            except RuntimeError as error:
                raise RateLimited(
                    f"The process has no thread left to poll the database: {error}.",
                    retry_after=_RETRY_AFTER_SECONDS,
                ) from None
            self._is_running = True

    def wake(self) -> None:
        """End the pause between two calls, if there is one."""
        self._woken.set()

    def _forget(self) -> None:
        """The parent's thread is not in the child."""
        self._lock = threading.RLock()
        self._woken = threading.Event()
        self._is_running = self._is_wanted = False

    def _work(self) -> None:
        try:
            while (seconds := self._next()) is not None:
                self._woken.wait(seconds)
                self._woken.clear()
        finally:
            connection.close()

    def _next(self) -> float | None:
        """The pause until the next call; None where the thread ends."""
        with self._lock:
            self._is_wanted = False
        try:
            close_old_connections()
            seconds = self._tick()
        except Exception:
            logger.exception("the thread %s will try again", self._name)
            return _RETRY_SECONDS
        with self._lock:
            if seconds is None and self._is_wanted:
                return 0.0
            self._is_running = seconds is not None
            return seconds
