"""Threads that only wait, for providers whose clients are synchronous, and an end to waiting.

A thread that serves requests is scarce and has a database connection; one that waits for a remote
service needs neither. None of them is lost to a service that does not answer: who waits for it
gives up at a deadline, whatever the thread does.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from providers.errors import RateLimited
from providers.options import options
from providers.remote.deadline import DeadlinePassed
from providers.threads import NoThreadLeft, reset_after_fork, start_thread

logger = logging.getLogger(__name__)

T = TypeVar("T")

IDLE_SECONDS = 60.0
RETRY_AFTER_SECONDS = 5.0


class WaitingThreads:
    """As many daemon threads as there are calls to wait for; an idle one ends after a while."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._open = 0
        self._idle = 0

    def submit(self, call: Callable[[], T], *, may_refuse: bool) -> Future[T]:
        """The call's outcome, once a thread has carried it out.

        Raises RateLimited beyond the bound, but only where nothing has begun: what was begun is
        also ended.
        """
        future: Future[T] = Future()
        with self._lock:
            if may_refuse and self._open >= self._most:
                raise RateLimited(
                    f"{self._most} calls already wait for providers.",
                    retry_after=RETRY_AFTER_SECONDS,
                )
            self._open += 1
            is_needed = self._idle == 0
            if not is_needed:
                self._idle -= 1
        if is_needed:
            self._start()
        self._calls.put(lambda: self._carry_out(call, future))
        return future

    def _start(self) -> None:
        try:
            start_thread("provider-wait", self._work)
        except NoThreadLeft:
            with self._lock:
                self._open -= 1
            raise

    def _carry_out(self, call: Callable[[], T], future: Future[T]) -> None:
        try:
            result = call()
        except BaseException as error:
            self._close_one()
            # Whoever waited may have cancelled it meanwhile.
            with suppress(InvalidStateError):
                future.set_exception(error)
        else:
            self._close_one()
            with suppress(InvalidStateError):
                future.set_result(result)

    def _close_one(self) -> None:
        """Before the caller hears of it, so that his next call finds this thread idle."""
        with self._lock:
            self._open -= 1
            self._idle += 1

    def _work(self) -> None:
        while True:
            try:
                work = self._calls.get(timeout=IDLE_SECONDS)
            except Empty:
                with self._lock:
                    # Otherwise the call that counts on this thread is on its way.
                    if self._idle:
                        self._idle -= 1
                        return
            else:
                work()
                # With what it holds, such as a file that nobody reads on: the next may be far off.
                del work


def submit(call: Callable[[], T], *, may_refuse: bool = False) -> Future[T]:
    """The outcome of a call that may take long, once a waiting thread has carried it out."""
    return _get_threads().submit(call, may_refuse=may_refuse)


def carried_out(call: Callable[[], T]) -> Future[T]:
    """The outcome of a call that is made now, in this thread, because it takes no time."""
    future: Future[T] = Future()
    try:
        future.set_result(call())
    except Exception as error:
        future.set_exception(error)
    return future


class _Deadlines:
    """One thread that gives up what is not done in time."""

    def __init__(self) -> None:
        self._wake = threading.Condition()
        self._due: list[tuple[float, int, _Awaited]] = []
        self._count = itertools.count()
        self._thread: threading.Thread | None = None

    def add(self, seconds: float, awaited: _Awaited) -> None:
        due = (time.monotonic() + seconds, next(self._count), awaited)
        with self._wake:
            heapq.heappush(self._due, due)
            # Whatever has ended it, such as an exhausted memory: the waits go on.
            if self._thread is None or not self._thread.is_alive():
                self._start()
            elif self._due[0] is due:
                self._wake.notify()

    def _start(self) -> None:
        try:
            self._thread = start_thread("deadlines", self._work)
        except NoThreadLeft as error:
            # The next wait tries again. What is waited for has begun, and has deadlines of its own.
            logger.error("%s", error.message)

    def _work(self) -> None:
        while True:
            with self._wake:
                while not self._due or self._due[0][0] > time.monotonic():
                    left = self._due[0][0] - time.monotonic() if self._due else None
                    self._wake.wait(left)
                _, _, awaited = heapq.heappop(self._due)
            awaited.give_up()


class _Awaited:
    """A future that ends with the outcome of another, or with DeadlinePassed."""

    def __init__(self, future: Future[Any]) -> None:
        self._lock = threading.Lock()
        # Let go of when it is done: the deadline of a run that was quick is still far away.
        self._future: Future[Any] | None = future

    def give_up(self) -> None:
        if (future := self._take()) is not None:
            future.set_exception(DeadlinePassed())

    def end(self, source: Future[Any]) -> None:
        future = self._take()
        if future is None:
            return
        if source.cancelled():
            # It cannot be cancelled any more, and has to end.
            future.set_exception(CancelledError())
        elif error := source.exception():
            future.set_exception(error)
        else:
            future.set_result(source.result())

    def _take(self) -> Future[Any] | None:
        with self._lock:
            future, self._future = self._future, None
        # Whoever waited may have given up by himself.
        return future if future and future.set_running_or_notify_cancel() else None


def within(seconds: float, source: Future[T]) -> Future[T]:
    """A future with the outcome of `source`, or with DeadlinePassed when that takes longer."""
    if source.done():
        return source
    future: Future[T] = Future()
    awaited = _Awaited(future)
    source.add_done_callback(awaited.end)
    if not future.done():
        _deadlines.add(seconds, awaited)
    return future


_deadlines = _Deadlines()
_threads: WaitingThreads | None = None
_threads_lock = threading.Lock()


def _get_threads() -> WaitingThreads:
    global _threads
    with _threads_lock:
        if _threads is None:
            _threads = WaitingThreads(options().PROVIDER_WAITS)
        return _threads


def _after_fork() -> None:
    """The parent's threads are not in the child."""
    global _threads, _threads_lock, _deadlines
    _threads, _threads_lock, _deadlines = None, threading.Lock(), _Deadlines()


reset_after_fork(_after_fork)
