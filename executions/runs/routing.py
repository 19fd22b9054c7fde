"""The route of a request: which providers fit it, and when the next one is tried."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, Generic, TypeVar

from django.conf import settings
from django.db import DatabaseError

from executions.kernel.coroutines import Coroutine
from executions.kernel.declarations import refuse
from executions.kernel.text import storable
from executions.runs import extensions
from executions.runs.models import Execution
from executions.runs.provider_calls import Route, Step, borrow_lease, guard, lender
from executions.runs.requests import Caller, ExecutionRequest
from executions.runs.results import BlockedByPolicy
from executions.tenants.keys import note_refusal
from executions.tenants.models import ApiKey, Tenant
from providers import errors, provider_status, registry
from providers.base import ENVIRONMENT, FILES, TOOLS
from providers.errors import (
    ErrorCode,
    InvalidConfiguration,
    ProviderUnavailable,
    RateLimited,
    SandboxError,
)
from providers.hidden_characters import visible
from providers.isolation import MICROVM, NONE, IsolationUnmet, meets, of_sandbox, strictest
from providers.languages import TABLE, normalize_language
from providers.manager import Lease, StillStarting, manager
from providers.models import ProviderConfig
from providers.network import Network
from providers.provider_status import languages_of
from providers.sandbox import Sandbox
from providers.services import breaker, preload, two_person_rule
from providers.services.probing import doubt
from providers.services.route_order import planned, reachable, route_minimum
from providers.values import Packages

logger = logging.getLogger(__name__)


def choices_for(tenant_slug: str, language: str) -> list[str]:
    """The providers that can be chosen for this tenant's code.

    Each one that is configured, whether it is active or not; what the tenant demands, such as a
    floor of isolation or a policy, holds there too. Under the two-person rule those alone that its
    code goes to now: where it runs is not for one person to choose.
    """
    rows = ProviderConfig.objects.order_by("provider_id").values_list("provider_id", "is_active")
    if not two_person_rule():
        return [provider_id for provider_id, _ in rows]
    route = planned(tenant_slug, language)
    return [
        provider_id
        for provider_id, is_active in rows
        if (provider_id in route if route else is_active)
    ]


def ensure_choice(provider_id: str, tenant_slug: str, language: str) -> None:
    """Raises InvalidConfiguration where this provider cannot be chosen."""
    if provider_id in choices_for(tenant_slug, language):
        return
    if two_person_rule():
        refuse(
            "provider", "The tenant's route does not use it; a change needs two-person approval."
        )
    refuse("provider", f"There is no configuration of {provider_id!r}.")


def required_isolation(execution: Execution) -> str:
    """The strictest that deployment, tenant, policy, key and route demand.

    What is run again keeps to what was demanded of the code when it came, too.
    """
    demanded = [settings.MINIMUM_ISOLATION, *_demands(execution.tenant, execution)]
    if execution.api_key is not None:
        demanded.append(execution.api_key.minimum_isolation)
    original = execution.replay_of
    if original is not None:
        demanded += [*_demands(original.tenant, original), _demand_of_key(original)]
    return strictest(*demanded)


def required_isolation_for(tenant: Tenant, api_key: ApiKey | None, language: str) -> str:
    """The same, of a session."""
    return strictest(
        settings.MINIMUM_ISOLATION,
        tenant.minimum_isolation,
        *_of_extensions(tenant.slug),
        api_key.minimum_isolation if api_key is not None else "",
        route_minimum(tenant.slug, language),
    )


def ensure_provider_isolation(lease: Lease, floor: str) -> None:
    """Raise IsolationUnmet where no sandbox of this provider can be above the floor."""
    declared = guard(lease.provider_id, lambda: lease.provider.isolation)
    if declared and not meets(declared, floor):
        raise _unmet(lease.provider_id, declared, floor)


def ensure_sandbox_isolation(lease: Lease, sandbox: Sandbox, floor: str) -> tuple[str, str]:
    """Isolation and sharing of the sandbox. Raises IsolationUnmet where it is below the floor."""
    isolation, sharing = guard(lease.provider_id, lambda: of_sandbox(lease.provider, sandbox))
    ensure_isolation(lease, isolation, floor)
    return isolation, sharing


def ensure_isolation(lease: Lease, isolation: str, floor: str) -> None:
    """As `ensure_sandbox_isolation`, of one whose isolation is known."""
    if not meets(isolation, floor):
        raise _unmet(lease.provider_id, isolation, floor)


def _demands(tenant: Tenant | None, execution: Execution) -> tuple[str, ...]:
    # Nobody knows any more what a tenant demanded that is gone.
    own = tenant.minimum_isolation if tenant is not None else MICROVM
    slug = execution.tenant_slug
    return own, route_minimum(slug, execution.language), *_of_extensions(slug)


def _of_extensions(tenant_slug: str) -> list[str]:
    installed = extensions.installed()
    return [least for each in installed for least in each.minimum_isolation(tenant_slug)]


def _demand_of_key(execution: Execution) -> str:
    if execution.api_key is not None:
        return execution.api_key.minimum_isolation
    # As above, of a key.
    return MICROVM if execution.api_key_prefix else ""


def _unmet(provider_id: str, offered: str, floor: str) -> IsolationUnmet:
    remedy = " A provider that declares no isolation counts as none." if offered == NONE else ""
    return IsolationUnmet(
        f"minimum_isolation is {floor}, and a sandbox of {provider_id} has {offered}.{remedy}"
    )


def supported_languages(lease: Lease) -> list[str]:
    """What the leased provider runs, a few seconds old. Raises SandboxError."""
    told = guard(lease.provider_id, lambda: languages_of(lease.provider))
    return sorted(name for name in told if isinstance(name, str))


def ensure_supported(language: str, steps: Iterable[Step]) -> None:
    """Raise InvalidConfiguration for a language that none of the providers runs.

    A provider that cannot be asked, or is still starting, is no reason to refuse: the attempt is
    then made, and recorded with what became of it.
    """
    known: set[str] = set()
    for step in steps:
        try:
            with step.route(wait=False) as lease:
                known.update(supported_languages(lease))
        except SandboxError:
            return
        if language in known:
            return
    raise InvalidConfiguration(
        f"language: Must be one of: {', '.join(sorted(known))}.", field="language"
    )


def longest_at(lease: Lease) -> float | None:
    """The provider's own bound in seconds, None where it has none or none that can be one."""
    told = guard(lease.provider_id, lambda: lease.provider.max_timeout)
    is_one = type(told) in (int, float) and 0 < told < math.inf  # type: ignore[operator]
    return told if is_one else None


