"""Asking a provider for something: within a time of ours, and whatever it raises."""

from __future__ import annotations

import logging
import math
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

from executions.kernel.background import wait_for
from executions.kernel.text import storable
from executions.runs import active_runs
from providers import draining
from providers.errors import CODES, ProviderUnavailable, RateLimited, SandboxError
from providers.remote.deadline import DeadlinePassed
from providers.waiting import within

logger = logging.getLogger(__name__)

T = TypeVar("T")

# How long a provider may take to hand out a sandbox, less than an open record may stay without
# having started; and what it may add to a run, where its own deadlines come first.
CREATE_SECONDS = 100.0
RUN_SLACK_SECONDS = 8.0

# The provider in this process keeps its deadlines itself.
_KEEPS_TIME = frozenset({"local"})

# Calls of one provider that did not end in time and go on. Beyond so many it is not asked again: by
# the tenant whose they are, because code can make a call hang; and by nobody beyond what takes the
# shares of several.
MOST_OVERDUE_OF_ONE = 16
MOST_OVERDUE = 128

_MESSAGE_CHARACTERS = 2000

_overdue: Counter[tuple[str, str]] = Counter()
_lock = threading.Lock()


async def call_provider(
    provider_id: str,
    begin: Callable[[], Future[Any]],
    check: Callable[[Any], T],
    seconds: float,
    *,
    owner: str,
    may_refuse: bool = False,
    started: bool = False,
    too_late: Callable[[T], object] | None = None,
    waiting: Callable[[Future[Any]], AbstractContextManager[Any]] = nullcontext,
) -> T:
    """What the provider's answer is after `check`. Raises SandboxError and nothing else.

    `begin` asks the provider. Whatever else this, the answer or `check` raises, SystemExit
    included, is logged and told as ProviderUnavailable; so is silence after `seconds`. `started`
    says whether code may be running by then: each error then says so too, unless it proves that
    nothing ran. An answer that comes after that is handed to `too_late` and is otherwise lost; so
    is one whose waiting was broken off. With `may_refuse` a provider that lets too many wait, of
    `owner` or of all, is not asked; what has begun is also carried out. When the process ends its
    runs, nothing is waited for any longer. `waiting` surrounds the waiting, and may cancel it.
    """
    if may_refuse:
        _refuse_beyond_overdue(provider_id, owner)
    answer = awaited = guard(provider_id, begin, started=started)
    if provider_id not in _KEEPS_TIME:
        awaited = within(seconds, answer)
    if not awaited.done():
        try:
            with active_runs.cancel_on_shutdown(awaited), waiting(awaited):
                await wait_for(awaited)
        except BaseException:
            # Whoever waits goes away, and what he was about to be handed is nobody's.
            _when_late(provider_id, answer, check, too_late)
            raise
    if not awaited.cancelled() and isinstance(awaited.exception(), DeadlinePassed):
        _give_up(provider_id, owner, answer, check, too_late)
        raise ProviderUnavailable(
            f"The provider {provider_id!r} did not answer within {seconds:g} s. A later answer is "
            "dropped.",
            started=started,
        )
    if awaited.cancelled():
        if awaited is not answer:
            _give_up(provider_id, owner, answer, check, too_late)
        if draining.is_ending():
            raise active_runs.stopped(started=started)
        raise ProviderUnavailable(
            f"The provider {provider_id!r} was closed meanwhile.", started=started
        )
    return guard(provider_id, lambda: check(awaited.result()), started=started)


def _refuse_beyond_overdue(provider_id: str, owner: str) -> None:
    """Full, and not ill: code that makes its provider hang must not take it from the others."""
    with _lock:
        own = _overdue[provider_id, owner]
        total = sum(count for (name, _), count in _overdue.items() if name == provider_id)
    if own >= MOST_OVERDUE_OF_ONE or total >= MOST_OVERDUE:
        whose = f"{own} of your calls" if own >= MOST_OVERDUE_OF_ONE else f"{total} calls"
        raise RateLimited(
            f"{whose} of the provider {provider_id!r} have not ended within their timeout.",
            retry_after=10,
        )


def _give_up(
    provider_id: str,
    owner: str,
    answer: Future[Any],
    check: Callable[[Any], T],
    too_late: Callable[[T], object] | None,
) -> None:
    with _lock:
        _overdue[provider_id, owner] += 1

    def count_down(late: Future[Any]) -> None:
        with _lock:
            _overdue[provider_id, owner] -= 1
            if not _overdue[provider_id, owner]:
                del _overdue[provider_id, owner]
        logger.warning("provider %s answered after its time; the answer is lost", provider_id)

    answer.add_done_callback(count_down)
    _when_late(provider_id, answer, check, too_late)


def _when_late(
    provider_id: str,
    answer: Future[Any],
    check: Callable[[Any], T],
    too_late: Callable[[T], object] | None,
) -> None:
    """Hand an answer that nobody waits for to `too_late`."""
    if too_late is None:
        return

    def come_late(late: Future[Any]) -> None:
        if late.cancelled() or late.exception() is not None:
            return
        try:
            guard(provider_id, lambda: too_late(check(late.result())))
        except SandboxError as error:
            logger.warning(
                "the late result of %s cannot be cleaned up: %s", provider_id, error.message
            )

    answer.add_done_callback(come_late)


def guard(provider_id: str, call: Callable[[], T], *, started: bool = False) -> T:
    """Call a provider without a deadline: for what it says of itself without looking far."""
    try:
        return call()
    except SandboxError as error:
        raise _sound(error, started) from error
    except BaseException as error:
        logger.exception("provider %s failed with %s", provider_id, type(error).__name__)
        raise ProviderUnavailable(
            f"The provider failed with {storable(type(error).__name__)[:80]}, which is a defect of "
            "the provider. The service's log has the reason.",
            started=started,
        ) from None


def _sound(error: SandboxError, started: bool) -> SandboxError:
    """The error, with nothing in it that cannot be recorded or answered with.

    Where code may be running, that it is not has to be proven: `before_the_code`.
    """
    if CODES.get(getattr(error.entry, "code", "")) is not error.entry:
        return ProviderUnavailable("The provider failed in an unknown way.", started=True)
    error.message = storable(str(error.message))[:_MESSAGE_CHARACTERS]
    error.field = _text(error.field)
    error.started = bool(error.started) or (started and error.nothing_ran is not True)
    wait: Any = error.retry_after
    if wait is not None and (type(wait) not in (int, float) or not 0 <= wait < math.inf):
        error.retry_after = None
    return error


def _text(field: Any) -> str | None:
    return storable(field)[:100] if isinstance(field, str) else None
