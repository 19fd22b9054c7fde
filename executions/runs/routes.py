"""Ways to a provider: whom a step of a route lends, and when it can be had."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Protocol

from executions.kernel.coroutines import Coroutine
from executions.runs import active_runs
from executions.sessions.models import Session
from providers.manager import LOAD_SECONDS, Lease, StillStarting
from providers.named import lease_of
from providers.waiting import within


class Route(Protocol):
    """Lends a provider. Without `wait` it raises StillStarting for one that is not there yet."""

    def __call__(self, *, wait: bool = True) -> AbstractContextManager[Lease]: ...


@dataclass(frozen=True)
class Step:
    """A provider to try. Without an id it is whichever is active, or one the caller chose.

    `session` is the one whose sandbox it lends, where it does.
    """

    route: Route
    provider_id: str = ""
    session: Session | None = None


def lender(provider_id: str) -> Route:
    """The route to one certain provider."""
    return lambda *, wait=True: lease_of(provider_id, wait=wait)


def lent(
    step: Step, held: ExitStack, may_wait: Callable[[], bool] = lambda: True
) -> Coroutine[Lease]:
    """The step's provider, until `held` is closed. One that is starting is waited for as a future.

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
            yield awaited
        active_runs.ensure_not_ending()