def seconds_at(lease: Lease, request: ExecutionRequest) -> float:
    """The timeout in force at this provider.

    A run that names none has what is usual where it was asked for, else the provider's, or the
    service's where the provider has none. Raises InvalidConfiguration for a named one beyond the
    provider's.
    """
    longest = longest_at(lease)
    if request.timeout is None:
        if request.usual_timeout is not None:
            return min(request.usual_timeout, math.inf if longest is None else longest)
        unnamed = settings.SANDBOX_TIMEOUT_SEC if longest is None else longest
        return float(min(unnamed, settings.SANDBOX_MAX_TIMEOUT_SEC))
    if longest is not None and request.timeout > longest:
        refuse("timeout", f"{lease.provider_id} runs code for {longest:g} s at most.")
    return request.timeout


T = TypeVar("T")

# A full or throttled provider is left too: that is what overflowing to another one means.
_LEAVABLE = (
    errors.NOT_INITIALIZED,
    errors.CONNECTION_FAILED,
    errors.CREATION_FAILED,
    errors.RATE_LIMITED,
    errors.UNAVAILABLE,
)


class ProviderSkipped(ProviderUnavailable):
    """A provider was not asked at all, which says nothing of its health."""


class ProviderIncompatible(ProviderSkipped):
    """It could never carry out this request."""


