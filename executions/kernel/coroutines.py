"""Coroutines that wait for futures of threads, and run without an event loop.

Written once and driven in two ways: `run_sync` waits in the calling thread, as a worker does; a
web server gives its thread back and goes on with another when the future is done. Nothing of
asyncio is involved: what is awaited are functions of this kind, and futures by `wait_for`.
"""

from __future__ import annotations

import collections.abc
from collections.abc import Callable, Generator
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

T = TypeVar("T")

# Called with `send(None)`, it gives the next future to wait for.
Coroutine = collections.abc.Coroutine[Future[Any], None, T]


class wait_for:
    """Await the end of a future, however it ends: its result or error is the caller's to ask."""

    __slots__ = ("_future",)

    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    def __await__(self) -> Generator[Future[Any], None, None]:
        yield self._future


def wait_until_done(future: Future[Any]) -> None:
    """Wait for the end of a future, however it ends."""
    try:
        future.exception()
    except CancelledError:
        # The work finds out by itself.
        return


def run_sync(work: Coroutine[T], wait: Callable[[Future[Any]], None] = wait_until_done) -> T:
    """Carry the work out to its end in this thread.

    `wait` returns once a future is done. What it raises, as what interrupts it, is raised where the
    work waits, so that it can clear up.
    """
    try:
        future = work.send(None)
        while True:
            try:
                wait(future)
            except BaseException as interruption:
                future = work.throw(interruption)
            else:
                future = work.send(None)
    except StopIteration as end:
        result: T = end.value
        return result


async def immediate(call: Callable[[], T]) -> T:
    """Return what need not be waited for, where something else might have to."""
    return call()
