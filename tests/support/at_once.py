"""Calls at the same moment."""

from __future__ import annotations

import threading
from collections.abc import Callable

from django.db import connections

from providers.errors import RateLimited


def at_once(number: int, ask: Callable[[], object]) -> int:
    """How many of so many at the same time were admitted, each with a connection of its own."""
    barrier = threading.Barrier(number)
    admitted: list[object] = []
    refused: list[RateLimited] = []

    def one() -> None:
        barrier.wait()
        try:
            admitted.append(ask())
        except RateLimited as error:
            refused.append(error)
        finally:
            connections.close_all()

    threads = [threading.Thread(target=one) for _ in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(admitted) + len(refused) == number
    return len(admitted)
