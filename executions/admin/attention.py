"""The sidebar's counts and the front page's inbox: of each, what this person may open."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from django.http import HttpRequest
from django.urls import reverse
from django.utils.text import Truncator

from executions.ledger.models import LedgerCheck
from executions.services.attention import MOST, Attention, Ill, Waiting, attention
from providers import guarded
from providers.errors import CODES
from providers.hidden_characters import visible

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
