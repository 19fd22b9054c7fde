"""Work for a few threads, of which tenants have turns: slow work of one tenant holds up itself."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, TypeVar

from providers.errors import RateLimited

T = TypeVar("T")


@dataclass(frozen=True)
class Bounds:
    """How much is done at once, of which one tenant never has all, and how much of one tenant is
    done or waits. `work` names it in the plural, for whoever has too much of it."""

    at_once: int
    of_one_tenant: int
    work: str


class Turns(Generic[T]):
    """Threads as long as there is something to do. The tenant that waited longest is next."""

    def __init__(self, bounds: Bounds, name: str) -> None:
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
