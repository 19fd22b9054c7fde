"""Alerts: watched for, sent, acknowledged, and watched for by others where no worker does."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from django.conf import settings
from django.core.mail import EmailMessage, get_connection
from django.db import Error as DatabaseFailure
from django.db import IntegrityError, close_old_connections, transaction
from django.db.models import F, Q
from django.db.models.functions import Now
from django.utils import timezone

from executions.capabilities.alerts.models import Alert, AlertDelivery
from executions.capabilities.alerts.rules import RULES, Found, Rule
from executions.capabilities.webhooks.service import signed_headers
from executions.kernel import http
from executions.kernel.background import run_once_in_background
from executions.kernel.claims import by_claim, claim, end
from executions.kernel.database import delete_in_batches
from executions.ledger.append import append
from executions.runs.models import Process
from providers import draining
from providers.addresses import Allowed, Rules
from providers.hidden_characters import visible
from providers.remote.receiver import Receiver
from providers.threads import Loop


def _post(alert: Alert) -> str:
    """Why it was not taken; "" when it was."""
    alerting = settings.ALERTING
    body = json.dumps(_content(alert), separators=(",", ":")).encode()
    # The same for each try, so that a receiver knows one that it has had.
    message_id = f"alert_{alert.pk}_{alert.state}"
    headers = {
        "Content-Type": "application/json",
        **signed_headers((alerting.webhook_secret,), message_id, int(time.time()), body),
    }
    return http.post(alerting.webhook_url, body, headers, Receiver(_rules()))


def _content(alert: Alert) -> dict[str, Any]:
    ended = alert.resolved_at
    return {
        "type": f"alert.{alert.state}",
        "timestamp": (ended or alert.opened_at).isoformat(),
        "data": {
            "id": alert.pk,
            "rule": alert.rule,
            "subject": alert.subject,
            "severity": str(alert.severity),
            "message": alert.message,
            "value": alert.value,
            "threshold": alert.threshold,
            "instance": settings.INSTANCE,
            "opened_at": alert.opened_at.isoformat(),
            "resolved_at": ended.isoformat() if ended else None,
        },
    }


def _rules() -> Rules:
    allowed = tuple(map(Allowed.parse, settings.ALERT_ALLOWED_NETWORKS))
    return Rules(allowed, allowed, "ALERT_ALLOWED_NETWORKS")


logger = logging.getLogger(__name__)

# Longer than one way of sending may take.
CLAIM = timedelta(minutes=2)
RETRY = timedelta(seconds=30)
LONGEST_RETRY = timedelta(hours=1)
# What is over for longer than this is no news to anybody.
NEWS = timedelta(days=1)
AT_ONCE = 20


def _mail(alert: Alert) -> str:
    alerting = settings.ALERTING
    word = "Resolved" if alert.state == Alert.State.RESOLVED else str(alert.severity).capitalize()
    # A header has one line, whatever the name of a host is.
    subject = " ".join(f"[{settings.INSTANCE}] {word}: {visible(str(alert))}".split())
    since = f"{alert.opened_at:%Y-%m-%d %H:%M} UTC"
    body = f"{visible(alert.message)}\n\nRule: {alert.rule}\nSince: {since}\nState: {alert.state}\n"
    try:
        EmailMessage(
            subject[:200], body, alerting.sender, list(alerting.emails), connection=get_connection()
        ).send()
    except Exception as error:
        # Whatever smtplib and sockets raise; not its text, in which a password may be.
        return type(error).__name__
    return ""


WEBHOOK, MAIL = "webhook", "mail"
_SEND: dict[str, Callable[[Alert], str]] = {WEBHOOK: _post, MAIL: _mail}


def send_in_background() -> None:
    """Begin to send what is due, each way in a thread."""
    for way in filter(_is_set, _SEND):
        run_once_in_background(f"alerts by {way}", partial(send_news, way))


def send_news(way: str) -> int:
    """Send what is due that way now. How many states of alerts were told."""
    if not _is_set(way):
        return 0
    is_news = Q(alert__resolved_at=None) | Q(alert__resolved_at__gte=Now() - NEWS)
    due = AlertDelivery.objects.filter(is_news, way=way).select_related("alert").order_by("pk")
    sent = 0
    for _ in range(AT_ONCE):
        if (delivery := claim(due, CLAIM, tries=F("tries") + 1)) is None:
            break
        sent += _sent(delivery)
    return sent


def _is_set(way: str) -> bool:
    alerting = settings.ALERTING
    return bool(alerting.webhook_url if way == WEBHOOK else alerting.emails)


def _sent(delivery: AlertDelivery) -> bool:
    if problem := _SEND[delivery.way](delivery.alert):
        wait = min(RETRY * 2 ** min(delivery.tries, 10), LONGEST_RETRY)
        end(delivery, claimed_until=Now() + wait, problem=problem[:500])
        logger.warning("an alert could not be sent by %s: %s", delivery.way, problem)
    else:
        by_claim(delivery).delete()
    return not problem


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
            _tell(alert)
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
        if not mine.update(**values):
            return
        _tell(alert)
        _enter(alert, "resolved")
    logger.info("alert resolved: %s", alert, extra={"alert": alert.rule, "subject": alert.subject})


def _tell(alert: Alert) -> None:
    """Have its state told in each way at once, however often the former one was told in vain."""
    alert.deliveries.all().delete()
    AlertDelivery.objects.bulk_create(AlertDelivery(alert=alert, way=way) for way in _SEND)


def _enter(alert: Alert, action: str) -> None:
    content = {"action": action, "alert": alert.pk, "severity": str(alert.severity)}
    append("alert", str(alert), content)


EVERY_SECONDS = 60.0


def watch_in_background() -> None:
    """Start the thread. Several processes may have one: a rule opens one alert of a subject."""
    Loop(
        "alerts-stand-in",
        _watch,
        goes_on=lambda: not draining.is_draining(),
        first_pause=EVERY_SECONDS,
    ).start()


def _watch() -> float:
    try:
        watch_without_workers()
    except DatabaseFailure as error:
        logger.info("alerts could not be checked: %s", error)
    except Exception:
        logger.exception("alerts could not be checked")
    # An old connection is not held through the pause.
    close_old_connections()
    return EVERY_SECONDS


def acknowledge(alert: Alert, by: str) -> bool:
    """Note who has, and when, once: False where somebody had before. It stays open."""
    with transaction.atomic():
        mine = Alert.objects.filter(pk=alert.pk, acknowledged_at=None)
        won = mine.update(acknowledged_at=timezone.now(), acknowledged_by=by[:150])
        if won:
            content = {"action": "acknowledged", "alert": alert.pk, "by": by[:150]}
            append("alert", str(alert), content)
    return bool(won)