def steps_for(
    language: str, tenant_slug: str, route: Route | None = None, *, chosen: str = ""
) -> list[Step]:
    """What to try for a request, in order; `route` or the provider `chosen` alone where there is
    one. Raises InvalidConfiguration for one that cannot be chosen."""
    if route is not None:
        return [Step(route)]
    if chosen:
        ensure_choice(chosen, tenant_slug, language)
        return [Step(lender(chosen), chosen)]
    ids = planned(tenant_slug, language)
    if not ids:
        return [Step(manager.lease)]
    return [Step(lender(provider_id), provider_id) for provider_id in ids]


async def languages_for(
    tenant_slug: str, may_use: Callable[[str], bool] = lambda provider_id: True
) -> tuple[list[str], dict[str, Packages]]:
    """Every language that a request of the tenant can be served in now, by the providers that it
    `may_use`, and the packages by the id of the provider that knows its own. Raises SandboxError.

    Providers that cannot be asked are left out, unless there is no other.
    """
    packages: dict[str, Packages] = {}
    offers = partial(_offers, tenant_slug, may_use, packages)
    offered, failure = await offers(patient=not preload.is_on())
    if not offered and isinstance(failure, StillStarting):
        offered, failure = await offers(patient=True)
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


async def _offers(
    tenant_slug: str,
    may_use: Callable[[str], bool],
    packages: dict[str, Packages],
    *,
    patient: bool,
) -> tuple[dict[str, list[str]], SandboxError | None]:
    """What each provider offers, and why one does not."""
    offered: dict[str, list[str]] = {}
    failure: SandboxError | None = None
    for provider_id in {*filter(may_use, reachable(tenant_slug)), ""}:
        step = Step(lender(provider_id) if provider_id else manager.lease, provider_id)
        try:
            with ExitStack() as held:
                lease = await borrow_lease(step, held, lambda: patient)
                if may_use(lease.provider_id):
                    offered[provider_id] = supported_languages(lease)
                    if known := lease.provider.get_packages():
                        packages[lease.provider_id] = known
        except SandboxError as error:
            if failure is None or isinstance(error, StillStarting):
                failure = error
    return offered, failure


async def _admit(
    step: Step,
    request: ExecutionRequest,
    floor: str,
    held: ExitStack,
    *,
    is_only: bool,
    is_last: bool,
) -> Lease:
    """The step's provider, until `held` is closed, if it is to be tried.

    Raises ProviderSkipped, or RateLimited for one that is full, where it need not be;
    IsolationUnmet for one that cannot be isolated as `floor` demands. The breaker is asked first,
    because all else may take its time, and what else is asked is known already. Only the last one
    is waited for while it starts, if somebody starts the others.

    The only provider there is is always asked: a wrong guess about it would cost an answer.
    """
    if is_only:
        return await borrow_lease(step, held)
    standing = breaker.standing_of(step.provider_id)
    if standing.is_out:
        raise _out_of_service(step)
    try:
        lease = await borrow_lease(step, held, lambda: is_last or not preload.is_on())
    except StillStarting:
        if is_last or not preload.is_on():
            raise
        raise ProviderSkipped(f"{step.provider_id} is still starting.") from None
    _require_fit(lease, step.provider_id, request, floor)
    if not is_last and guard(step.provider_id, lambda: provider_status.is_full(lease.provider)):
        raise RateLimited(f"{step.provider_id} is full.")
    if not standing.claim():
        raise _out_of_service(step)
    return lease


def _require_fit(lease: Lease, name: str, request: ExecutionRequest, floor: str) -> None:
    provider = lease.provider
    ensure_provider_isolation(lease, floor)
    languages = supported_languages(lease)
    longest = longest_at(lease)
    if request.language not in languages:
        raise ProviderIncompatible(f"{name} does not run {request.language}.")
    if longest is not None and request.timeout is not None and request.timeout > longest:
        raise ProviderIncompatible(f"{name} runs code for {longest:g} s at most.", field="timeout")
    if request.files and FILES not in provider.capabilities:
        raise ProviderIncompatible(f"{name} does not support files.")
    if request.tools and not takes_tools(lease):
        raise ProviderIncompatible(f"{name} does not support tools.", field="tools")
    if request.env and ENVIRONMENT not in provider.capabilities:
        raise ProviderIncompatible(f"{name} does not support environment variables.", field="env")


