"""Threads of the service: their start, loops with a pause, and their state after a fork."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from types import MethodType
from weakref import WeakMethod

from providers.errors import RateLimited

logger = logging.getLogger(__name__)

_RETRY_AFTER_SECONDS = 5.0
_RETRY_SECONDS = 1.0

_before_ticks: list[Callable[[], object]] = []
_at_ends: list[Callable[[], object]] = []


def register_thread_hooks(
    *, before_tick: Callable[[], object], at_end: Callable[[], object]
) -> None:
    """Have `before_tick` called before each call of a loop, and `at_end` when a thread ends, in it.

    What a thread holds, such as a connection to a database, is closed there.
    """
    _before_ticks.append(before_tick)
    _at_ends.append(at_end)


class NoThreadLeft(RateLimited):
    """The system has no further thread for this process now."""


def start_thread(
    name: str,
    work: Callable[[], object],
    *,
    at_end: Callable[[], object] | None = None,
    daemon: bool = True,
) -> threading.Thread:
    """Start a thread that does `work`, and return it.

    The error that `work` raises is logged, and the registered hooks are called. `at_end` is called
    after that, or here where the thread cannot start: it gives back what the
    work held. The process waits at its end for a thread that is no `daemon`.

    Raises NoThreadLeft.
    """

    def run() -> None:
        try:
            try:
                work()
            except Exception:
                logger.exception("the thread %s failed", name)
            finally:
                for hook in _at_ends:
                    hook()
        finally:
            if at_end is not None:
                at_end()

    thread = threading.Thread(target=run, name=name, daemon=daemon)
    try:
        thread.start()
    except RuntimeError as error:
        if at_end is not None:
            at_end()
        raise NoThreadLeft(
            f"The process has no thread left for {name}: {error}.",
            retry_after=_RETRY_AFTER_SECONDS,
        ) from error
    return thread


class Loop:
    """Calls `tick` again and again, in a daemon thread with its own connection to the database.

    `tick` returns after how many seconds it is called again, or None to end the thread. The next
    `start` begins another one. An error of `tick` is logged, and it is called again. The first call
    waits `first_pause` seconds. Before each call the thread ends where `goes_on` is false.
    """

    def __init__(
        self,
        name: str,
        tick: Callable[[], float | None],
        *,
        goes_on: Callable[[], bool] | None = None,
        first_pause: float = 0.0,
    ) -> None:
        self._name = name
        self._tick = tick
        self._goes_on = goes_on
        self._first_pause = first_pause
        self._forget()
        reset_after_fork(self._forget)

    def _forget(self) -> None:
        # Reentrant: the garbage collector may end a generator that needs the thread, in any thread.
        self._lock = threading.RLock()
        self._woken = threading.Event()
        self._is_running = self._is_wanted = False

    @property
    def is_running(self) -> bool:
        """Whether the thread is there."""
        return self._is_running

    def start(self) -> None:
        """Have the thread run, and call `tick` at least once from now. Raises NoThreadLeft."""
        with self._lock:
            self._is_wanted = True
            if not self._is_running:
                start_thread(self._name, self._work)
                self._is_running = True

    def start_if_possible(self) -> bool:
        """As `start`, but without a thread left this is logged. Return whether it runs."""
        try:
            self.start()
        except NoThreadLeft as error:
            logger.error("%s", error.message)
            return False
        return True

    def wake(self) -> None:
        """End the pause between two calls, if there is one."""
        self._woken.set()

    def _work(self) -> None:
        seconds: float | None = self._first_pause
        try:
            while seconds is not None:
                self._woken.wait(seconds)
                self._woken.clear()
                seconds = self._next()
        except BaseException:
            with self._lock:
                self._is_running = False
            raise

    def _next(self) -> float | None:
        """The pause until the next call; None where the thread ends."""
        with self._lock:
            self._is_wanted = False
        try:
            seconds = None
            if self._goes_on is None or self._goes_on():
                for hook in _before_ticks:
                    hook()
                seconds = self._tick()
        except Exception:
            logger.exception("the thread %s will try again", self._name)
            return _RETRY_SECONDS
        with self._lock:
            if seconds is None and self._is_wanted:
                return 0.0
            self._is_running = seconds is not None
            return seconds


_resets: dict[Callable[[], object] | WeakMethod[Callable[[], object]], None] = {}


def reset_after_fork(reset: Callable[[], object]) -> None:
    """Have a forked child call `reset`: the threads and processes of the parent are not in it.

    The calls come in the order of their registration. A method is registered as long as its object
    is there.
    """
    if isinstance(reset, MethodType):
        _resets[WeakMethod(reset, lambda gone: _resets.pop(gone, None))] = None
    else:
        _resets[reset] = None


def _reset_all() -> None:
    for each in list(_resets):
        reset = each() if isinstance(each, WeakMethod) else each
        try:
            if reset is not None:
                reset()
        except Exception:
            # The others are reset all the same.
            logger.exception("a forked process could not reset %r", reset)


os.register_at_fork(after_in_child=_reset_all)
