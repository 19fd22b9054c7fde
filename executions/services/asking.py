"""Asking a provider for something: within a time of ours, and whatever it raises."""

from __future__ import annotations

import logging
import math
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from executions.services.waiting import Waits
from executions.text import storable
from providers.errors import CODES, ProviderUnavailable, RateLimited, SandboxError
from providers.remote.deadline import DeadlinePassed
from providers.waiting import within

logger = logging.getLogger(__name__)

T = TypeVar("T")

# How long a provider may take to hand out a sandbox, less than an open record may stay without
# having started; to end one; and what it may add to a run, where its own deadlines come first.
CREATE_SECONDS = 100.0
DESTROY_SECONDS = 10.0
RUN_SLACK_SECONDS = 8.0

# The provider in this process keeps its deadlines itself.
_KEEPS_TIME = frozenset({"local"})

# Calls of one provider that did not end in time and go on. With so many it is not asked again.
MOST_OVERDUE = 64

_MESSAGE_CHARACTERS = 2000

_overdue: Counter[str] = Counter()
_lock = threading.Lock()


def ask(
    provider_id: str,
    begin: Callable[[], Future[Any]],
    check: Callable[[Any], T],
    seconds: float,
    *,
    may_refuse: bool = False,
    started: bool = False,
    too_late: Callable[[T], object] | None = None,
) -> Waits[T]:
    """What the provider's answer is after `check`. Raises SandboxError and nothing else.

    `begin` asks the provider. Whatever else this, the answer or `check` raises, SystemExit
    included, is logged and told as ProviderUnavailable; so is silence after `seconds`. `started`
    says whether code may be running by then. An answer that comes after that is handed to
    `too_late` and is otherwise lost. With `may_refuse` a provider that lets too many wait is not
    asked; what has begun is also carried out and ended.
    """
    if may_refuse and _overdue[provider_id] >= MOST_OVERDUE:
        # Full, and not ill: code that makes its provider hang must not take it from the others.
        raise RateLimited(
            f"{MOST_OVERDUE} calls of the provider {provider_id!r} have not ended in their time.",
            retry_after=10,
        )
    answer = awaited = guarded(provider_id, begin, started=started)
    if provider_id not in _KEEPS_TIME:
        awaited = within(seconds, answer)
    if not awaited.done():
        yield awaited
    if not awaited.cancelled() and isinstance(awaited.exception(), DeadlinePassed):
        _give_up(provider_id, answer, check, too_late)
        raise ProviderUnavailable(
            f"The provider {provider_id!r} did not answer within {seconds:g} s. What it may answer "
            "later is dropped.",
            started=started,
        )
    if awaited.cancelled():
        raise ProviderUnavailable(
            f"The provider {provider_id!r} was closed meanwhile.", started=started
        )
    return guarded(provider_id, lambda: check(awaited.result()), started=started)


def _give_up(
    provider_id: str,
    answer: Future[Any],
    check: Callable[[Any], T],
    too_late: Callable[[T], object] | None,
) -> None:
    with _lock:
        _overdue[provider_id] += 1

    def come_late(late: Future[Any]) -> None:
        with _lock:
            _overdue[provider_id] -= 1
        logger.warning("provider %s answered after its time; the answer is lost", provider_id)
        if too_late is not None and not late.cancelled() and late.exception() is None:
            try:
                guarded(provider_id, lambda: too_late(check(late.result())))
            except SandboxError as error:
                logger.warning("what came late of %s stays: %s", provider_id, error.message)

    answer.add_done_callback(come_late)


def guarded(provider_id: str, call: Callable[[], T], *, started: bool = False) -> T:
    """As `ask`, without a deadline: for what a provider says of itself without looking far."""
    try:
        return call()
    except SandboxError as error:
        raise _sound(error) from error
    except BaseException as error:
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
