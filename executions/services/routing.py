"""From one provider to the next: what is tried for a request, and when a provider is left."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from django.db import DatabaseError

from executions.kernel.coroutines import Waits
from executions.kernel.text import storable
from executions.services.asking import guarded
from executions.services.choosing import require_choice
from executions.services.isolation import require_provider
from executions.services.languages import supported_languages
from executions.services.policies.in_force import BlockedByPolicy
from executions.services.requests import ExecutionRequest
from executions.services.routes import Route, Step, lender, lent
from executions.services.timeouts import longest_at
from providers import errors, looks
from providers.base import FILES, TOOLS
from providers.errors import (
    InvalidConfiguration,
    ProviderUnavailable,
    RateLimited,
    SandboxError,
)
from providers.isolation import IsolationUnmet
from providers.manager import Lease, StillStarting, manager
from providers.services import ahead, breaker
from providers.services.probing import doubt
from providers.services.route_order import planned, reachable
from providers.values import Packages

logger = logging.getLogger(__name__)

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


def steps_for(
    language: str, tenant_slug: str, route: Route | None = None, *, chosen: str = ""
) -> list[Step]:
    """What to try for a request, in order; `route` or the provider `chosen` alone where there is
    one. Raises InvalidConfiguration for one that cannot be chosen."""
    if route is not None:
        return [Step(route)]
    if chosen:
        require_choice(chosen, tenant_slug, language)
        return [Step(lender(chosen), chosen)]
    ids = planned(tenant_slug, language)
    if not ids:
        return [Step(manager.lease)]
    return [Step(lender(provider_id), provider_id) for provider_id in ids]


def languages_for(
    tenant_slug: str, may_use: Callable[[str], bool] = lambda provider_id: True
) -> Waits[tuple[list[str], dict[str, Packages]]]:
    """Every language that a request of the tenant can be served in now, by the providers that it
    `may_use`, and the packages by the id of the provider that knows its own. Raises SandboxError.

    Providers that cannot be asked are left out, unless there is no other.
    """
    packages: dict[str, Packages] = {}
    offers = partial(_offers, tenant_slug, may_use, packages)
    offered, failure = yield from offers(patient=not ahead.is_on())
    if not offered and isinstance(failure, StillStarting):
        offered, failure = yield from offers(patient=True)
    if not offered and failure is not None:
        raise failure
    languages = sorted(
        language
        for language in set().union(*offered.values())
        if any(
            language in offered.get(step.provider_id, ())
            for step in steps_for(language, tenant_slug)
        )
    )
    return languages, packages


def _offers(
    tenant_slug: str,
    may_use: Callable[[str], bool],
    packages: dict[str, Packages],
    *,
    patient: bool,
) -> Waits[tuple[dict[str, list[str]], SandboxError | None]]:
    """What each provider offers, and why one does not."""
    offered: dict[str, list[str]] = {}
    failure: SandboxError | None = None
    for provider_id in {*filter(may_use, reachable(tenant_slug)), ""}:
        step = Step(lender(provider_id) if provider_id else manager.lease, provider_id)
        try:
            with ExitStack() as held:
                lease = yield from lent(step, held, lambda: patient)
                if may_use(lease.provider_id):
                    offered[provider_id] = supported_languages(lease)
                    if known := lease.provider.get_packages():
                        packages[lease.provider_id] = known
        except SandboxError as error:
            if failure is None or isinstance(error, StillStarting):
                failure = error
    return offered, failure


def admitted(
    step: Step,
    request: ExecutionRequest,
    floor: str,
    held: ExitStack,
    *,
    is_only: bool,
    is_last: bool,
) -> Waits[Lease]:
    """The step's provider, until `held` is closed, if it is to be tried.

    Raises PassedOver, or RateLimited for one that is full, where it need not be; IsolationUnmet for
    one that cannot be isolated as `floor` demands. The breaker is asked first, because all else may
    take its time, and what else is asked is known already. Only the last one is waited for while it
    starts, if somebody starts the others.

    The only provider there is is always asked: a wrong guess about it would cost an answer.
    """
    if is_only:
        return (yield from lent(step, held))
    standing = breaker.standing_of(step.provider_id)
    if standing.is_out:
        raise _out_of_service(step)
    try:
        lease = yield from lent(step, held, lambda: is_last or not ahead.is_on())
    except StillStarting:
        if is_last or not ahead.is_on():
            raise
        raise PassedOver(f"{step.provider_id} is still starting.") from None
    _require_fit(lease, step.provider_id, request, floor)
    if not is_last and guarded(step.provider_id, lambda: looks.is_full(lease.provider)):
        raise RateLimited(f"{step.provider_id} is full.")
    if not standing.claim():
        raise _out_of_service(step)
    return lease


def _require_fit(lease: Lease, name: str, request: ExecutionRequest, floor: str) -> None:
    provider = lease.provider
    require_provider(lease, floor)
    languages = supported_languages(lease)
    longest = longest_at(lease)
    if request.language not in languages:
        raise Unfit(f"{name} does not run {request.language}.")
    if longest is not None and request.timeout is not None and request.timeout > longest:
        raise Unfit(f"{name} runs code for {longest:g} s at most.", field="timeout")
    if request.files and FILES not in provider.capabilities:
        raise Unfit(f"{name} does not support files.")
    if request.tools and not takes_tools(lease):
        raise Unfit(f"{name} does not support tools.", field="tools")


def takes_tools(lease: Lease) -> bool:
    """Whether code that calls tools can be run there."""
    return TOOLS in lease.provider.capabilities


def _out_of_service(step: Step) -> PassedOver:
    return PassedOver(f"{step.provider_id} is out of service for now.")


@contextmanager
def _reporting(provider_id: str) -> Iterator[None]:
    """What became of the code matters more than that the breaker hears of it."""
    try:
        yield
    except DatabaseError:
        logger.exception("the circuit breaker of %s could not be updated", provider_id)


class Hops:
    """Who was tried, and why each was left. `recorded` is JSON, empty for a lone provider."""

    def __init__(self) -> None:
        self.recorded: list[dict[str, Any]] = []
        self._failure: SandboxError | None = None
        self._unfit_only = True
        self._unfit_for: set[str | None] = set()
        self._unmet = False
        self._blocked: BlockedByPolicy | None = None
        self._refused_only = True

    def left(self, step: Step, error: SandboxError, milliseconds: float) -> None:
        """Note a failure, for the record and for the breaker."""
        unmet = isinstance(error, IsolationUnmet)
        blocked = isinstance(error, BlockedByPolicy)
        passed_over = isinstance(error, PassedOver) or unmet or blocked
        self._unmet = self._unmet or unmet
        if isinstance(error, BlockedByPolicy):
            self._blocked = error
        self._refused_only = self._refused_only and (blocked or isinstance(error, Unfit))
        if (unmet or blocked) and step.provider_id:
            with _reporting(step.provider_id):
                breaker.give_back(step.provider_id)
        self._unfit_only = self._unfit_only and isinstance(error, Unfit)
        self._unfit_for.add(error.field)
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

    def given_up(self, step: Step) -> None:
        """Note that it was not let end, which says nothing of the provider."""
        if step.provider_id:
            with _reporting(step.provider_id):
                breaker.give_back(step.provider_id)

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
        return error.entry in _LEAVABLE or isinstance(error, BlockedByPolicy)

    def telling(self, error: SandboxError) -> SandboxError:
        """The error to tell: what went wrong, rather than that the last one was passed over."""
        if self._blocked is not None and self._refused_only:
            # Where it could run it may not.
            return self._blocked
        not_asked = isinstance(error, PassedOver | IsolationUnmet | BlockedByPolicy)
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
        message = f"No provider of the route can serve this. {reasons}"
        if not self._unfit_only:
            return ProviderUnavailable(message)
        [*fields] = self._unfit_for
        return InvalidConfiguration(message, field=fields[0] if len(fields) == 1 else None)
