"""A deadline of our own for calls that do not keep theirs."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from providers.errors import RateLimited
from providers.threads import start_thread

T = TypeVar("T")

# So many calls of one line may have been given up and still go on.
MOST_GIVEN_UP = 32

RETRY_AFTER_SECONDS = 10.0

_given_up: Counter[str] = Counter()
_lock = threading.Lock()


class DeadlinePassed(Exception):
    """The call had not ended in time. It may still end; its caller no longer waits."""


def call_within(
    seconds: float,
    function: Callable[[], T],
    *,
    too_late: Callable[[T], None] | None = None,
    line: str = "",
) -> T:
    """What `function` returns or raises, or DeadlinePassed after `seconds`.

    A thread of its own runs it, because the clients' timeouts fire late or not at all. Where it
    returns after the deadline, `too_late` is handed the value, to undo what nobody waits for.

    `line` names whom is asked. Raises RateLimited, and asks nobody, while MOST_GIVEN_UP calls of
    the line go on after their time: each holds a thread. What ends something has no line, and nor
    has what runs code, which could fill it.
    """
    with _lock:
        if line and _given_up[line] >= MOST_GIVEN_UP:
            raise RateLimited(
                f"{MOST_GIVEN_UP} calls to {line} have not ended in their time.",
                retry_after=RETRY_AFTER_SECONDS,
            )
    future: Future[T] = Future()
    lock = threading.Lock()
    abandoned = False

    def work() -> None:
        error: BaseException | None = None
        try:
            value = function()
        except BaseException as raised:
            error = raised
        with lock:
            late = abandoned
            if not late and error is not None:
                future.set_exception(error)
            elif not late:
                future.set_result(value)
        if not late:
            return
        with _lock:
            _given_up[line] -= 1
            if not _given_up[line]:
                del _given_up[line]
        if error is None and too_late is not None:
            too_late(value)

    start_thread("remote-call", work)
    try:
        return future.result(timeout=seconds)
    except TimeoutError:
        with lock:
            if future.done():
                return future.result()
            abandoned = True
            with _lock:
                _given_up[line] += 1
        raise DeadlinePassed from None
