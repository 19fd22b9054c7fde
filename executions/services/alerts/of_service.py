"""What of the service itself waits for somebody: changes, the queue, the ledger, a provider."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta

from django.utils.translation import ngettext

from executions.ledger.checkpoint_store import place_of_checkpoints
from executions.ledger.checkpoints import newest_line
from executions.ledger.checks import last_told, uncheckpointed_since
from executions.ledger.keyring import LedgerUnavailable
from executions.ledger.models import LedgerCheck
from executions.runs.queue import queue_state
from executions.services.alerts.found import Found
from providers.models import CircuitBreaker, PendingChange, ProviderConfig, ProviderHealth

# One check that failed may be a network's hiccup.
FAILED_CHECKS = 3


def changes(now: datetime, _: float) -> Iterator[Found]:
    waiting = PendingChange.objects.filter(status=PendingChange.Status.WAITING).order_by("pk")
    oldest = waiting.values_list("created_at", flat=True).first()
    if oldest is not None:
        number = waiting.count()
        since = f"{oldest:%Y-%m-%d %H:%M} UTC"
        wait = ngettext("%d change waits", "%d changes wait", number) % number
        message = f"{wait} for a second administrator, the oldest since {since}."
        yield Found("changes", number, message)


def unhealthy(now: datetime, _: float) -> Iterator[Found]:
    """Found so again and again by the checks of the background, under its present configuration."""
    versions = dict(ProviderConfig.objects.values_list("provider_id", "version"))
    often = CircuitBreaker.objects.filter(failed_checks__gte=FAILED_CHECKS)
    failed = dict(often.values_list("provider_id", "failed_checks"))
    rows = ProviderHealth.objects.filter(healthy=False, provider_id__in=failed)
    for provider, version, code in rows.values_list("provider_id", "config_version", "code"):
        if versions.get(provider) == version:
            number = failed[provider]
            message = f"{provider} failed {number} consecutive checks ({code or 'no code'})."
            yield Found(provider, number, message)


def dead_queue(now: datetime, most: float) -> Iterator[Found]:
    state = queue_state(now)
    if state.problem(most):
        yield Found("queue", state.waited_seconds, state.problem(most))


def findings(now: datetime, _: float) -> Iterator[Found]:
    check = last_told()
    if check is not None and check.state == LedgerCheck.State.NOT_INTACT:
        when = f"{check.finished_at:%Y-%m-%d %H:%M} UTC"
        message = (
            f"The ledger was not intact when it was verified ({when}): {check.findings} findings."
        )
        yield Found("ledger", check.findings, message)


def checkpoint_old(now: datetime, most: float) -> Iterator[Found]:
    """An entry that no line outside of the database tells of. Nothing is due while none is new."""
    place = place_of_checkpoints()
    if place is None:
        return
    try:
        line = newest_line()
    except LedgerUnavailable as error:
        yield Found("checkpoints", None, error.message)
        return
    since = uncheckpointed_since(line[0] if line else 0)
    if since is not None and (hours := (now - since) / timedelta(hours=1)) > most:
        message = f"The ledger has had no checkpoint in {place.name} for {hours:.1f} hours."
        yield Found("checkpoints", hours, message)
