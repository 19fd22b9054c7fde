"""Opening what a rule finds, and resolving what it has not found for a while."""

from __future__ import annotations

import logging
from datetime import datetime, timedelta

from django.db import IntegrityError, transaction
from django.utils import timezone

from executions.kernel.batches import delete_in_batches
from executions.ledger.append import append
from executions.models.alert import Alert
from executions.runs.process_models import Process
from executions.services.alerts.found import Found
from executions.services.alerts.rules import RULES, Rule
from executions.services.alerts.sending import WAYS, send_in_background

logger = logging.getLogger(__name__)

# An alert stays open so long after it held last: what comes and goes is one alert, told once.
QUIET = timedelta(minutes=10)
KEPT = timedelta(days=365)


def watch(now: datetime | None = None) -> int:
    """Look at every rule. How many alerts were opened. Several processes may do so at once."""
    moment = now or timezone.now()
    opened = 0
    unknown = []
    for rule in RULES:
        try:
            opened += sum(_note(rule, each, moment) for each in rule.found(moment))
        except Exception:
            # The others are still looked at, and of this one nothing is known to be over.
            logger.exception("the alert rule %s could not be checked", rule.name)
            unknown.append(rule.name)
    over = Alert.objects.filter(active_key__isnull=False, seen_at__lt=moment - QUIET)
    for alert in over.exclude(rule__in=unknown):
        try:
            _resolve(alert, moment)
        except Exception:
            # It stays open until its end can be entered.
            logger.exception("the alert %s could not be resolved", alert)
    delete_in_batches(
        Alert.objects.filter(state=Alert.State.RESOLVED, resolved_at__lt=moment - KEPT)
    )
    return opened


def watch_and_tell() -> int:
    """What is open is told whatever becomes of the looking. How many alerts were opened."""
    try:
        return watch()
    finally:
        send_in_background()


def watch_without_workers() -> bool:
    """Look at the rules, and tell, where no worker is there to do so: that none is, is one of
    them. Whether that was so."""
    if Process.objects.filter(kind=Process.Kind.WORKER, ended_at=None).exists():
        return False
    watch_and_tell()
    return True


def _note(rule: Rule, found: Found, now: datetime) -> bool:
    """Whether it is news."""
    subject = found.subject[:100]
    key = f"{rule.name} {subject}"
    seen = {"seen_at": now, "value": found.value, "message": found.message}
    if Alert.objects.filter(active_key=key).update(**seen):
        return False
    try:
        with transaction.atomic():
            alert = Alert.objects.create(
                rule=rule.name,
                subject=subject,
                active_key=key,
                severity=rule.severity,
                threshold=rule.limit,
                opened_at=now,
                **seen,
            )
            _enter(alert, "opened")
    except IntegrityError:
        # Somebody else saw it in the same moment.
        return False
    logger.warning("alert: %s", found.message, extra={"alert": rule.name, "subject": subject})
    return True


def _resolve(alert: Alert, now: datetime) -> None:
    with transaction.atomic():
        mine = Alert.objects.filter(pk=alert.pk, active_key__isnull=False, seen_at=alert.seen_at)
        values = {"state": Alert.State.RESOLVED, "active_key": None, "resolved_at": now}
        # It is news at once, however often the former state was told in vain.
        anew = {way.claimed: None for way in WAYS} | {way.tries: 0 for way in WAYS}
        if not mine.update(**values, **anew):
            return
        _enter(alert, "resolved")
    logger.info("alert resolved: %s", alert, extra={"alert": alert.rule, "subject": alert.subject})


def _enter(alert: Alert, action: str) -> None:
    content = {"action": action, "alert": alert.pk, "severity": str(alert.severity)}
    append("alert", str(alert), content)
