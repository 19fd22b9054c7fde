"""Threads that only wait: for providers whose clients are synchronous.

A thread that serves requests is scarce and has a database connection; one that waits for a remote
service needs neither. Whoever has a thread to give back calls providers within `on_threads()`;
everybody else waits where he is, and pays for no change of threads.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar
from queue import Empty, SimpleQueue
from typing import TypeVar

from django.conf import settings

from providers.errors import RateLimited

T = TypeVar("T")

IDLE_SECONDS = 60.0
RETRY_AFTER_SECONDS = 5.0

_elsewhere: ContextVar[bool] = ContextVar("elsewhere", default=False)


class WaitingThreads:
    """As many daemon threads as there are calls to wait for; an idle one ends after a while.

    So many calls as `in_place` says are waited for by the thread that submits them: they spare
    themselves the change of threads, and are too few to hold all threads of a server.
    """

    def __init__(self, most: int, in_place: int = 0) -> None:
        self._most = most
        self._in_place = threading.Semaphore(in_place)
        self._lock = threading.Lock()
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._open = 0
        self._idle = 0

    def submit(self, call: Callable[[], T], *, may_refuse: bool) -> Future[T]:
        """The call's outcome, or the future of it.

        Raises RateLimited beyond the bound, but only where nothing has begun: what was begun is
        also ended.
        """
        if self._in_place.acquire(blocking=False):
            try:
                return carried_out(call)
            finally:
                self._in_place.release()
        future: Future[T] = Future()
        with self._lock:
            if may_refuse and self._open >= self._most:
                raise RateLimited(
                    f"{self._most} calls of providers are waited for already.",
                    retry_after=RETRY_AFTER_SECONDS,
                )
            self._open += 1
            is_needed = self._idle == 0
            if not is_needed:
                self._idle -= 1
        self._calls.put(lambda: self._carry_out(call, future))
        if is_needed:
            threading.Thread(target=self._work, name="provider-wait", daemon=True).start()
        return future

    def _carry_out(self, call: Callable[[], T], future: Future[T]) -> None:
        try:
            result = call()
        except BaseException as error:
            self._close_one()
            future.set_exception(error)
        else:
            self._close_one()
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


def submit(call: Callable[[], T], *, may_refuse: bool = False) -> Future[T]:
    """The outcome of a call that may take long: of a waiting thread, or had already."""
    if _elsewhere.get():
        return _get_threads().submit(call, may_refuse=may_refuse)
    return carried_out(call)


def carried_out(call: Callable[[], T]) -> Future[T]:
    """The outcome of a call that is made now, in this thread."""
    future: Future[T] = Future()
    try:
        future.set_result(call())
    except Exception as error:
        future.set_exception(error)
    return future


@contextmanager
def on_threads() -> Iterator[None]:
    """Within it, a provider that can only wait does so on another thread."""
    token = _elsewhere.set(True)
    try:
        yield
    finally:
        _elsewhere.reset(token)


_threads: WaitingThreads | None = None
_threads_lock = threading.Lock()


def _get_threads() -> WaitingThreads:
    global _threads
    with _threads_lock:
        if _threads is None:
            in_place = max(1, settings.WEB_THREADS // 8)
            _threads = WaitingThreads(settings.PROVIDER_WAITS, in_place)
        return _threads


def _after_fork() -> None:
    """The parent's threads are not in the child."""
    global _threads, _threads_lock
    _threads, _threads_lock = None, threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
