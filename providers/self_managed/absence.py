"""A pool service that is not there: for a moment it is waited for, because it may be restarting."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from providers.errors import ConnectionFailed

T = TypeVar("T")

# How long after it was missed first a service is waited for, and how often it is tried.
WAIT_SECONDS = 5.0
PAUSE_SECONDS = 0.1
# Told to whoever has waited, or comes later.
RETRY_AFTER_SECONDS = 5.0


class NotSent(ConnectionFailed):
    """No connection came about, so the service cannot have seen the request."""

    nothing_ran = True


class OutageBackoff:
    """Of one service, as all threads of this process have seen it.

    Who comes when it has been missing for longer is told at once: nobody is to wait for a service
    that is gone.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._since: float | None = None

    def wait_out(self, call: Callable[[], T]) -> T:
        """What `call` returns, tried again while there is no connection. Raises NotSent."""
        while True:
            try:
                done = call()
            except NotSent as error:
                if not self._may_wait():
                    error.retry_after = RETRY_AFTER_SECONDS
                    raise
                time.sleep(PAUSE_SECONDS)
            except BaseException:
                # Somebody was there.
                self._is_over()
                raise
            else:
                self._is_over()
                return done

    def _may_wait(self) -> bool:
        now = time.monotonic()
        with self._lock:
            if self._since is None:
                self._since = now
            return now - self._since < WAIT_SECONDS

    def _is_over(self) -> None:
        with self._lock:
            self._since = None
