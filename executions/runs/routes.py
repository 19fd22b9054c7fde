"""Ways to a provider: whom a step of a route lends, and when it can be had."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

from executions.kernel.background import Coroutine, wait_for
from executions.runs import active_runs
from executions.runs.models import Execution
from executions.runs.results import ValidatedResult
from providers.errors import SandboxError
from providers.manager import LOAD_SECONDS, Lease, StillStarting
from providers.named import lease_of
from providers.values import ExecutionResult
from providers.waiting import within


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


async def lent(step: Step, held: ExitStack, may_wait: Callable[[], bool] = lambda: True) -> Lease:
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
            await wait_for(awaited)
        active_runs.ensure_not_ending()
