"""Policies as a capability: they check each run and each session, and have runs approved.

What is refused here is recorded as `blocked`, with SB007 and a receipt: nothing ran. The rules in
force are kept for a second. Code is analyzed (`analysis`) by processes of its own, since hostile
text may hold them up.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any
from uuid import UUID

from django.db.models import Max

from executions.capabilities.policies import analysis
from executions.capabilities.policies.analysis import (
    LOOKED,
    MOST,
    MOST_BYTES,
    TOO_MUCH,
    UNPARSED,
    Finding,
)
from executions.capabilities.policies.approvals import ASKED, approved, ask_for
from executions.capabilities.policies.models import Policy
from executions.kernel.background import Executor
from executions.kernel.coroutines import wait_for
from executions.kernel.process_pool import ProcessPool
from executions.kernel.text import storable
from executions.runs.admission import ensure_within_bounds
from executions.runs.event_log import EventLog
from executions.runs.extensions import Extension, Review, RunPart, Waiting
from executions.runs.models import Execution
from executions.runs.provider_calls import Step, guard
from executions.runs.requests import Caller, ExecutionRequest
from executions.runs.results import POLICY, BlockedByPolicy
from executions.runs.routing import COMMANDS
from providers.errors import InvalidConfiguration, ProviderUnavailable
from providers.isolation import NONE
from providers.languages import language_of, normalize_language
from providers.manager import Lease
from providers.models import ConfigVersion
from providers.network import NetworkPolicy
from providers.services.settings_cache import CachedQuery
from providers.values import SandboxLimits, SandboxSpec

_UNBOUNDED = 1 << 62
# What a record says of the policy where somebody approved a run without one.
_NO_POLICY: Mapping[str, None] = {"id": None, "version": None}


@dataclass(frozen=True)
class Rules:
    """A policy as it is held against requests. `version` is 0 where none was kept of it."""

    policy: Policy
    version: int = 0

    @cached_property
    def languages(self) -> frozenset[str]:
        return frozenset(self.policy.languages.split())

    @cached_property
    def providers(self) -> frozenset[str]:
        return frozenset(self.policy.providers.split())

    @cached_property
    def looks(self) -> bool:
        return self.policy.analysis != Policy.Analysis.OFF

    @cached_property
    def blocks(self) -> bool:
        return self.policy.analysis == Policy.Analysis.BLOCK

    @cached_property
    def asks(self) -> bool:
        return self.policy.ask_always or self.policy.analysis == Policy.Analysis.ASK

    @cached_property
    def of_code(self) -> Mapping[str, Any]:
        """What `analysis` takes."""
        return {
            "mode": self.policy.imports_mode,
            "imports": self.policy.imports.split(),
            "except": self.policy.imports_except.split(),
            "calls": self.policy.calls.split(),
        }

    @cached_property
    def limits(self) -> SandboxLimits | None:
        """What a sandbox is asked for, which keeps it or is not had."""
        mib = self.policy.max_memory_mib
        if mib is None:
            return None
        return SandboxLimits(mib * 1024 * 1024, *[_UNBOUNDED] * 4)

    @property
    def stated(self) -> dict[str, int]:
        """What a record says of it; with the version the history has the rest."""
        return {"id": self.policy.pk, "version": self.version}


def rules_for(tenant_slug: str) -> Rules | None:
    """The tenant's own policy, else that of all others, None without either. As of a second ago
    at most."""
    rules = _in_force()
    return (rules.get(tenant_slug) or rules.get("")) if rules else None


def rules_of(execution: Execution) -> Rules | None:
    """Those of its tenant; of what is run again, those of the tenant whose code it is."""
    original = execution.replay_of
    return rules_for(execution.tenant_slug if original is None else original.tenant_slug)


def isolation_of(tenant_slug: str) -> tuple[str, ...]:
    """What its own policy and that of all others demand: one of them strengthens the other."""
    rules = _in_force()
    return tuple(
        rules[slug].policy.minimum_isolation for slug in {tenant_slug, ""} if slug in rules
    )


def _load() -> dict[str, Rules]:
    policies = list(Policy.objects.filter(draft=False))
    if not policies:
        return {}
    subjects = {f"{Policy._meta.label_lower}:{policy.pk}": policy for policy in policies}
    versions = dict(
        ConfigVersion.objects.filter(subject__in=subjects)
        .order_by()
        .values_list("subject")
        .annotate(Max("version"))
    )
    return {
        policy.tenant_slug: Rules(policy, versions.get(subject, 0))
        for subject, policy in subjects.items()
    }


_in_force = CachedQuery(_load, Policy, ConfigVersion)


# The processor time of a look has its own bound; this one is for a machine that has no time.
WALL_SECONDS = 60.0
AT_ONCE = 2
# That are looked at or wait for it: no more than a tenant usually runs at once.
OF_ONE_TENANT = 10
Answer = tuple[str, list[Finding]]
_COMMAND = (sys.executable, "-I", "-S", analysis.__file__)
_MOST_ANSWERED = 1 << 20


def submit_look(code: str, rules: Mapping[str, Any], owner: str) -> Future[Answer]:
    """As `look`, by threads of their own, so that slow code holds up nothing else; `owner` is the
    tenant. Raises RateLimited for one that has too many of them, and where no thread can be had.
    """
    return _lookers.submit(owner, lambda: look(code, rules))


def look(code: str, rules: Mapping[str, Any]) -> Answer:
    """As `analysis.analyse`, in a process of its own; waits. TOO_MUCH where that did not live.

    Raises ProviderUnavailable where no such process can be had.
    """
    if len(code) > MOST_BYTES:
        return TOO_MUCH, []
    try:
        answer = _analysts.ask(json.dumps([code, rules]).encode() + b"\n")
    except OSError as error:
        raise ProviderUnavailable(
            f"The policy requires an analysis of the code, which failed: {error}."
        ) from error
    return (TOO_MUCH, []) if answer is None else _checked(answer)


def _checked(answer: bytes) -> tuple[str, list[Finding]]:
    """The answer as it must be: it comes from a process that has read hostile text."""
    try:
        outcome, found = json.loads(answer)
        if outcome not in (LOOKED, analysis.UNPARSED):
            return TOO_MUCH, []
        return outcome, [
            (int(line), str(kind)[:10], str(name)[:200]) for line, kind, name in found[:MOST]
        ]
    except (ValueError, TypeError):
        return TOO_MUCH, []


_analysts = ProcessPool(
    _COMMAND, at_once=AT_ONCE, wall_seconds=WALL_SECONDS, most_answered=_MOST_ANSWERED
)
_lookers = Executor(
    "policy-look",
    threads=AT_ONCE,
    of_one=AT_ONCE - 1,
    most=OF_ONE_TENANT,
    refusal=(
        f"{OF_ONE_TENANT} programs of the tenant are being analyzed, as its policy requires. "
        "Send it again."
    ),
)


MOST_WARNINGS = 50
_MOST_TOLD = 10
_MEMORY_FIELDS = ("memory_bytes", "limits")
_TOO_MUCH = (
    f"exceeds the limits of the analysis: {MOST_BYTES // 1024} KiB, deep nesting, or a long "
    "analysis"
)
_UNPARSED = "is not valid Python for this service, and was not analyzed"

_TAKES_APPROVAL = (
    "It needs an approval. Send it to POST /api/v1/executions, or to a session as a cell, without "
    "a stream; it then waits for the approval."
)

Remark = dict[str, Any]


class PolicyCheck(RunPart):
    """One run and the policy that holds for it; without one, nothing is asked of it but what its
    door has asked for."""

    def __init__(self, rules: Rules | None, tenant_slug: str = "") -> None:
        self.rules, self.tenant_slug = rules, tenant_slug
        self.warnings: list[Remark] = []
        self.approval: dict[str, str] | None = None

    def metadata(self) -> Mapping[str, Any]:
        """Return which policy held, what it warned of and who approved the run."""
        if self.rules is None and self.approval is None:
            return {}
        stated = self.rules.stated if self.rules is not None else _NO_POLICY
        said = {"warnings": self.warnings, "approved": self.approval}
        return {POLICY: {**stated, **{k: v for k, v in said.items() if v}}}

    @property
    def asks(self) -> bool:
        """Whether somebody may have to approve it."""
        return self.rules is not None and self.rules.asks

    @property
    def limits(self) -> SandboxLimits | None:
        return self.rules.limits if self.rules else None

    async def admit(
        self, request: ExecutionRequest, execution: Execution, waiting: Waiting = nullcontext
    ) -> None:
        """Raises BlockedByPolicy for what is not allowed wherever it runs, and for what somebody
        has to approve and nobody has."""
        rules, found = self.rules, []
        if rules is not None:
            if why := refused_of_request(rules, request.language, request.timeout):
                raise BlockedByPolicy(why[1], field=why[0])
            found = await self._look(rules, request, waiting)
            if rules.blocks and found:
                self.warnings = []
                raise BlockedByPolicy(_in_words(found), field="code")
        if not _asks_always(execution) and (rules is None or not _is_asked(rules, found)):
            return
        self.approval = approved(execution, request)
        if self.approval is None:
            raise BlockedByPolicy(f"{_TAKES_APPROVAL} {_in_words(found)}".rstrip(), field="code")

    async def review(self, request: ExecutionRequest) -> list[Remark] | None:
        """Return what somebody has to approve before this may run; None where nobody need. Raises
        RateLimited for a tenant of whose code enough is being looked at.
        """
        rules = self.rules
        if rules is None or not self.asks:
            return None
        if refused_of_request(rules, request.language, request.timeout):
            return None
        found = await self._look(rules, request)
        return found if _is_asked(rules, found) else None

    async def _look(
        self,
        rules: Rules,
        request: ExecutionRequest,
        waiting: Waiting = nullcontext,
    ) -> list[Remark]:
        if not rules.looks or not may_be_python(request.language):
            return []
        asked = {**rules.of_code, "own": own_modules([file.path for file in request.files])}
        looked = submit_look(request.code, asked, self.tenant_slug)
        with waiting(looked):
            await wait_for(looked)
        self.warnings = told(*looked.result())
        return [each for each in self.warnings if each["kind"] != "note"]

    def check_language(self, language: str) -> None:
        if self.rules and (why := refused_of_request(self.rules, language, None)):
            raise BlockedByPolicy(why[1], field=why[0])

    def select(self, steps: Sequence[Step]) -> Sequence[Step]:
        """Those that may be taken; one whose provider is not known yet is looked at later."""
        providers = self.rules.providers if self.rules else None
        if not providers:
            return steps
        left = [step for step in steps if (_provider_of(step) or "") in {*providers, ""}]
        if not left:
            raise self._elsewhere()
        return left

    def check_provider(self, lease: Lease) -> None:
        if self.rules is None:
            return
        if self.rules.providers and lease.provider_id not in self.rules.providers:
            raise self._elsewhere()
        if self.rules.policy.network:
            promised = guard(lease.provider_id, lambda: lease.provider.network)
            if promised != self.rules.policy.network:
                raise _networked(lease.provider_id)

    def check_sandbox(self, lease: Lease, isolation: str) -> None:
        """What is not isolated may reach whatever its host does."""
        if self.rules is not None and self.rules.policy.network and isolation == NONE:
            raise _networked(lease.provider_id)

    def limit_seconds(self, seconds: float) -> float:
        longest = self.rules.policy.max_timeout if self.rules else None
        return seconds if longest is None else min(seconds, longest)

    def specify(self, spec: SandboxSpec, *, seconds: float) -> SandboxSpec:
        return replace(spec, limits=self.limits) if self.limits else spec

    def check_spec(self, spec: SandboxSpec) -> None:
        if self.rules is not None and self.rules.policy.network and spec.network is not None:
            raise BlockedByPolicy("The policy allows no network.", field="network")

    @contextmanager
    def translate_errors(self) -> Iterator[None]:
        """Surround the request for a sandbox of `limits`, which a provider may not have."""
        try:
            yield
        except InvalidConfiguration as error:
            if self.limits is None or error.field not in _MEMORY_FIELDS:
                raise
            mib = self.limits.memory_bytes >> 20
            raise BlockedByPolicy(
                f"The policy allows {mib} MiB of memory. {error.message}", field="memory"
            ) from None

    def _elsewhere(self) -> BlockedByPolicy:
        allowed = self.rules.policy.providers if self.rules else ""
        return BlockedByPolicy(f"The policy allows providers {allowed}.", field="provider")


def refused_of_request(
    rules: Rules, language: str, timeout: float | None
) -> tuple[str, str] | None:
    """Field and reason why a request is refused without a look at its code."""
    if rules.languages and normalize_language(language) not in rules.languages:
        return "language", f"The policy allows {rules.policy.languages}, and not {language}."
    longest = rules.policy.max_timeout
    if longest is not None and timeout is not None and timeout > longest:
        return "timeout", f"The policy allows {longest:g} s, and {timeout:g} s was requested."
    return None


def _is_asked(rules: Rules, found: Sequence[Remark]) -> bool:
    return rules.asks and (rules.policy.ask_always or bool(found))


def _provider_of(step: Step) -> str:
    return step.host.provider if step.host is not None else step.provider_id


def may_be_python(language: str) -> bool:
    """Whether code is looked at: a template that is named as a language may be of Python."""
    name = normalize_language(language)
    return name == "python" or (language_of(name) is None and name not in COMMANDS)


def own_modules(paths: Sequence[str]) -> list[str]:
    """The modules among files that came with the code, which a program may import. What Python has
    itself may be there already, whatever file is called alike."""
    names = {path.partition("/")[0].removesuffix(".py") for path in paths}
    return sorted(name for name in names - sys.stdlib_module_names if name.isidentifier())


def told(outcome: str, found: Sequence[tuple[int, str, str]]) -> list[Remark]:
    """What a look came to, as records and answers have it. A `note` never blocks."""
    if outcome == UNPARSED:
        return [{"line": 0, "kind": "note", "name": _UNPARSED}]
    if outcome != LOOKED:
        return [{"line": 0, "kind": "code", "name": _TOO_MUCH}]
    return [
        {"line": line, "kind": kind, "name": storable(name)}
        for line, kind, name in found[:MOST_WARNINGS]
    ]


def _in_words(found: Sequence[Remark]) -> str:
    if not found:
        return ""
    parts = [
        f"line {each['line']}: {each['kind']} of {each['name']}" if each["line"] else each["name"]
        for each in found[:_MOST_TOLD]
    ]
    more = f" and {len(found) - _MOST_TOLD} more" if len(found) > _MOST_TOLD else ""
    return f"The policy does not allow this code: {'; '.join(parts)}{more}."


def _networked(provider_id: str) -> BlockedByPolicy:
    return BlockedByPolicy(
        f"The policy allows no network, and {provider_id} does not guarantee sandboxes without "
        "network.",
        field="network",
    )


def _asks_always(execution: Execution) -> bool:
    """Whether it may run only once a person has approved it, whatever the policy says."""
    return (execution.idempotency_key or "").startswith(ASKED)


class Policies(Extension):
    pages = ("executions.capabilities.policies.admin",)

    async def review(self, request: ExecutionRequest, caller: Caller) -> Review | None:
        check = PolicyCheck(rules_for(caller.tenant.slug), caller.tenant.slug)
        if not check.asks:
            return None
        if request.idempotency_key is None:
            # No code is looked at for a tenant that may have no more anyway.
            ensure_within_bounds(caller.tenant, request, queued=True)
        found = await check.review(request)
        if found is None:
            return None
        queued = request.as_queued()
        return Review(queued, lambda execution: ask_for(execution, queued, found))

    def first_metadata(self, tenant_slug: str) -> Mapping[str, Any]:
        """Return the policy at the request. The one at the run is added when that has ended."""
        rules = rules_for(tenant_slug)
        return {POLICY: rules.stated} if rules is not None else {}

    def minimum_isolation(self, tenant_slug: str) -> Sequence[str]:
        return isolation_of(tenant_slug)

    def begin(
        self, execution: Execution, request: ExecutionRequest, log: EventLog | None
    ) -> RunPart | None:
        rules = rules_of(execution)
        is_needed = rules is not None or _asks_always(execution)
        return PolicyCheck(rules, execution.tenant_slug) if is_needed else None

    def begin_session(
        self,
        tenant_slug: str,
        network: NetworkPolicy | None = None,
        template: UUID | None = None,
    ) -> RunPart | None:
        rules = rules_for(tenant_slug)
        return PolicyCheck(rules, tenant_slug) if rules is not None else None


CAPABILITY = Policies()
