"""How many batches are fetched at once in this process, by everybody and by one tenant.

A batch holds threads for as long as its servers care to take.
"""

from __future__ import annotations

import threading
from collections import Counter

from providers.errors import RateLimited

MOST = 16
MOST_OF_ONE = 2

_RETRY_SECONDS = 10.0

_held: Counter[str] = Counter()
# Reentrant: the garbage collector may end a generator that holds one of them, in any thread.
_lock = threading.RLock()


def held() -> int:
    """How many there are now."""
    with _lock:
        return _held.total()


class Slot:
    """Held by a batch and each of its threads; given back when the last of them has let go."""

    def __init__(self, holder: str) -> None:
        """Raises RateLimited when there is none for `holder`."""
        with _lock:
            if _held[holder] >= MOST_OF_ONE:
                raise RateLimited(
                    f"{MOST_OF_ONE} requests are already fetching files by URL. Wait until one "
                    "ends.",
                    retry_after=_RETRY_SECONDS,
                )
            if _held.total() >= MOST:
                raise RateLimited(
                    "Too many requests are fetching files by URL. Try again.",
                    retry_after=_RETRY_SECONDS,
                )
            _held[holder] += 1
        self._holder = holder
        self._holds = 1

    def hold(self) -> bool:
        """False when it has been given back already."""
        with _lock:
            if not self._holds:
                return False
            self._holds += 1
            return True

    def release(self) -> None:
        with _lock:
            self._holds -= 1
            if self._holds:
                return
            _held[self._holder] -= 1
            if not _held[self._holder]:
                del _held[self._holder]
