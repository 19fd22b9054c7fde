"""A deadline of our own for calls that do not keep theirs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


class DeadlinePassed(Exception):
    """The call had not ended in time. It may still end; its caller no longer waits."""


def call_within(
    seconds: float, function: Callable[[], T], *, too_late: Callable[[T], None] | None = None
) -> T:
    """What `function` returns or raises, or DeadlinePassed after `seconds`.

    A thread of its own runs it, because the clients' timeouts fire late or not at all. Where it
    returns after the deadline, `too_late` is handed the value, to undo what nobody waits for.
    """
    future: Future[T] = Future()
    lock = threading.Lock()
    abandoned = False

    def work() -> None:
        try:
            value = function()
        except BaseException as error:
            future.set_exception(error)
            return
        with lock:
            late = abandoned
            if not late:
                future.set_result(value)
        if late and too_late is not None:
            too_late(value)

    threading.Thread(target=work, name="remote-call", daemon=True).start()
    try:
        return future.result(timeout=seconds)
    except TimeoutError:
        with lock:
            if future.done():
                return future.result()
            abandoned = True
        raise DeadlinePassed from None