def ensure_environment(lease: Lease, request: ExecutionRequest) -> None:
    """Raise InvalidConfiguration for variables that this provider does not support. The only
    provider of a route was not looked at before."""
    if request.env and ENVIRONMENT not in lease.provider.capabilities:
        refuse("env", f"The provider {lease.provider_id!r} does not support environment variables.")


def ensure_network(lease: Lease, network: Network | None) -> None:
    """Raise ProviderIncompatible for a provider that cannot hold a network. None is no network."""
    if network is not None and not lease.provider.holds_network:
        raise ProviderIncompatible(
            f"{lease.provider_id} does not hold network lists.", field="network"
        )


def takes_tools(lease: Lease) -> bool:
    """Whether code that calls tools can be run there."""
    return TOOLS in lease.provider.capabilities


def _out_of_service(step: Step) -> ProviderSkipped:
    return ProviderSkipped(f"{step.provider_id} is out of service for now.")


@contextmanager
def _log_database_errors(provider_id: str) -> Iterator[None]:
    """What became of the code matters more than that the breaker hears of it."""
    try:
        yield
    except DatabaseError:
        logger.exception("the circuit breaker of %s could not be updated", provider_id)


@dataclass(frozen=True)
class Served(Generic[T]):
    """What came from the provider that served, and what the walk reports of it.

    `start_ms` is what the sandbox took to start: the rest is the code's. That a sandbox `died`
    during the run says nothing for the provider, and nothing against it.
    """

    value: T
    start_ms: float
    died: bool = False


class RouteWalk:
    """A walk over the steps of a route: who was tried, and why each was left.

    `recorded` is JSON, empty for a lone provider.
    """

    def __init__(self) -> None:
        self.recorded: list[dict[str, Any]] = []
        self._failure: SandboxError | None = None
        self._unfit_only = True
        self._unfit_for: set[str | None] = set()
        self._unmet = False
        self._blocked: BlockedByPolicy | None = None
        self._refused_only = True

    async def take(
        self,
        steps: Sequence[Step],
        request: ExecutionRequest,
        floor: str,
        use: Callable[[Lease, ExitStack, bool], Coroutine[Served[T]]],
        *,
        before: Callable[[], None] = lambda: None,
        check_error: Callable[[Step, SandboxError], None] = lambda step, error: None,
        has_code: bool = True,
    ) -> T:
        """Return what `use` makes of the first provider that serves; the last error else.

        `use` is given the lease, what holds it, and whether it is the last one. `before` is called
        before each step; `check_error` may raise an error that ends the walk. A provider is left
        only while no code can have started, unless there is none: `has_code`. Raises SandboxError.
        """
        is_only = len(steps) == 1
        for number, step in enumerate(steps, start=1):
            is_last = number == len(steps)
            began = perf_counter()
            is_claimed = False
            before()
            try:
                with ExitStack() as held:
                    lease = await _admit(
                        step, request, floor, held, is_only=is_only, is_last=is_last
                    )
                    is_claimed = not is_only
                    served = await use(lease, held, is_last)
            except SandboxError as error:
                check_error(step, error)
                if is_claimed and _is_passed_over(error):
                    give_back_claim(step)
                self._note_failure(step, error, _ms(began))
                is_started = has_code and error.started
                if is_started or is_last or not _may_leave(error):
                    raise self._error_to_tell(error) from None
            else:
                self._note_success(step, served, _ms(began), alone=is_only)
                return served.value
        raise ProviderUnavailable("The route names no provider. Add one in the admin.")

    def _note_failure(self, step: Step, error: SandboxError, milliseconds: float) -> None:
        unmet = isinstance(error, IsolationUnmet)
        blocked = isinstance(error, BlockedByPolicy)
        passed_over = _is_passed_over(error)
        self._unmet = self._unmet or unmet
        if isinstance(error, BlockedByPolicy):
            self._blocked = error
        self._refused_only = self._refused_only and (
            blocked or isinstance(error, ProviderIncompatible)
        )
        self._unfit_only = self._unfit_only and isinstance(error, ProviderIncompatible)
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
                with _log_database_errors(step.provider_id):
                    if error.started:
                        # Code was there by then, and may be the reason. A probe finds out.
                        doubt(step.provider_id)
                    else:
                        breaker.report_failure(step.provider_id, error)

    def _note_success(
        self, step: Step, served: Served[Any], milliseconds: float, *, alone: bool
    ) -> None:
        if not step.provider_id:
            return
        with _log_database_errors(step.provider_id):
            if served.died:
                doubt(step.provider_id)
            else:
                breaker.report_success(step.provider_id, served.start_ms)
        if not alone:
            self.recorded.append(
                {"provider": step.provider_id, "outcome": "served", "ms": milliseconds}
            )

    def _error_to_tell(self, error: SandboxError) -> SandboxError:
        """What went wrong, rather than that the last one was passed over."""
        if self._blocked is not None and self._refused_only:
            # Where it could run it may not.
            return self._blocked
        failure = self._failure if _is_passed_over(error) else error
        if failure is not None and (
            not self._unmet or failure.started or failure.entry not in breaker.ILL
        ):
            return failure
        reasons = " ".join(hop["reason"] for hop in self.recorded) or error.message
        if self._unmet and isinstance(error, IsolationUnmet) and len(self.recorded) < 2:
            return error
        if self._unmet:
            return IsolationUnmet(f"No provider of the route is isolated enough. {reasons}")
        message = f"No provider of the route can serve this. {reasons}"
        if not self._unfit_only:
            return ProviderUnavailable(message)
        [*fields] = self._unfit_for
        return InvalidConfiguration(message, field=fields[0] if len(fields) == 1 else None)


