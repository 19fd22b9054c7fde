"""The dashboard, the inbox, and their charts."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, cast

from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.urls import reverse
from django.utils.cache import get_conditional_response, patch_vary_headers
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.text import Truncator

from executions.admin.ledger import VIEW as VIEW_CHECKS
from executions.capabilities.dashboard.service import (
    MOST,
    RANGES,
    TARGET_PERCENT,
    Attention,
    Ill,
    Series,
    Waiting,
    attention,
    figures,
)
from executions.kernel.presentation import in_time
from executions.ledger.entry import LedgerUnavailable, read_head
from executions.ledger.models import LedgerCheck
from providers import guarded
from providers.errors import CODES, SandboxError
from providers.hidden_characters import visible
from providers.manager import manager
from providers.models import ProviderConfig, ProviderHealth

_SHOWN = 3
_LINE = 240
# Of it, of what a provider said, so that what to do is not cut off.
_MESSAGE = 150
NO_CODE = "no reason given. Open its page and test the connection."


@dataclass(frozen=True)
class Line:
    """One of what waits, with the page of its own where there is one."""

    text: str
    link: str = ""


@dataclass(frozen=True)
class Item:
    """What waits, all of one kind. `tone` is bad or warn."""

    title: str
    tone: str
    number: str
    link: str
    lines: list[Line]


@dataclass(frozen=True)
class _Kind:
    """`page` is where it is seen, whose permission is asked; `of` finds it; `line` says one."""

    title: str
    tone: str
    page: str
    of: Callable[[HttpRequest, Attention], list[Any]]
    line: Callable[[Any], Line]
    query: str = ""

    @property
    def permission(self) -> str:
        app, model = self.page.split("_")
        return f"{app}.view_{model}"

    def found(self, request: HttpRequest) -> list[Any]:
        """Nothing, and nothing is looked up, for who may not open the page."""
        return self.of(request, attention()) if request.user.has_perm(self.permission) else []


def _visible_changes(request: HttpRequest, now: Attention) -> list[Waiting]:
    """As the list of them shows them."""
    hidden = tuple(
        f"{kind.label}:"
        for kind in guarded.all_guarded()
        if not request.user.has_perm(kind.label.replace(".", ".view_"))
    )
    return [change for change in now.changes if not change.subject.startswith(hidden)]


def _findings(request: HttpRequest, now: Attention) -> list[LedgerCheck]:
    check = now.check
    return [check] if check and check.state == LedgerCheck.State.NOT_INTACT else []


def _page(name: str, pk: object) -> str:
    return reverse(f"admin:{name}_change", args=[pk])


def _ill(each: Ill) -> str:
    """What failed in words, and what to do; the message where there is one says it best."""
    known = CODES.get(each.code)
    if known is None:
        return f"{each.provider}: {each.message or NO_CODE}"
    said = Truncator(each.message.strip().rstrip(".") or known.title).chars(_MESSAGE)
    return f"{each.provider}: {said} ({each.code}). {known.remedy}"


KINDS = {
    "ledger": _Kind(
        *("Ledger problems found", "bad", "executions_ledgercheck", _findings),
        lambda check: Line(
            f"{check.findings} findings on {check.finished_at:%Y-%m-%d %H:%M} UTC: "
            + "; ".join(check.first_findings[:1]),
            _page("executions_ledgercheck", check.pk),
        ),
    ),
    "queue": _Kind(
        *("Queued runs are not starting", "bad", "executions_process"),
        lambda request, now: [now.queue] if now.queue else [],
        Line,
    ),
    "unhealthy": _Kind(
        *("Providers fail their health checks", "bad", "providers_providerconfig"),
        lambda request, now: now.unhealthy,
        lambda each: Line(_ill(each), _page("providers_providerconfig", each.pk)),
    ),
    "breakers": _Kind(
        *("Providers are out of service", "bad", "providers_circuitbreaker"),
        lambda request, now: now.breakers,
        lambda each: Line(_ill(each), _page("providers_circuitbreaker", each.pk)),
    ),
    "alerts": _Kind(
        *("Open alerts", "warn", "executions_alert"),
        lambda request, now: now.alerts,
        lambda alert: Line(alert.message, _page("executions_alert", alert.pk)),
        "?state__exact=open",
    ),
    "budgets": _Kind(
        *("Budgets nearly or fully used", "warn", "executions_budget"),
        lambda request, now: now.budgets,
        lambda each: Line(
            f"{each[0].tenant_slug or 'All tenants'}: {each[1]:.2f} of {each[0].limit:.2f} "
            f"this {each[0].period}",
            _page("executions_budget", each[0].pk),
        ),
    ),
    "changes": _Kind(
        *("Changes pending approval", "warn", "providers_pendingchange"),
        _visible_changes,
        lambda change: Line(
            f"{change.words}, requested by {change.author}",
            _page("providers_pendingchange", change.pk),
        ),
        "?status__exact=waiting",
    ),
    "approvals": _Kind(
        *("Runs pending approval", "warn", "executions_approval"),
        lambda request, now: now.approvals,
        lambda each: Line(
            f"{each[1]}, since {each[2]:%Y-%m-%d %H:%M} UTC", _page("executions_approval", each[0])
        ),
        "?status__exact=waiting",
    ),
    "calls": _Kind(
        *("Tool calls pending approval", "warn", "executions_toolcall"),
        lambda request, now: now.calls,
        lambda each: Line(
            f"{each[1]} of {each[2]}, since {each[3]:%Y-%m-%d %H:%M} UTC",
            _page("executions_toolcall", each[0]),
        ),
        "?state__exact=held",
    ),
}


def inbox(request: HttpRequest) -> list[Item]:
    """What waits, the worst first."""
    items = []
    for kind in KINDS.values():
        if found := kind.found(request):
            link = reverse(f"admin:{kind.page}_changelist") + kind.query
            lines = [_shown(kind.line(each)) for each in found[:_SHOWN]]
            items.append(Item(kind.title, kind.tone, _number(found), link, lines))
    return items


def _shown(line: Line) -> Line:
    return Line(visible(Truncator(line.text).chars(_LINE)), line.link)


def _number(found: Iterable[Any]) -> str:
    number = len(list(found))
    return f"{MOST - 1}+" if number >= MOST else str(number)


def _badge(name: str) -> Callable[[HttpRequest], str]:
    def badge(request: HttpRequest) -> str:
        found = KINDS[name].found(request)
        return _number(found) if found else ""

    return badge


# Named in the menu (sandbox_site.admin_pages), which takes no arguments.
ledger_badge = _badge("ledger")
queue_badge = _badge("queue")
unhealthy_badge = _badge("unhealthy")
breakers_badge = _badge("breakers")
alerts_badge = _badge("alerts")
budgets_badge = _badge("budgets")
changes_badge = _badge("changes")
approvals_badge = _badge("approvals")
calls_badge = _badge("calls")


WIDTH, HEIGHT = 720, 210
_LEFT, _BOTTOM, _TOP = 60, 38, 14
_COLOURS = 7


def stacked_bars(title: str, starts: list[datetime], series: list[Series]) -> SafeString:
    """One bar for each start, one colour a series; what it stands for shows when pointed at."""
    highest = max(
        (sum(values) for values in zip(*(s.values for s in series), strict=True)), default=0
    )
    top = _rounded_up(highest)
    step = (WIDTH - _LEFT) / len(starts)
    scale = (HEIGHT - _BOTTOM - _TOP) / top
    drawn: list[tuple[int, str, str, str, str, str]] = []
    for index, start in enumerate(starts):
        base = float(HEIGHT - _BOTTOM)
        for number, line in enumerate(series):
            if not (value := line.values[index]):
                continue
            height = value * scale
            base -= height
            drawn.append(
                (
                    number % _COLOURS,
                    f"{_LEFT + index * step + step * 0.1:.1f}",
                    f"{base:.1f}",
                    f"{step * 0.8:.1f}",
                    f"{height:.1f}",
                    f"{line.name}: {value} (from {start:%d %b %H:00} UTC)",
                )
            )
    rects = format_html_join(
        "",
        '<rect class="series-{}" x="{}" y="{}" width="{}" height="{}"><title>{}</title></rect>',
        drawn,
    )
    return format_html(
        '<svg class="bars" viewBox="0 0 {} {}" role="img" aria-label="{}">{}{}{}</svg>{}',
        WIDTH,
        HEIGHT,
        title,
        _axis(top, scale),
        rects,
        _labels(starts, step),
        _legend(series),
    )


def _axis(top: int, scale: float) -> SafeString:
    lines = []
    for part in (0, 0.5, 1):
        y = f"{HEIGHT - _BOTTOM - top * part * scale:.1f}"
        lines.append((_LEFT, y, WIDTH, y, _LEFT - 6, y, _short(top * part)))
    return format_html_join(
        "",
        '<line class="grid" x1="{}" y1="{}" x2="{}" y2="{}"/>'
        '<text class="tick" x="{}" y="{}" text-anchor="end" dominant-baseline="middle">{}</text>',
        lines,
    )


def _short(number: float) -> str:
    """Few enough characters for the space beside the chart."""
    for least, unit, sign in ((10**9, 10**9, "G"), (10**6, 10**6, "M"), (10**4, 10**3, "k")):
        if number >= least:
            return f"{number / unit:g}{sign}"
    return f"{number:g}"


def _labels(starts: list[datetime], step: float) -> SafeString:
    days = starts[-1] - starts[0] > timedelta(days=2)
    every, shown = (4, "%d %b") if days else (3, "%H:00")
    # Every other one is left out on a phone, where the letters are larger beside the bars.
    labels = (
        (
            " tick-spared" if index // every % 2 else "",
            f"{_LEFT + (index + 0.5) * step:.1f}",
            HEIGHT - 8,
            start.strftime(shown),
        )
        for index, start in enumerate(starts)
        if index % every == 0
    )
    return format_html_join(
        "", '<text class="tick{}" x="{}" y="{}" text-anchor="middle">{}</text>', labels
    )


def _legend(series: list[Series]) -> SafeString:
    items = (
        (number % _COLOURS, line.name, f"{sum(line.values):,}")
        for number, line in enumerate(series)
    )
    listed = format_html_join("", '<li><span class="key key-{}"></span>{} <b>{}</b></li>', items)
    return format_html('<ul class="legend">{}</ul>', listed)


def _rounded_up(value: int) -> int:
    """The next 1, 2 or 5 times a power of ten, so that the axis has round numbers; at least 2."""
    if value <= 2:
        return 2
    power = 10 ** math.floor(math.log10(value))
    return int(next(step * power for step in (1, 2, 5, 10) if step * power >= value))


_HEADER = "X-Fragment"


def is_wanted(request: HttpRequest) -> bool:
    return _HEADER in request.headers


def fragment_of(request: HttpRequest, page: HttpResponse, template: str) -> HttpResponse:
    """The page, or by a template of its own the part that was asked for: 304 where the reader has
    it already. No part may draw what differs from answer to answer, as a CSRF token does.
    """
    if not is_wanted(request) or not isinstance(page, TemplateResponse):
        return page
    page.template_name = template
    page.render()
    etag = f'"{hashlib.sha256(page.content).hexdigest()}"'
    page["ETag"] = etag
    patch_vary_headers(page, (_HEADER,))
    return cast("HttpResponse", get_conditional_response(request, etag, None, page))


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
