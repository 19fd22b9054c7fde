"""Work that has to wait: a generator that yields each future it waits for.

Written once and driven in two ways: `run_sync` waits in the calling thread, as a worker does; a
web server gives its thread back and goes on with another when the future is done.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

T = TypeVar("T")

Coroutine = Generator[Future[Any], None, T]


def run_sync(work: Coroutine[T]) -> T:
    """Carry the work out to its end in this thread.

    What interrupts the waiting is raised where the work waits, so that it can clear up.
    """
    try:
        future = next(work)
        while True:
            try:
                _wait(future)
            except BaseException as interruption:
                future = work.throw(interruption)
            else:
                future = next(work)
    except StopIteration as end:
        result: T = end.value
        return result


def immediate(call: Callable[[], T]) -> Coroutine[T]:
    """What need not wait, where something else might have to."""
    return call()
    yield


def _wait(future: Future[Any]) -> None:
    try:
        future.exception()
    except CancelledError:
        # The work finds out by itself.
        return
