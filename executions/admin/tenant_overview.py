"""What a tenant's page shows beside its form: of each part what its viewer may open elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from django.http import HttpRequest
from django.template.defaultfilters import filesizeformat
from django.utils import timezone

from executions.capabilities.dashboard.admin import stacked_bars
from executions.capabilities.dashboard.service import (
    DAYS,
    latest_runs,
    latest_sessions,
    newest_keys,
    runs_by_day,
)
from executions.capabilities.spending.usage import Use, usage_of
from executions.tenants.models import Tenant
from executions.tenants.quotas import Quota
from providers.hidden_characters import visible

_NEAR = 80


@dataclass(frozen=True)
class Bar:
    """How much of a quota is used. `percent` is for drawing, and 100 at most."""

    name: str
    used: str
    limit: str
    percent: int
    tone: str
    until: str


def overview(request: HttpRequest, tenant: Tenant) -> dict[str, Any]:
    """For the template `admin/executions/tenant/overview.html`."""
    use = usage_of(tenant)
    budgets = (Quota.BUDGET_OF_DAY, Quota.BUDGET_OF_MONTH)
    shown: dict[str, Any] = {
        "quotas": [_bar(quota, found) for quota, found in use.items() if quota not in budgets],
        "slug": tenant.slug,
        "days": DAYS,
        "now": timezone.now(),
    }
    may = request.user.has_perm
    if may("executions.view_budget"):
        shown["budgets"] = [
            _bar(quota, use[quota]) for quota in budgets if use[quota].limit is not None
        ]
        shown["may_see_budgets"] = True
    if may("executions.view_execution"):
        days, series, cost = runs_by_day(tenant)
        shown |= {
            "chart": stacked_bars(f"Executions by day, the last {DAYS}", days, series),
            "ended": sum(series[0].values),
            "cost": cost,
            "runs": latest_runs(tenant),
        }
    if may("executions.view_session"):
        shown["sessions"] = [
            (session, visible(session.name or str(session.pk)))
            for session in latest_sessions(tenant)
        ]
    if may("executions.view_apikey"):
        shown["api_keys"] = [(key, visible(str(key))) for key in newest_keys(tenant)]
    return shown


def _bar(quota: Quota, use: Use) -> Bar:
    limit = use.limit or 0.0
    percent = round(100 * use.used / limit) if limit else (100 if use.used else 0)
    told = filesizeformat if "bytes" in quota else "{:,.12g}".format
    return Bar(
        quota.replace("_", " ").capitalize(),
        told(use.used),
        told(limit),
        min(100, percent),
        "bad" if percent >= 100 else "warn" if percent >= _NEAR else "",
        f"until {use.resets_at:%Y-%m-%d %H:%M} UTC" if use.resets_at else "",
    )
