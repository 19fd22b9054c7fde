"""From one provider to the next: what is tried for a request, and when a provider is left."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from django.db import DatabaseError

from executions.services.asking import guarded
from executions.services.isolation import require_provider
from executions.services.languages import supported_languages
from executions.services.requests import ExecutionRequest
from executions.text import storable
from providers import errors
from providers.base import FILES
from providers.errors import (
    InvalidConfiguration,
    ProviderUnavailable,
    RateLimited,
    SandboxError,
)
from providers.isolation import IsolationUnmet
from providers.manager import Lease, manager
from providers.named import lease_of
from providers.services import breaker
from providers.services.probing import doubt
from providers.services.routing import planned, reachable

logger = logging.getLogger(__name__)

Route = Callable[[], AbstractContextManager[Lease]]

# A full or throttled provider is left too: that is what overflowing to another one means.
_LEAVABLE = (
    errors.NOT_INITIALIZED,
    errors.CONNECTION_FAILED,
    errors.CREATION_FAILED,
    errors.RATE_LIMITED,
    errors.UNAVAILABLE,
)


class PassedOver(ProviderUnavailable):
    """A provider was not asked at all, which says nothing of its health."""


class Unfit(PassedOver):
    """It could never carry out this request."""


@dataclass(frozen=True)
class Step:
    """A provider to try. Without an id it is whichever is active, or one the caller chose."""

    route: Route
    provider_id: str = ""


def steps_for(language: str, tenant_slug: str, route: Route | None = None) -> list[Step]:
    """What to try for a request, in order; `route` alone where the caller has chosen."""
    if route is not None:
        return [Step(route)]
    ids = planned(tenant_slug, language)
    if not ids:
        return [Step(manager.lease)]
    return [Step(_lender(provider_id), provider_id) for provider_id in ids]


def languages_for(tenant_slug: str) -> list[str]:
    """Every language that a request of the tenant can be served in now. Raises SandboxError.

    Providers that cannot be asked are left out, unless there is no other.
    """
    offered: dict[str, set[str]] = {}
    failure: SandboxError | None = None
    for provider_id in {*reachable(tenant_slug), ""}:
        try:
            with lease_of(provider_id) if provider_id else manager.lease() as lease:
                offered[provider_id] = set(supported_languages(lease))
        except SandboxError as error:
            failure = error
    if not offered and failure is not None:
        raise failure
    return sorted(
        language
        for language in set().union(*offered.values())
        if any(
            language in offered.get(step.provider_id, ())
            for step in steps_for(language, tenant_slug)
        )
    )


def _lender(provider_id: str) -> Route:
    return lambda: lease_of(provider_id)


def admit(
    step: Step, request: ExecutionRequest, floor: str, *, is_only: bool, is_last: bool
) -> None:
    """Raise PassedOver, or RateLimited for one that is full, where a step need not be tried.

    One that cannot be isolated as `floor` demands is IsolationUnmet.

    The only provider there is is always asked: a wrong guess about it would cost an answer.
    """
    if is_only:
        return
    with step.route() as lease:
        provider, name = lease.provider, step.provider_id
        require_provider(lease, floor)
        languages = supported_languages(lease)
        longest = guarded(name, lambda: provider.max_timeout)
        if request.language not in languages:
            raise Unfit(f"{step.provider_id} does not run {request.language}.")
        if longest is not None and request.seconds > longest:
            raise Unfit(f"{step.provider_id} runs code for {longest:g} s at most.")
        if request.files and FILES not in provider.capabilities:
            raise Unfit(f"{step.provider_id} takes no files.")
        if not is_last and guarded(name, provider.is_full):
            raise RateLimited(f"{step.provider_id} is full.")
    if not breaker.admits(step.provider_id):
        raise PassedOver(f"{step.provider_id} is out of service for now.")


@contextmanager
def _reporting(provider_id: str) -> Iterator[None]:
    """What became of the code matters more than that the breaker hears of it."""
    try:
        yield
    except DatabaseError:
        logger.exception("the breaker of %s could not be told", provider_id)


class Hops:
    """Who was tried, and why each was left. `recorded` is JSON, empty for a lone provider."""

    def __init__(self) -> None:
        self.recorded: list[dict[str, Any]] = []
        self._failure: SandboxError | None = None
        self._unfit_only = True
        self._unmet = False

    def left(self, step: Step, error: SandboxError, milliseconds: float) -> None:
        """Note a failure, for the record and for the breaker."""
        unmet = isinstance(error, IsolationUnmet)
        passed_over = isinstance(error, PassedOver) or unmet
        self._unmet = self._unmet or unmet
        if unmet and step.provider_id:
            with _reporting(step.provider_id):
                breaker.give_back(step.provider_id)
        self._unfit_only = self._unfit_only and isinstance(error, Unfit)
        if step.provider_id:
            self.recorded.append(
                {
                    "provider": step.provider_id,
                    "outcome": "passed over" if passed_over else "failed",
                    "code": "" if passed_over else error.code,
                    "reason": storable(error.message),
                    "ms": milliseconds,
                }
            )
        if not passed_over:
            self._failure = error
            if step.provider_id:
                with _reporting(step.provider_id):
                    if error.started:
                        # Code was there by then, and may be the reason. A probe finds out.
                        doubt(step.provider_id)
                    else:
                        breaker.report_failure(step.provider_id, error)

    def served(
        self, step: Step, milliseconds: float, start_ms: float, *, alone: bool, died: bool = False
    ) -> None:
        """Note a success. `start_ms` is what the sandbox took to start: the rest is the code's.

        That a sandbox `died` during the run says nothing for the provider, and nothing against it.
        """
        if not step.provider_id:
            return
        with _reporting(step.provider_id):
            if died:
                doubt(step.provider_id)
            else:
                breaker.report_success(step.provider_id, start_ms)
        if not alone:
            self.recorded.append(
                {"provider": step.provider_id, "outcome": "served", "ms": milliseconds}
            )

    @staticmethod
    def may_leave(error: SandboxError) -> bool:
        return error.entry in _LEAVABLE

    def telling(self, error: SandboxError) -> SandboxError:
        """The error to tell: what went wrong, rather than that the last one was passed over."""
        not_asked = isinstance(error, PassedOver | IsolationUnmet)
        failure = self._failure if not_asked else error
        if failure is not None and (
            not self._unmet or failure.started or failure.entry not in breaker.ILL
        ):
            return failure
        reasons = " ".join(hop["reason"] for hop in self.recorded)
        if self._unmet and isinstance(error, IsolationUnmet) and len(self.recorded) < 2:
            return error
        if self._unmet:
            return IsolationUnmet(f"No provider of the route is isolated enough. {reasons}")
        kind = InvalidConfiguration if self._unfit_only else ProviderUnavailable
        return kind(f"No provider of the route can serve this. {reasons}")
