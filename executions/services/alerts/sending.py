"""Telling of alerts by mail and webhook: each state once, and again what could not be sent.

It is done in a thread that neither a request nor a task of the schedule waits for: a receiver that
is slow holds up nobody but the next message to itself.
"""

from __future__ import annotations

import logging
from datetime import timedelta

from django.conf import settings
from django.core.mail import EmailMessage, get_connection
from django.db.models import F, Q, QuerySet
from django.utils import timezone

from executions.models import Alert
from executions.services.alerts.posting import post
from executions.services.presentation import visible

logger = logging.getLogger(__name__)

# Longer than both ways of sending may take.
CLAIM = timedelta(minutes=2)
RETRY = timedelta(seconds=30)
LONGEST_RETRY = timedelta(hours=1)
# What is over for longer than this is no news to anybody.
NEWS = timedelta(days=1)
AT_ONCE = 20


def send_news() -> int:
    """Send what is due now. How many states of alerts were told in every way that is set."""
    sent = 0
    for alert in list(_due().order_by("opened_at")[:AT_ONCE]):
        if _claimed(alert):
            sent += _send(alert)
    return sent


def _due() -> QuerySet[Alert]:
    now = timezone.now()
    alerting = settings.ALERTING
    untold = Q(pk__in=())
    if alerting.emails:
        untold |= ~Q(mailed=F("state"))
    if alerting.webhook_url:
        untold |= ~Q(posted=F("state"))
    is_news = Q(state=Alert.State.OPEN) | Q(resolved_at__gte=now - NEWS)
    is_free = Q(claimed_until=None) | Q(claimed_until__lt=now)
    return Alert.objects.filter(untold, is_news, is_free)


def _claimed(alert: Alert) -> bool:
    """Whether it is this process that sends it, in the state that it has here."""
    mine = _due().filter(pk=alert.pk, state=alert.state)
    if not mine.update(claimed_until=timezone.now() + CLAIM):
        return False
    # What another told meanwhile is not told again.
    alert.refresh_from_db()
    return True


def _send(alert: Alert) -> bool:
    alerting, problems = settings.ALERTING, []
    told: dict[str, str] = {}
    if alerting.webhook_url and alert.posted != alert.state:
        if problem := post(alert):
            problems.append(f"webhook: {problem}")
        else:
            told["posted"] = alert.state
    if alerting.emails and alert.mailed != alert.state:
        try:
            _mail(alert)
            told["mailed"] = alert.state
        except Exception as error:
            # Whatever smtplib and sockets raise; not its text, in which a password may be.
            problems.append(f"mail: {type(error).__name__}")
    tries = alert.tries + 1 if problems else 0
    wait = min(RETRY * 2 ** min(tries, 10), LONGEST_RETRY)
    # Another state, or another sender, has its own claim by now.
    Alert.objects.filter(pk=alert.pk, claimed_until=alert.claimed_until).update(
        **told,
        tries=tries,
        problem="; ".join(problems)[:500],
        claimed_until=timezone.now() + wait if problems else None,
    )
    if problems:
        logger.warning("an alert could not be sent: %s", "; ".join(problems))
    return not problems


def _mail(alert: Alert) -> None:
    alerting = settings.ALERTING
    word = "Resolved" if alert.state == Alert.State.RESOLVED else str(alert.severity).capitalize()
    # A header has one line, whatever the name of a host is.
    subject = " ".join(f"[{settings.INSTANCE}] {word}: {visible(str(alert))}".split())
    since = f"{alert.opened_at:%Y-%m-%d %H:%M} UTC"
    body = f"{visible(alert.message)}\n\nRule: {alert.rule}\nSince: {since}\nState: {alert.state}\n"
    message = EmailMessage(
        subject[:200], body, alerting.sender, list(alerting.emails), connection=get_connection()
    )
    message.send()
