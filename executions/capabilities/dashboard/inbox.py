"""What waits for somebody now, for the sidebar and the front page.

A process looks it up every few seconds at most, in some ten bounded queries, and shows of it what
whoever asks may see. What anybody may see is decided by whoever draws it.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from uuid import UUID

from django.conf import settings
from django.db.models.functions import Left
from django.utils import timezone

from executions.capabilities.alerts.models import Alert
from executions.capabilities.spending.models import Budget
from executions.capabilities.spending.service import budgets_near
from executions.capabilities.tools.models import ToolCall
from executions.ledger.models import LedgerCheck
from executions.runs.ledger_checks import last_told
from executions.runs.models import Approval, Execution
from executions.runs.queue import WAITS_FOR_APPROVAL, queue_state
from providers.models import CircuitBreaker, PendingChange, ProviderConfig, ProviderHealth
from providers.services.kept import Kept

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
        last_told(),
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


attention = Kept(
    *(_look, PendingChange, Approval, Alert, CircuitBreaker, Budget, ProviderHealth, LedgerCheck),
    seconds=SECONDS,
)
