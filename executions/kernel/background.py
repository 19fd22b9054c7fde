"""Work in the background: tasks, executors and shares of owners, and what begins after an answer.

The start of a thread, loops with a pause and what is reset after a fork are in `providers.threads`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

from django.db import close_old_connections

from providers.errors import RateLimited
from providers.threads import NoThreadLeft, reset_after_fork, start_thread

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

    def note_end() -> None:
        with _lock:
            _going_on.discard(name)
            _lock.notify_all()

    try:
        return start_thread(name, work, at_end=note_end)
    except NoThreadLeft as error:
        logger.error("%s", error.message)
        return None


def wait_until_idle(seconds: float) -> bool:
    """Wait until nothing that was begun goes on. Return whether that is so."""
    with _lock:
        return _lock.wait_for(lambda: not _going_on, seconds)


def _forget() -> None:
    global _lock
    _lock = threading.Condition()
    _going_on.clear()


reset_after_fork(_forget)


class Shares:
    """The places of a bounded whole, of which each owner has a bounded share."""

    def __init__(self, whole: int, of_one: int) -> None:
        self.whole = whole
        self.of_one = of_one
        self._forget()
        reset_after_fork(self._forget)

    def _forget(self) -> None:
        # Reentrant: the garbage collector may end a generator that has a place, in any thread.
        self._lock = threading.RLock()
        self._taken: Counter[str] = Counter()

    @property
    def taken(self) -> int:
        """How many places are taken."""
        with self._lock:
            return self._taken.total()

    def of(self, owner: str) -> int:
        """How many places the owner has."""
        with self._lock:
            return self._taken[owner]

    def has_room(self, owner: str) -> bool:
        """Whether there is a place for the owner."""
        with self._lock:
            return self._taken[owner] < self.of_one and self._taken.total() < self.whole

    def take(self, owner: str) -> bool:
        """Take a place. False where there is none for the owner."""
        with self._lock:
            if not self.has_room(owner):
                return False
            self._taken[owner] += 1
            return True

    def give_back(self, owner: str) -> None:
        """Give a place back. What was taken before a fork is nobody's in the child."""
        with self._lock:
            if self._taken[owner] > 1:
                self._taken[owner] -= 1
            else:
                del self._taken[owner]


T = TypeVar("T")


@dataclass(eq=False)
class _Work:
    owner: str
    call: Callable[[], Any]
    key: object | None
    # By time.monotonic(): when it may begin.
    begins_at: float
    futures: list[Future[Any]] = field(default_factory=list)

    @property
    def is_cancelled(self) -> bool:
        """Work with a key is done even if nobody waits for it any more."""
        return self.key is None and self.futures[0].cancelled()