def give_back_claim(step: Step) -> None:
    """Give back what the breaker counted for a step that nobody let end."""
    if step.provider_id:
        with _log_database_errors(step.provider_id):
            breaker.give_back(step.provider_id)


def _is_passed_over(error: SandboxError) -> bool:
    """Whether the provider was not asked for anything."""
    return isinstance(error, ProviderSkipped | IsolationUnmet | BlockedByPolicy)


def _may_leave(error: SandboxError) -> bool:
    return error.entry in _LEAVABLE or isinstance(error, BlockedByPolicy)


def _ms(began: float) -> float:
    return round((perf_counter() - began) * 1000, 3)


COMMANDS = ("bash", "command")
# How many of what there is a refusal names.
MOST_NAMED = 30

FORBIDDEN = ErrorCode("forbidden", "Forbidden", "Use a key whose restrictions allow it.", 403)


class BeyondKey(SandboxError):
    """The key is held to something else. Nothing ran, and nothing was recorded."""

    entry = FORBIDDEN


def allowed_steps(caller: Caller, language: str, steps: Sequence[Step]) -> Sequence[Step]:
    """Those of the steps that the caller's key may use for code in this language.

    Raises BeyondKey for another language, and where none of them is left.
    """
    key = caller.api_key
    if key is None:
        return steps
    ensure_language(key, language, address=caller.client_address)
    if not key.providers:
        return steps
    left = [step for step in steps if key.allows("providers", _provider_of(step))]
    if not left:
        raise _beyond(
            key,
            "provider",
            f"The key may use {key.providers}, which no route of the tenant uses.",
            caller.client_address,
        )
    return left


def ensure_language(key: ApiKey, *languages: str, address: str = "") -> None:
    """Raises BeyondKey unless one of these is a language of the key."""
    if allowed_languages(key, languages):
        return
    raise _beyond(key, "language", f"The key may run {key.languages}.", address)


