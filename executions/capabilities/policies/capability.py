"""Policies as a capability: they check each run and each session, and have runs approved.

What is refused here is recorded as `blocked`, with SB007 and a receipt: nothing ran.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from executions.capabilities.policies.active import Rules, isolation_of, rules_for, rules_of
from executions.capabilities.policies.analysis import LOOKED, MOST_BYTES, UNPARSED
from executions.capabilities.policies.analyzer_pool import submit_look
from executions.capabilities.policies.approvals import approved, ask_for
from executions.kernel.coroutines import wait_for
from executions.kernel.text import storable
from executions.runs.admission import Demand, ensure_within_bounds
from executions.runs.event_log import EventLog
from executions.runs.extensions import Extension, Review, RunPart, Waiting
from executions.runs.models import Execution
from executions.runs.provider_calls import Step, guard
from executions.runs.requests import Caller, ExecutionRequest
from executions.runs.results import POLICY, BlockedByPolicy
from executions.runs.routing import COMMANDS
from providers.errors import InvalidConfiguration
from providers.isolation import NONE
from providers.languages import language_of, normalize_language
from providers.manager import Lease
from providers.values import SandboxLimits, SandboxSpec

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
    """One run and the policy that holds for it; without one, nothing is asked."""

    def __init__(self, rules: Rules | None, tenant_slug: str = "") -> None:
        self.rules, self.tenant_slug = rules, tenant_slug
        self.warnings: list[Remark] = []
        self.approval: dict[str, str] | None = None

    def metadata(self) -> Mapping[str, Any]:
        """Return which policy held, what it warned of and who approved the run."""
        if self.rules is None:
            return {}
        said = {"warnings": self.warnings, "approved": self.approval}
        return {POLICY: {**self.rules.stated, **{k: v for k, v in said.items() if v}}}

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
        rules = self.rules
        if rules is None:
            return
        if why := refused_of_request(rules, request.language, request.timeout):
            raise BlockedByPolicy(why[1], field=why[0])
        found = await self._look(rules, request, waiting)
        if rules.blocks and found:
            self.warnings = []
            raise BlockedByPolicy(_in_words(found), field="code")
        if not _is_asked(rules, found):
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


class Policies(Extension):
    pages = ("executions.capabilities.policies.admin",)

    async def review(self, request: ExecutionRequest, caller: Caller) -> Review | None:
        check = PolicyCheck(rules_for(caller.tenant.slug), caller.tenant.slug)
        if not check.asks:
            return None
        if request.idempotency_key is None:
            # No code is looked at for a tenant that may have no more anyway.
            ensure_within_bounds(caller.tenant, Demand(Execution.Status.QUEUED, request.longest))
        found = await check.review(request)
        if found is None:
            return None
        queued = request.queued()
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
        return PolicyCheck(rules, execution.tenant_slug) if rules is not None else None

    def begin_session(self, tenant_slug: str) -> RunPart | None:
        rules = rules_for(tenant_slug)
        return PolicyCheck(rules, tenant_slug) if rules is not None else None


CAPABILITY = Policies()
