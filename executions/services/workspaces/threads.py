"""A few threads of this process for what is done about saved files: under each key one at a time.

Nothing here is remembered but what is going on.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from django.db import close_old_connections, connections

logger = logging.getLogger(__name__)

T = TypeVar("T")

THREADS = 8
# A tenant whose sandboxes or files are slow holds up itself.
OF_ONE_TENANT = 3
# A thread that has had nothing to do for so long ends, and its connection to the database with it.
IDLE_SECONDS = 10.0


@dataclass
class _Job:
    call: Callable[[], Any]
    owner: str
    waiting: list[Future[Any]] = field(default_factory=list)


class _Threads:
    """Carries out what is asked for under a key: once for all that asked before it began."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: dict[object, _Job] = {}
        self._order: deque[object] = deque()
        self._running: set[object] = set()
        self._owners: Counter[str] = Counter()
        self._threads = 0
        self._idle = 0

    def submit(
        self, key: object, owner: str, call: Callable[[], T], *, first: bool = False
    ) -> Future[T]:
        """What `call` returns that begins after this; `first` goes before what waits."""
        future: Future[T] = Future()
        with self._changed:
            job = self._waiting.get(key)
            if job is None:
                job = self._waiting[key] = _Job(call, owner)
                (self._order.appendleft if first else self._order.append)(key)
            elif first:
                self._order.remove(key)
                self._order.appendleft(key)
            job.waiting.append(future)
            if len(self._order) > self._idle and self._threads < THREADS:
                self._start()
            self._changed.notify_all()
        return future

    def _start(self) -> None:
        try:
            threading.Thread(target=self._work, name="saver", daemon=True).start()
            self._threads += 1
        except RuntimeError as error:
            # Another thread does it, or the next one that can be started.
            logger.error("no thread for saved files: %s", error)

    def wait_until_idle(self, seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._running, seconds)

    def _work(self) -> None:
        try:
            while (taken := self._next()) is not None:
                self._carry_out(*taken)
        finally:
            connections.close_all()

    def _carry_out(self, key: object, job: _Job) -> None:
        outcome: Future[Any] = Future()
        close_old_connections()
        try:
            outcome.set_result(job.call())
        except BaseException as error:
            outcome.set_exception(error)
        finally:
            close_old_connections()
        with self._changed:
            self._running.discard(key)
            self._owners[job.owner] -= 1
            self._changed.notify_all()
        for future in job.waiting:
            if future.set_running_or_notify_cancel():
                _pass_on(outcome, future)

    def _next(self) -> tuple[object, _Job] | None:
        """None for a thread that is not needed any more, and is not counted from here on."""
        with self._changed:
            self._idle += 1
            try:
                while (key := self._ready()) is None:
                    if not self._changed.wait(IDLE_SECONDS) and self._ready() is None:
                        self._threads -= 1
                        return None
            finally:
                self._idle -= 1
            self._order.remove(key)
            job = self._waiting.pop(key)
            self._running.add(key)
            self._owners[job.owner] += 1
            return key, job

    def _ready(self) -> object | None:
        for key in self._order:
            owner = self._waiting[key].owner
            if key not in self._running and self._owners[owner] < OF_ONE_TENANT:
                return key
        return None


def _pass_on(outcome: Future[Any], future: Future[Any]) -> None:
    if error := outcome.exception():
        future.set_exception(error)
    else:
        future.set_result(outcome.result())


def submit(key: object, owner: str, call: Callable[[], T], *, first: bool = False) -> Future[T]:
    """What `call` returns, or another call under this key that begins after this one was asked for.

    `owner` is a tenant's slug; `first` goes before what waits. The call may use the database.
    """
    return _threads.submit(key, owner, call, first=first)


def wait_until_idle(seconds: float = 30.0) -> bool:
    """Whether nothing is under way in this process any more."""
    return _threads.wait_until_idle(seconds)


_threads = _Threads()


def _after_fork() -> None:
    """The parent's threads are not in the child."""
    global _threads
    _threads = _Threads()


os.register_at_fork(after_in_child=_after_fork)
