"""Asking a provider for something: within a time of ours, and whatever it raises."""

from __future__ import annotations

import logging
import math
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

from executions.text import storable
from providers.errors import CODES, ProviderUnavailable, RateLimited, SandboxError
from providers.remote.deadline import DeadlinePassed, call_within

logger = logging.getLogger(__name__)

T = TypeVar("T")

# How long a provider may take to hand out a sandbox, less than an open record may stay without
# having started; to end one; and what it may add to a run, where its own deadlines come first.
CREATE_SECONDS = 100.0
DESTROY_SECONDS = 10.0
RUN_SLACK_SECONDS = 8.0

# The provider in this process keeps its deadlines itself, and a thread for each call would cost it.
_KEEPS_TIME = frozenset({"local"})

# Calls of one provider that did not end in time and go on. With so many it is not asked again.
MOST_OVERDUE = 64

_MESSAGE_CHARACTERS = 2000

_overdue: Counter[str] = Counter()
_lock = threading.Lock()


def ask(
    provider_id: str,
    call: Callable[[], T],
    seconds: float,
    *,
    started: bool = False,
    too_late: Callable[[T], object] | None = None,
) -> T:
    """What `call`, which asks this provider, returns. Raises SandboxError and nothing else.

    Whatever else the provider raises, SystemExit included, is logged and told as
    ProviderUnavailable; so is silence after `seconds`. `started` says whether code may be running
    by then. A value that comes after that is handed to `too_late` and is otherwise lost.
    """
    if provider_id in _KEEPS_TIME:
        return _guarded(provider_id, call, started, Exception)
    if _overdue[provider_id] >= MOST_OVERDUE:
        # Full, and not ill: code that makes its provider hang must not take it from the others.
        raise RateLimited(
            f"{MOST_OVERDUE} calls of the provider {provider_id!r} have not ended in their time.",
            retry_after=10,
        )
    ended = threading.Event()

    def work() -> T:
        try:
            return _guarded(provider_id, call, started, BaseException)
        finally:
            with _lock:
                if ended.is_set():
                    _overdue[provider_id] -= 1
                ended.set()

    def come_late(value: T) -> None:
        logger.warning("provider %s answered after its time; the answer is lost", provider_id)
        if too_late is not None:
            too_late(value)

    try:
        return call_within(seconds, work, too_late=come_late)
    except DeadlinePassed:
        with _lock:
            if not ended.is_set():
                ended.set()
                _overdue[provider_id] += 1
        raise ProviderUnavailable(
            f"The provider {provider_id!r} did not answer within {seconds:g} s. What it may answer "
            "later is dropped.",
            started=started,
        ) from None


def guarded(provider_id: str, call: Callable[[], T]) -> T:
    """As `ask`, without a deadline: for what a provider says of itself without looking far."""
    return _guarded(provider_id, call, False, BaseException)


def _guarded(
    provider_id: str, call: Callable[[], T], started: bool, kind: type[BaseException]
) -> T:
    try:
        return call()
    except SandboxError as error:
        raise _sound(error) from error
    except kind as error:
        logger.exception("provider %s failed with %s", provider_id, type(error).__name__)
        raise ProviderUnavailable(
            f"The provider failed with {storable(type(error).__name__)[:80]}, which it should not. "
            "The service's log has the reason.",
            started=started,
        ) from None


def _sound(error: SandboxError) -> SandboxError:
    """The error, with nothing in it that cannot be recorded or answered with."""
    if CODES.get(getattr(error.entry, "code", "")) is not error.entry:
        return ProviderUnavailable("The provider failed in an unknown way.", started=True)
    error.message = storable(str(error.message))[:_MESSAGE_CHARACTERS]
    error.field = _text(error.field)
    error.started = bool(error.started)
    wait: Any = error.retry_after
    if wait is not None and (type(wait) not in (int, float) or not 0 <= wait < math.inf):
        error.retry_after = None
    return error


def _text(field: Any) -> str | None:
    return storable(field)[:100] if isinstance(field, str) else None
