"""The figures of the dashboard, the first steps, the overview of a tenant, and what waits for
somebody now.

A process looks up what waits every few seconds at most, in some ten bounded queries, and shows of
it what whoever asks may see. What anybody may see is decided by whoever draws it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from decimal import Decimal
from itertools import chain
from typing import Any
from uuid import UUID

from django.conf import settings
from django.contrib.auth.models import User
from django.db.models import Case, CharField, F, QuerySet, Sum, Value, When
from django.db.models.functions import Left
from django.utils import timezone

from executions.capabilities.alerts.models import Alert
from executions.capabilities.observability.counters import (
    OUTCOME,
    PRICED,
    latencies,
    percentiles,
)
from executions.capabilities.spending.models import Budget
from executions.capabilities.spending.service import budgets_near
from executions.capabilities.tools.models import ToolCall
from executions.kernel.database import snapshot_read
from executions.ledger.models import LedgerCheck
from executions.runs.ledger_checks import last_result
from executions.runs.models import Approval, Execution
from executions.runs.queue import WAITS_FOR_APPROVAL, queue_state
from executions.runs.results import executions_of
from executions.runs.statistics import TENANT, rows_since
from executions.sessions.models import Session
from executions.sessions.queries import sessions_of
from executions.tenants.models import ApiKey, Tenant
from executions.tenants.service import AUDITOR
from providers import errors
from providers.models import (
    CircuitBreaker,
    ConfigVersion,
    PendingChange,
    ProviderConfig,
    ProviderHealth,
)
from providers.services.history import SYSTEM
from providers.services.settings_cache import CachedQuery

TARGET_PERCENT = 95.0
# Hours shown, and hours a bar.
RANGES = {"24h": (24, 1), "7d": (24 * 7, 6)}

_NAME = CharField(null=True)
_TOP = 6
_OTHERS = "others"
_RAN = (Execution.Status.SUCCEEDED, Execution.Status.FAILED)


@dataclass
class Series:
    """One line of a stacked chart: a name and a number for each of the chart's bars."""

    name: str
    values: list[int]


@dataclass
class Figures:
    """What happened in the hours that end with the current one.

    `success_percent` is of what ended otherwise than by being cancelled, None when nothing did;
    `ran_percent` is the part whose code ran to its own end, whatever its exit code.
    Latencies are milliseconds. `cost` is None where executions carry none; `unpriced` of them have
    no price.
    """

    since: datetime
    bars: list[datetime]
    total: int = 0
    success_percent: float | None = None
    ran_percent: float | None = None
    statuses: dict[str, int] = field(default_factory=dict)
    errors: list[tuple[str, str, int]] = field(default_factory=list)
    p50: float | None = None
    p95: float | None = None
    p99: float | None = None
    by_provider: list[Series] = field(default_factory=list)
    by_tenant: list[Series] = field(default_factory=list)
    tenants: list[dict[str, Any]] = field(default_factory=list)
    cost: float | None = None
    unpriced: int = 0

    @property
    def on_target(self) -> bool:
        return self.success_percent is not None and self.success_percent >= TARGET_PERCENT


def figures(hours: int, step: int = 1, now: datetime | None = None) -> Figures:
    """The figures of the last `hours` hours, the current one included, `step` hours a bar.

    All are of one moment: what ends meanwhile is in none of them.
    """
    current = (now or timezone.now()).replace(minute=0, second=0, microsecond=0)
    first = current - timedelta(hours=hours - 1)
    shown = [first + timedelta(hours=after) for after in range(0, hours, step)]
    found = Figures(shown[0], shown)
    with snapshot_read():
        _read(found, shown, step)
    return found


def _read(found: Figures, shown: list[datetime], step: int) -> None:
    _outcomes(found)
    histogram = chain.from_iterable(latencies(found.since).values())
    found.p50, found.p95, found.p99 = percentiles(histogram, 0.50, 0.95, 0.99)
    of_tenants = rows_since(found.since, TENANT)
    busiest = of_tenants.values_list("name").annotate(number=Sum("count"))
    found.tenants = [
        {"tenant_slug": slug, "number": number, "percent": 100 * number / (found.total or 1)}
        for slug, number in busiest.order_by("-number", "name")[:_TOP]
    ]
    of_providers = rows_since(found.since, OUTCOME).values_list("hour", "name")
    found.by_provider = _series(shown, step, of_providers.annotate(number=Sum("count")))
    top = [entry["tenant_slug"] for entry in found.tenants]
    # The others are counted themselves: as what is left of a number of other rows they would be
    # less than none while those are being corrected.
    by_name = Case(When(name__in=top, then=F("name")), default=Value(None), output_field=_NAME)
    named = of_tenants.annotate(shown_as=by_name).values_list("hour", "shown_as")
    found.by_tenant = _series(shown, step, named.annotate(number=Sum("count")))


