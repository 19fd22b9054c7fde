"""How many requests of administrators may wait at once for providers that start just for them.

Such a start is waited for by a thread of the web server, of which a few must be left for others.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from providers.errors import RateLimited

AT_ONCE = 4
RETRY_AFTER_SECONDS = 10.0

_places = threading.BoundedSemaphore(AT_ONCE)


@contextmanager
def waiting_apart() -> Iterator[None]:
    """Hold one of the places. Raises RateLimited when all are taken."""
    if not _places.acquire(blocking=False):
        raise RateLimited(
            f"{AT_ONCE} providers are being started for tests or replays. Try again later.",
            retry_after=RETRY_AFTER_SECONDS,
        )
    try:
        yield
    finally:
        _places.release()
