"""Spending as a capability: the cost of each run, and budgets that stop new ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from executions.capabilities.spending.service import budgets_of, cost_of, ensure_budget, spend
from executions.runs.extensions import Extension
from executions.runs.models import Execution, LateResult
from executions.tenants.models import Tenant
from executions.tenants.quotas import Quota, Use


class Costs(Extension):
    pages = ("executions.capabilities.spending.admin",)
    tasks = {"executions.tasks.watch_spending": 5}

    def ensure_allowance(self, tenant_slug: str) -> None:
        ensure_budget(tenant_slug)

    def end_values(self, provider_id: str, timings: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"cost": cost_of(provider_id, timings)}

    def on_end(self, ended: Execution) -> None:
        if ended.cost:
            spend(ended.tenant_slug, ended.cost)

    def usage(self, tenant: Tenant) -> Mapping[Quota, Use]:
        return {
            quota: Use(float(limit), float(spent), resets_at)
            for quota, (limit, spent, resets_at) in budgets_of(tenant.slug).items()
        }

    def on_late(self, execution: Execution, late: LateResult) -> None:
        if late.cost:
            spend(execution.tenant_slug, late.cost)


CAPABILITY = Costs()