def allowed_languages(key: ApiKey, languages: Sequence[str]) -> list[str]:
    return [each for each in languages if key.allows("languages", normalize_language(each))]


def ensure_template(caller: Caller, template: str) -> None:
    """Raises BeyondKey for a run or session of another template, or of none. A key that names a
    template may use each version of it."""
    key = caller.api_key
    if key is not None and not allows_template(key, template):
        raise _beyond(
            key, "template", f"The key may use the templates {key.templates}.",
            caller.client_address,
        )  # fmt: skip


def allows_template(key: ApiKey, template: str) -> bool:
    """Whether the key may use a template. One that names a template may use each version of it."""
    name, _, _ = template.partition("@")[0].partition(":")
    return any(key.allows("templates", each) for each in (template, name))


def ensure_unbound(caller: Caller) -> None:
    """Raises BeyondKey for a key that is held to some templates: it may change none."""
    key = caller.api_key
    if key is not None and key.templates:
        raise _beyond(
            key, "template", f"The key may use the templates {key.templates}, and change none.",
            caller.client_address,
        )  # fmt: skip


def ensure_image(template: str, steps: Iterable[Step], names: Sequence[str]) -> None:
    """Raise InvalidConfiguration for a template that none of the providers has as a named image.

    `names` are those that there are. A provider that cannot be asked is no reason to refuse.
    """
    for step in steps:
        try:
            with step.route(wait=False) as lease:
                if template in supported_languages(lease):
                    return
        except SandboxError:
            return
    refuse("template", none_of_this_name(template, names))


def ensure_provider_allowed(execution: Execution, lease: Lease) -> None:
    """Raises ProviderSkipped for a provider that the execution's key may not use.

    Which provider is active may have changed since it was asked for.
    """
    if (key := execution.api_key) is not None and not key.allows("providers", lease.provider_id):
        raise ProviderSkipped(f"The key may not use {lease.provider_id}.", field="provider")


def ensure_known_key(execution: Execution) -> None:
    """Raises ProviderUnavailable where the key is gone with which something was queued: nobody
    knows any more what it was held to."""
    if execution.api_key_prefix and execution.api_key is None:
        raise ProviderUnavailable("The key of the request was deleted meanwhile.")


def _provider_of(step: Step) -> str:
    if step.host is not None:
        return step.host.provider
    return step.provider_id or manager.in_force() or ""


def _beyond(key: ApiKey, field: str, remedy: str, address: str) -> BeyondKey:
    note_refusal(key, field, detail=remedy, address=address)
    return BeyondKey(f"{field}: The key's restrictions do not allow this. {remedy}", field=field)


def check_languages(words: str, kept: frozenset[str] = frozenset()) -> None:
    """Raise InvalidConfiguration for a language that there is not, and that is not `kept`."""
    # Commands are what sessions run beside code.
    there = {"command", *(known.name for known in TABLE)}
    for word in sorted({normalize_language(word) for word in words.split()} - there - kept):
        # A template may be named as a language, and nobody but its provider knows of it.
        if not Execution.objects.filter(language=word).exists():
            raise InvalidConfiguration(none_of_this_name(word, sorted(there)), field="languages")


def check_providers(words: str, kept: frozenset[str] = frozenset()) -> None:
    """Raise InvalidConfiguration for a provider that there is not, and that is not `kept`."""
    if not (unknown := set(words.split()) - kept):
        return
    rows = ProviderConfig.objects.values_list("provider_id", flat=True)
    there = {*registry.all_providers(), *rows}
    if unknown := unknown - there:
        told = none_of_this_name(min(unknown), sorted(there))
        raise InvalidConfiguration(told, field="providers")


def none_of_this_name(word: str, there: Iterable[str]) -> str:
    """The refusal of a name that there is not, with some of those that there are."""
    names = list(there)
    more = ", …" if len(names) > MOST_NAMED else ""
    told = ", ".join(names[:MOST_NAMED]) or "none"
    return f"{visible(word[:100])}: Unknown name. Available: {told}{more}"