class Executor:
    """Carries out calls on threads that owners share. The owner that waited longest is next.

    There are as many `threads` as there is work, and an owner has at most `of_one` of them. A
    thread ends after `idle_seconds` without work, and its connection to the database with it.
    """

    def __init__(
        self,
        name: str,
        *,
        threads: int,
        of_one: int,
        idle_seconds: float = 0.0,
        most: int | None = None,
        refusal: str = "",
    ) -> None:
        """`most` is how many calls without a key an owner may have at once, those that wait among
        them; `refusal` is what the owner of one more is told."""
        self._name = name
        self._most_threads = threads
        self._of_one = of_one
        self._idle_seconds = idle_seconds
        self._most = most
        self._refusal = refusal
        self._forget()
        reset_after_fork(self._forget)

    def _forget(self) -> None:
        self._changed = threading.Condition()
        # What waits of each owner, whose turn it is first.
        self._waiting: OrderedDict[str, deque[_Work]] = OrderedDict()
        self._keyed: dict[object, _Work] = {}
        self._running_keys: set[object] = set()
        self._shares = Shares(self._most_threads, self._of_one)
        self._threads = 0
        self._idle = 0

    def submit(
        self,
        owner: str,
        call: Callable[[], T],
        *,
        key: object | None = None,
        first: bool = False,
        delay_seconds: float = 0.0,
    ) -> Future[T]:
        """Return the future of what `call` returns or raises.

        Under a `key` one call is carried out at a time, once for all that submitted it before it
        began, whether anybody waits for it or not. It is never refused: without a thread it waits
        for the next submission. `first` goes before what waits. It begins after `delay_seconds`,
        under a key after the shortest delay of all that submitted it.

        Raises RateLimited for a call without a key where its owner has too many, or no thread is
        left.
        """
        future: Future[T] = Future()
        begins_at = time.monotonic() + delay_seconds
        with self._changed:
            work = None if key is None else self._keyed.get(key)
            if work is None:
                work = _Work(owner, call, key, begins_at)
                if key is None:
                    self._refuse_beyond_most(owner)
                else:
                    self._keyed[key] = work
                self._waiting.setdefault(owner, deque()).append(work)
            work.futures.append(future)
            work.begins_at = min(work.begins_at, begins_at)
            if first:
                self._put_first(work)
            self._start_thread_for(work)
            self._changed.notify_all()
        return future

    def wait_until_idle(self, seconds: float) -> bool:
        """Have what is delayed begin now, and wait until nothing waits or runs. Return whether that
        is so."""
        with self._changed:
            for waiting in self._waiting.values():
                for work in waiting:
                    work.begins_at = 0.0
            self._changed.notify_all()
            return self._changed.wait_for(
                lambda: not (self._waiting or self._shares.taken), seconds
            )

    def _refuse_beyond_most(self, owner: str) -> None:
        if self._most is None:
            return
        for cancelled in [each for each in self._waiting.get(owner, ()) if each.is_cancelled]:
            self._remove(cancelled)
        if len(self._waiting.get(owner, ())) + self._shares.of(owner) >= self._most:
            raise RateLimited(self._refusal, retry_after=1.0)

    def _put_first(self, work: _Work) -> None:
        waiting = self._waiting[work.owner]
        waiting.remove(work)
        waiting.appendleft(work)
        self._waiting.move_to_end(work.owner, last=False)

    def _start_thread_for(self, work: _Work) -> None:
        number = sum(map(len, self._waiting.values()))
        if number <= self._idle or self._threads >= self._most_threads:
            return
        try:
            start_thread(self._name, self._work)
        except NoThreadLeft as error:
            # A thread that is there does it in its turn.
            if work.key is None and not self._threads:
                self._remove(work)
                raise
            logger.error("%s", error.message)
        else:
            self._threads += 1

    def _remove(self, work: _Work) -> None:
        waiting = self._waiting[work.owner]
        waiting.remove(work)
        if not waiting:
            del self._waiting[work.owner]
        self._keyed.pop(work.key, None)

    def _work(self) -> None:
        try:
            while (work := self._next()) is not None:
                self._carry_out(work)
        except BaseException:
            with self._changed:
                self._threads -= 1
            raise

    def _next(self) -> _Work | None:
        """None for a thread that is not needed any more, and is not counted from here on."""
        with self._changed:
            self._idle += 1
            try:
                while (work := self._ready()) is None:
                    delay = self._shortest_delay()
                    pause = self._idle_seconds if delay is None else delay
                    if self._changed.wait(pause) or self._ready() is not None:
                        continue
                    # Delayed work may have come between the end of the pause and here.
                    if self._shortest_delay() is None:
                        self._threads -= 1
                        return None
            finally:
                self._idle -= 1
            self._remove(work)
            if work.owner in self._waiting:
                self._waiting.move_to_end(work.owner)
            if work.key is not None:
                self._running_keys.add(work.key)
            self._shares.take(work.owner)
            return work

    def _ready(self) -> _Work | None:
        now = time.monotonic()
        for owner, waiting in self._waiting.items():
            if self._shares.has_room(owner):
                for work in waiting:
                    is_free = work.key is None or work.key not in self._running_keys
                    if is_free and work.begins_at <= now:
                        return work
        return None

    def _shortest_delay(self) -> float | None:
        """The seconds until the first of the delayed calls begins; None where none is delayed."""
        now = time.monotonic()
        works = (work for waiting in self._waiting.values() for work in waiting)
        return min((work.begins_at - now for work in works if work.begins_at > now), default=None)

    def _carry_out(self, work: _Work) -> None:
        if work.key is None and not work.futures[0].set_running_or_notify_cancel():
            self._let_go(work)
            return
        outcome: Future[Any] = Future()
        try:
            close_old_connections()
            try:
                result = work.call()
            finally:
                close_old_connections()
            outcome.set_result(result)
        except BaseException as error:
            outcome.set_exception(error)
        # Before anybody hears of it, so that there is room for the owner's next one.
        self._let_go(work)
        for future in work.futures:
            if work.key is None or future.set_running_or_notify_cancel():
                _pass_on(outcome, future)

    def _let_go(self, work: _Work) -> None:
        with self._changed:
            self._running_keys.discard(work.key)
            self._shares.give_back(work.owner)
            self._changed.notify_all()


def _pass_on(outcome: Future[Any], future: Future[Any]) -> None:
    if error := outcome.exception():
        future.set_exception(error)
    else:
        future.set_result(outcome.result())


# How long a process that ends waits for keyed work: the files of a cell may be lost without it.
LAST_SECONDS = 2.0
# A tenant whose sandboxes or files are slow holds up itself.
OF_ONE_TENANT = 3
_savers = Executor("saver", threads=8, of_one=OF_ONE_TENANT, idle_seconds=10.0)


def submit_keyed(
    key: object,
    owner: str,
    call: Callable[[], T],
    *,
    first: bool = False,
    delay_seconds: float = 0.0,
) -> Future[T]:
    """Return the future of what `call` returns, or another call under this key that begins later.

    `owner` is a tenant's slug; `first` goes before what waits. The call may use the database, and
    begins after `delay_seconds`, or with one under this key that is to begin before that.
    """
    return _savers.submit(owner, call, key=key, first=first, delay_seconds=delay_seconds)


def wait_for_keyed_work(seconds: float = 30.0) -> bool:
    """Have delayed keyed work begin now, and wait until none waits or runs. Return whether that is
    so."""
    return _savers.wait_until_idle(seconds)


class AfterAnswer:
    """The work of one request, for any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._work: list[Callable[[], object]] = []
        self._is_sent = False

    def add(self, work: Callable[[], object]) -> None:
        """Have the work begin when the answer has been sent; now if it was."""
        with self._lock:
            if not self._is_sent:
                self._work.append(work)
                return
        work()

    def begin(self) -> None:
        """Begin all of it: the answer has been sent, or its client has left."""
        with self._lock:
            self._is_sent = True
            waiting, self._work = self._work, []
        for work in waiting:
            try:
                work()
            except Exception:
                logger.exception("work after an answer could not begin")

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Within it, and in copies of its context, `after_answer` means this request."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)


_current: ContextVar[AfterAnswer | None] = ContextVar("after_answer", default=None)


def after_answer(work: Callable[[], object]) -> None:
    """Have the work begin when the request's answer has been sent. It must not wait for anything:
    it is begun by the web server's event loop."""
    request = _current.get()
    if request is None:
        work()
    else:
        request.add(work)
