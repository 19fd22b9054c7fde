"""The admin's front page."""

from __future__ import annotations

from typing import Any

from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse

from executions.admin.attention import inbox
from executions.admin.charts import stacked_bars
from executions.admin.fragments import fragment_of
from executions.admin.ledger_check import VIEW as VIEW_CHECKS
from executions.kernel.presentation import in_time
from executions.ledger.entry import read_head
from executions.ledger.keyring import LedgerUnavailable
from executions.services.dashboard import RANGES, TARGET_PERCENT, figures
from providers.errors import SandboxError
from providers.manager import manager
from providers.models import ProviderConfig, ProviderHealth

_VIEW = "executions.view_execution"


def dashboard_context(request: HttpRequest, context: dict[str, Any]) -> dict[str, Any]:
    """What the theme puts on the front page; the figures only for who may see executions."""
    context |= {"inbox": inbox(request), "shows_ledger": request.user.has_perm(VIEW_CHECKS)}
    if not request.user.has_perm(_VIEW):
        return context
    chosen = request.GET.get("range", "")
    chosen = chosen if chosen in RANGES else next(iter(RANGES))
    found = figures(*RANGES[chosen])
    context |= {
        "figures": found,
        "target": TARGET_PERCENT,
        "latencies": [
            (f"Duration, {name}", "–" if took is None else in_time(took))
            for name, took in (("p50", found.p50), ("p95", found.p95), ("p99", found.p99))
        ],
        "ranges": list(RANGES),
        "chosen": chosen,
        "provider_chart": stacked_bars("Executions by provider", found.bars, found.by_provider),
        "tenant_chart": stacked_bars("Executions by tenant", found.bars, found.by_tenant),
        "providers": _providers(),
        "ledger_problem": _ledger_problem(),
    }
    return context


def _ledger_problem() -> str:
    """Why nothing can be entered, and so nothing runs; "" while all is well."""
    try:
        read_head(lock=False)
    except LedgerUnavailable as error:
        return error.message
    return ""


def figures_view(request: HttpRequest) -> HttpResponse:
    """The figures alone, for a front page that is looked at."""
    if not request.user.has_perm(_VIEW):
        raise PermissionDenied
    context = dashboard_context(request, {"shell": "admin/fragment.html"})
    page = TemplateResponse(request, "admin/index.html", context)
    return fragment_of(request, page, "admin/index.html")


def pool_view(request: HttpRequest) -> HttpResponse:
    """The active provider's pool now, as a piece of the front page that renews itself."""
    if not request.user.has_perm(_VIEW):
        raise PermissionDenied
    context: dict[str, Any] = {}
    try:
        with manager.lease(wait=False) as lease:
            health = lease.provider.health_check()
            context = {"provider": lease.provider.name, "health": health, "pool": health.details}
    except SandboxError as error:
        context = {"error": error}
    pool = context.get("pool") or {}
    if pool.get("capacity"):
        used = context["used_percent"] = round(100 * pool.get("busy", 0) / pool["capacity"])
        context["band"] = band_of(used)
    response = TemplateResponse(request, "admin/pool.html", context)
    response["Cache-Control"] = "no-store"
    return response


def band_of(percent: int) -> dict[str, str]:
    """Compare a pool's utilization with the target, 60 to 80 % busy."""
    if percent < 60:
        return {"kind": "quiet", "label": "below target (spare capacity)"}
    if percent <= 80:
        return {"kind": "good", "label": "on target"}
    return {"kind": "warn", "label": "above target (callers may queue)"}


def _providers() -> list[dict[str, Any]]:
    health = ProviderHealth.objects.in_bulk()
    return [
        {
            "row": row,
            "health": found
            if (found := health.get(row.provider_id)) and found.config_version == row.version
            else None,
        }
        for row in ProviderConfig.objects.defer("config")
    ]