def _outcomes(found: Figures) -> None:
    by_code: dict[str, int] = defaultdict(int)
    statuses: dict[str, int] = defaultdict(int)
    spent = 0.0
    rows = rows_since(found.since, OUTCOME, PRICED).values_list("kind", "label")
    for kind, label, number, cost in rows.annotate(number=Sum("count"), spent=Sum("amount")):
        if kind == PRICED:
            found.unpriced -= number
            continue
        status, _, code = label.partition(" ")
        statuses[status] += number
        spent += cost
        found.unpriced += number
        if code:
            by_code[code] += number
    found.statuses = dict(statuses)
    found.total = sum(statuses.values())
    found.cost = spent or None
    judged = found.total - statuses.get(Execution.Status.CANCELLED, 0)
    if judged:
        found.success_percent = 100 * statuses.get(Execution.Status.SUCCEEDED, 0) / judged
        found.ran_percent = 100 * sum(statuses.get(status, 0) for status in _RAN) / judged
    found.errors = [
        (code, errors.CODES[code].title if code in errors.CODES else "", by_code[code])
        for code in sorted(by_code, key=lambda code: -by_code[code])
    ]


def _series(
    bars: list[datetime], step: int, rows: Iterable[tuple[datetime, str | None, int]]
) -> list[Series]:
    """The rows by name, the busiest first; those without one are the others'."""
    width = timedelta(hours=step)
    values: dict[str | None, list[int]] = defaultdict(lambda: [0] * len(bars))
    for hour, name, number in rows:
        # A clock that was set back leaves counts of hours to come.
        position = min((hour - bars[0]) // width, len(bars) - 1)
        values["none" if name == "" else name][position] += number
    return [
        Series(_OTHERS if name is None else name, values[name])
        for name in sorted(values, key=lambda name: (name is None, -sum(values[name])))
        if name is not None or any(values[name])
    ]


# Whoever has run as many has found the way.
NEW_BELOW = 50


@dataclass(frozen=True)
class Step:
    title: str
    what: str
    page: str
    permission: str
    is_done: bool


def first_steps(user: User) -> list[Step]:
    """Those that this account may take; none once all are taken, or the installation is not new."""
    if Execution.objects.order_by()[NEW_BELOW - 1 :].exists():
        return []
    steps = [step for step in _steps() if user.has_perm(step.permission)]
    return [] if all(step.is_done for step in steps) else steps


def _steps() -> list[Step]:
    saved_by_somebody = ConfigVersion.objects.filter(
        subject__in=ProviderConfig.objects.values("provider_id")
    ).exclude(author=SYSTEM)
    return [
        Step(
            "Run a program",
            "Use the playground. The run and its result are then in the list of executions.",
            "playground",
            "executions.use_playground",
            Execution.objects.exists(),
        ),
        Step(
            "Choose the isolation",
            "The page of the active provider shows its runtime, and which isolation is available.",
            "admin:providers_providerconfig_changelist",
            "providers.change_providerconfig",
            saved_by_somebody.exists(),
        ),
        Step(
            "Add a provider",
            "E2B, Aliyun or a second pool: for failover, or for single tenants.",
            "admin:providers_providerconfig_add",
            "providers.add_providerconfig",
            ProviderConfig.objects.order_by()[1:].exists(),
        ),
        Step(
            "Create an API key",
            "One for each agent, with the scopes and restrictions it needs.",
            "admin:executions_apikey_add",
            "executions.add_apikey",
            ApiKey.objects.order_by()[1:].exists(),
        ),
        Step(
            "Invite an auditor",
            "An account with the role Auditor can see everything and change nothing.",
            "admin:auth_user_add",
            "auth.add_user",
            User.objects.filter(groups__name=AUDITOR).exists(),
        ),
    ]


DAYS = 30
LATEST = 8
KEYS = 20


def runs_by_day(
    tenant: Tenant, now: datetime | None = None
) -> tuple[list[datetime], list[Series], float | None]:
    """The days (UTC), the oldest first and today the last, how many executions ended in each, and
    what all of them cost; None where none did."""
    today = (now or timezone.now()).replace(hour=0, minute=0, second=0, microsecond=0)
    days = [today - timedelta(days=before) for before in range(DAYS - 1, -1, -1)]
    counts = rows_since(days[0], TENANT).filter(name=tenant.slug)
    numbers: dict[datetime, int] = defaultdict(int)
    cost = 0.0
    for hour, number, spent in counts.values_list("hour", "count", "amount"):
        # A clock that was set back leaves counts of hours to come.
        numbers[min(hour.replace(hour=0), today)] += number
        cost += spent
    return days, [Series("executions", [numbers[day] for day in days])], cost or None


def latest_runs(tenant: Tenant) -> QuerySet[Execution]:
    """With what is shown of them alone: a tenant decides how long its outputs are."""
    shown = ("created_at", "status", "language")
    return executions_of(tenant).order_by("-pk").only(*shown)[:LATEST]


def latest_sessions(tenant: Tenant) -> QuerySet[Session]:
    """With what is shown of them alone: nothing of it is encrypted."""
    return sessions_of(tenant).order_by("-pk").only("name", "state", "language")[:LATEST]


def newest_keys(tenant: Tenant) -> QuerySet[ApiKey]:
    """Those in force before the revoked ones, of which the one revoked last is the first."""
    newest = (F("revoked_at").desc(nulls_first=True), "-pk")
    return ApiKey.objects.filter(tenant=tenant).order_by(*newest)[:KEYS]


SECONDS = 5.0
# Of each; beyond, it is "99+".
MOST = 100
# Of a message, in characters; the page has all of it.
MOST_TOLD = 500


@dataclass(frozen=True)
class Waiting:
    """A change that waits for a second administrator. `subject` says of what, as its row has it."""

    pk: int
    subject: str
    words: str
    author: str
    since: datetime


@dataclass(frozen=True)
class Ill:
    """A provider that is not fit to be used. `pk` is of the row whose page says more."""

    pk: int
    provider: str
    code: str
    message: str


@dataclass(frozen=True)
class Attention:
    """Everything, each bounded by MOST. `queue` says why nobody works on it, "" where they do."""

    changes: list[Waiting]
    approvals: list[tuple[int, str, datetime]]
    calls: list[tuple[UUID, str, str, datetime]]
    alerts: list[Alert]
    breakers: list[Ill]
    budgets: list[tuple[Budget, Decimal]]
    unhealthy: list[Ill]
    queue: str
    check: LedgerCheck | None


def _look() -> Attention:
    return Attention(
        _changes(),
        _approvals(),
        _calls(),
        list(Alert.objects.filter(active_key__isnull=False).order_by("-opened_at", "-id")[:MOST]),
        _broken(),
        budgets_near()[:MOST],
        _unhealthy(),
        queue_state(timezone.now()).problem(settings.ALERT_THRESHOLDS["queue_seconds"]),
        last_result(),
    )


def _changes() -> list[Waiting]:
    rows = PendingChange.objects.filter(status=PendingChange.Status.WAITING).defer("config", "diff")
    return [
        Waiting(row.pk, row.subject, str(row), row.author, row.created_at)
        for row in rows.order_by("-pk")[:MOST]
    ]


def _approvals() -> list[tuple[int, str, datetime]]:
    """From what is queued, by its index: the approval of what ended undecided waits for ever."""
    queued = Execution.objects.filter(
        WAITS_FOR_APPROVAL, status=Execution.Status.QUEUED, finished_at=None
    )
    held = list(queued.order_by("-pk").values_list("pk", flat=True)[:MOST])
    rows = Approval.objects.filter(execution__in=held).order_by("-pk")
    return list(rows.values_list("pk", "tenant_slug", "asked_at"))


def _calls() -> list[tuple[UUID, str, str, datetime]]:
    """From what runs, by its index: whoever has died may have left calls that are held for ever."""
    running = Execution.objects.filter(status=Execution.Status.RUNNING, finished_at=None)
    held = ToolCall.objects.filter(
        execution__in=running.values("pk"), state=ToolCall.State.HELD, state__in=ToolCall.OPEN
    )
    rows = held.order_by("-pk").values_list("pk", "name", "tenant_slug", "asked_at")
    return list(rows[:MOST])


def _broken() -> list[Ill]:
    rows = CircuitBreaker.objects.filter(state=CircuitBreaker.State.OPEN).order_by("provider_id")
    found = rows.values_list("pk", "provider_id", "error_code", Left("error_message", MOST_TOLD))
    return [Ill(*each) for each in found[:MOST]]


def _unhealthy() -> list[Ill]:
    rows = ProviderHealth.objects.filter(healthy=False).order_by("provider_id")
    found = list(rows.values_list("provider_id", "config_version", "code", "message")[:MOST])
    ids = [provider for provider, *_ in found]
    configured = ProviderConfig.objects.filter(provider_id__in=ids)
    known = (
        {
            provider: (pk, version)
            for pk, provider, version in configured.values_list("pk", "provider_id", "version")
        }
        if ids
        else {}
    )
    return [
        Ill(known[provider][0], provider, code, message)
        for provider, version, code, message in found
        if provider in known and known[provider][1] == version
    ]


attention = CachedQuery(
    *(_look, PendingChange, Approval, Alert, CircuitBreaker, Budget, ProviderHealth, LedgerCheck),
    seconds=SECONDS,
)
