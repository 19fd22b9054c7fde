"""Providers of a run: which one a step of a route lends, and calls to it.

A call has a time of ours, and ends in an error of ours, whatever the provider raises.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from executions.kernel.coroutines import Coroutine, wait_for
from executions.kernel.text import storable
from executions.runs import active_runs
from executions.runs.models import Execution
from executions.runs.results import ValidatedResult
from providers import draining
from providers.errors import CODES, ProviderUnavailable, RateLimited, SandboxError
from providers.leases import lease_of
from providers.manager import LOAD_SECONDS, Lease, StillStarting
from providers.remote.deadline import DeadlinePassed
from providers.sandbox import Sandbox
from providers.values import ExecutionResult
from providers.waiting import submit, within

logger = logging.getLogger(__name__)

T = TypeVar("T")

# How long a provider may take to hand out a sandbox, less than an open record may stay without
# having started; and what it may add to a run, where its own deadlines come first.
CREATE_SECONDS = 100.0
RUN_SLACK_SECONDS = 8.0

# The client of the pool service of this host keeps its deadlines itself.
_KEEPS_TIME = frozenset({"local"})

# Calls of one provider that did not end in time and go on. Beyond so many it is not asked again: by
# the tenant whose they are, because code can make a call hang; and by nobody beyond what takes the
# shares of several.
MOST_OVERDUE_OF_ONE = 16
MOST_OVERDUE = 128

# How long a provider may take to end a sandbox. After that it is its own to see to.
DESTROY_SECONDS = 10.0
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
            raise active_runs.stop_error(started=started)
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


class Route(Protocol):
    """Lends a provider. Without `wait` it raises StillStarting for one that is not there yet."""

    def __call__(self, *, wait: bool = True) -> AbstractContextManager[Lease]: ...


class HostClosed(SandboxError):
    """The sandbox was closed by request, before or while something ran in it."""


class Host(Protocol):
    """The owner of a sandbox that stays: what it does around each run there."""

    @property
    def provider(self) -> str:
        """The id of the provider that has the sandbox."""

    def bind(self, execution: Execution) -> None:
        """Give the row of an execution the owner that is known, so that it is not read again."""

    def run(
        self, execution: Execution, run: Callable[[], Coroutine[ValidatedResult]]
    ) -> Coroutine[ValidatedResult]:
        """Call `run`, once the sandbox is there; again where it was gone before code ran."""

    def end_of(self, error: SandboxError) -> SandboxError:
        """Return what to tell of a run whose sandbox is gone; HostClosed where it was closed."""

    def result_values(self, execution: Execution, result: ExecutionResult) -> dict[str, Any]:
        """Return columns that a record has of its place in the sandbox."""

    def result_metadata(self, execution: Execution) -> Mapping[str, Any]:
        """Return what the metadata of a record with a result says of the sandbox."""

    def note_recorded(self, metadata: Mapping[str, Any]) -> None:
        """Note that a result with this metadata was recorded."""

    def after_run(self, execution: Execution) -> Coroutine[None]:
        """Do what follows each run there, before it is answered."""


@dataclass(frozen=True)
class Step:
    """A provider to try. Without an id it is whichever is active, or one the caller chose.

    `host` is the owner of the sandbox that it lends, where that stays.
    """

    route: Route
    provider_id: str = ""
    host: Host | None = None


def lender(provider_id: str) -> Route:
    """The route to one certain provider."""
    return lambda *, wait=True: lease_of(provider_id, wait=wait)


async def borrow_lease(
    step: Step, held: ExitStack, may_wait: Callable[[], bool] = lambda: True
) -> Lease:
    """Lease the step's provider until `held` is closed. One that is starting is waited for as a
    future.

    Raises StillStarting where `may_wait` says that it is not to be waited for, or after
    LOAD_SECONDS, and what the route does.
    """
    deadline = time.monotonic() + LOAD_SECONDS
    while True:
        try:
            return held.enter_context(step.route(wait=False))
        except StillStarting as starting:
            left = deadline - time.monotonic()
            if left <= 0 or not may_wait():
                raise
            awaited = within(left, starting.ready)
        with active_runs.cancel_on_shutdown(awaited):
            await wait_for(awaited)
        active_runs.ensure_not_ending()


def close_in_background(lease: Lease, sandbox: Sandbox, held: ExitStack) -> None:
    """Have the sandbox ended. What `held` lends stays lent until it is, or DESTROY_SECONDS long.

    Never raises SandboxError: the result is there and belongs to the caller, whatever becomes of
    the sandbox.
    """
    try:
        ending = guard(lease.provider_id, lambda: sandbox.submit_close())
    except SandboxError as error:
        _complain(sandbox, error)
        return
    ended = within(DESTROY_SECONDS, ending)
    if ended.done():
        _look_at(ended, sandbox)
        return
    lent, given_back = held.pop_all(), Future[None]()
    active_runs.track_teardown(given_back)

    def give_back() -> None:
        # A provider that was lent to nobody else is closed by this, which takes its time.
        try:
            lent.close()
        finally:
            given_back.set_result(None)

    def done(_: Future[Any]) -> None:
        _look_at(ended, sandbox)
        submit(give_back)

    ended.add_done_callback(done)


def _look_at(ended: Future[Any], sandbox: Sandbox) -> None:
    try:
        ended.result()
    except BaseException as error:  # what was raised elsewhere, SystemExit included
        _complain(sandbox, error)


def _complain(sandbox: Sandbox, error: BaseException) -> None:
    logger.error("sandbox %s could not be destroyed", sandbox.ref, exc_info=error)
