"""Work in the background: tasks, keyed work, loops with an interval, and turns of tenants."""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from django.db import close_old_connections, connection, connections

from providers.errors import RateLimited

logger = logging.getLogger(__name__)

_going_on: set[str] = set()
_lock = threading.Condition()


def run_once_in_background(name: str, work: Callable[[], object]) -> threading.Thread | None:
    """Have a thread do it; None while one does it already, or the process has no thread left.

    It may end with its process at any moment: what it does must be found undone by the next one.
    """
    with _lock:
        if name in _going_on:
            return None
        _going_on.add(name)

    def run() -> None:
        try:
            work()
        except Exception:
            logger.exception("%s was aborted", name)
        finally:
            connections.close_all()
            with _lock:
                _going_on.discard(name)
                _lock.notify_all()

    thread = threading.Thread(target=run, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        logger.error("no thread for %s: %s", name, error)
        with _lock:
            _going_on.discard(name)
        return None
    return thread


def wait_until_idle(seconds: float) -> bool:
    """Wait until nothing that was begun goes on. Return whether that is so."""
    with _lock:
        return _lock.wait_for(lambda: not _going_on, seconds)


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


class _KeyedExecutor:
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


def submit_keyed(
    key: object, owner: str, call: Callable[[], T], *, first: bool = False
) -> Future[T]:
    """What `call` returns, or another call under this key that begins after this one was asked for.

    `owner` is a tenant's slug; `first` goes before what waits. The call may use the database.
    """
    return _threads.submit(key, owner, call, first=first)


def wait_for_keyed_work(seconds: float = 30.0) -> bool:
    """Whether nothing is under way in this process any more."""
    return _threads.wait_until_idle(seconds)


_threads = _KeyedExecutor()


def _after_fork() -> None:
    """The parent's threads are not in the child."""
    global _threads
    _threads = _KeyedExecutor()


os.register_at_fork(after_in_child=_after_fork)


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


@dataclass(frozen=True)
class TurnBounds:
    """How much is done at once, of which one tenant never has all, and how much of one tenant is
    done or waits. `work` names it in the plural, for whoever has too much of it."""

    at_once: int
    of_one_tenant: int
    work: str


class Turns(Generic[T]):
    """Threads as long as there is something to do. The tenant that waited longest is next."""

    def __init__(self, bounds: TurnBounds, name: str) -> None:
        self._bounds = bounds
        self._name = name
        self._lock = threading.Lock()
        # What waits of each tenant, whose turn it is first.
        self._todo: dict[str, deque[tuple[Future[T], Callable[[], T]]]] = {}
        self._busy: Counter[str] = Counter()
        self._threads = 0

    def take(self, call: Callable[[], T], owner: str) -> Future[T]:
        """What the call returns, on a thread; `owner` is the tenant. Raises RateLimited for one
        that has too much of it, and where no thread can be had."""
        done: Future[T] = Future()
        most = self._bounds.of_one_tenant
        with self._lock:
            waiting = deque(each for each in self._todo.get(owner, ()) if not each[0].cancelled())
            if len(waiting) + self._busy[owner] >= most:
                raise RateLimited(f"{most} {self._bounds.work} Send it again.", retry_after=1.0)
            if self._threads < self._bounds.at_once:
                self._start()
            waiting.append((done, call))
            self._todo[owner] = waiting
        return done

    def _start(self) -> None:
        try:
            threading.Thread(target=self._work, name=self._name, daemon=True).start()
        except RuntimeError as error:
            # One that is there does it in its turn.
            if not self._threads:
                raise RateLimited(
                    f"The process has no thread left for it ({self._name}): {error}.",
                    retry_after=1.0,
                ) from error
        else:
            self._threads += 1

    def _work(self) -> None:
        try:
            while taken := self._next():
                self._carry_out(*taken)
        except BaseException:
            with self._lock:
                self._threads -= 1
            raise

    def _next(self) -> tuple[str, Future[T], Callable[[], T]] | None:
        """What waits of the tenant whose turn it is, who is then the last. None for a thread that
        is not needed any more, and is not counted from here on."""
        with self._lock:
            for owner, waiting in self._todo.items():
                if self._busy[owner] < self._bounds.at_once - 1:
                    del self._todo[owner]
                    taken = waiting.popleft()
                    if waiting:
                        self._todo[owner] = waiting
                    self._busy[owner] += 1
                    return owner, *taken
            self._threads -= 1
            return None

    def _carry_out(self, owner: str, done: Future[T], call: Callable[[], T]) -> None:
        if not done.set_running_or_notify_cancel():
            self._let_go(owner)
            return
        try:
            result = call()
        except BaseException as error:
            self._let_go(owner)
            done.set_exception(error)
        else:
            self._let_go(owner)
            done.set_result(result)

    def _let_go(self, owner: str) -> None:
        """Before anybody hears of it, so that there is room for the tenant's next one."""
        with self._lock:
            self._busy[owner] -= 1
            if not self._busy[owner]:
                del self._busy[owner]
