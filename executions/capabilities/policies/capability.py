"""Policies as a capability: they check each run and each session, and have runs approved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from executions.capabilities.policies.active import isolation_of, rules_for, rules_of
from executions.capabilities.policies.approvals import ask_for
from executions.capabilities.policies.enforcement import PolicyCheck
from executions.kernel.coroutines import Coroutine
from executions.runs.admission import Demand, ensure_within_bounds
from executions.runs.event_log import EventLog
from executions.runs.extensions import Extension, Review, RunPart
from executions.runs.models import Execution
from executions.runs.requests import Caller, ExecutionRequest
from executions.runs.results import POLICY


class Policies(Extension):
    pages = (
        "executions.capabilities.policies.admin",
        "executions.capabilities.policies.approval_admin",
    )
    metadata_keys = (POLICY,)

    def review(self, request: ExecutionRequest, caller: Caller) -> Coroutine[Review | None]:
        check = PolicyCheck(rules_for(caller.tenant.slug), caller.tenant.slug)
        if not check.asks:
            return None
        if request.idempotency_key is None:
            # No code is looked at for a tenant that may have no more anyway.
            ensure_within_bounds(caller.tenant, Demand(Execution.Status.QUEUED, request.longest))
        found = yield from check.review(request)
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
