"""Telling of alerts by mail and webhook: each state once, and again what could not be sent.

Each way has a claim, tries and a thread of its own, which neither a request nor a task of the
schedule waits for: a receiver that is slow or away holds up nobody but the next message to itself.
The times are the database's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

from django.conf import settings
from django.core.mail import EmailMessage, get_connection
from django.db.models import F, Q, QuerySet
from django.db.models.functions import Now

from executions.kernel.background import begin_alone
from executions.models.alert import Alert
from executions.services.alerts.posting import post
from providers.hidden_characters import visible

logger = logging.getLogger(__name__)

# Longer than one way of sending may take.
CLAIM = timedelta(minutes=2)
RETRY = timedelta(seconds=30)
LONGEST_RETRY = timedelta(hours=1)
# What is over for longer than this is no news to anybody.
NEWS = timedelta(days=1)
AT_ONCE = 20


@dataclass(frozen=True)
class Way:
    """How somebody is told, and the columns of an alert that say how far that is.

    `send` returns why it was not taken; "" when it was.
    """

    name: str
    told: str
    claimed: str
    tries: str
    problem: str
    is_set: Callable[[], bool]
    send: Callable[[Alert], str]


def send_in_background() -> None:
    """Begin to send what is due, each way in a thread."""
    for way in WAYS:
        if way.is_set():
            begin_alone(f"alerts by {way.name}", partial(send_news, way))


def send_news(way: Way) -> int:
    """Send what is due that way now. How many states of alerts were told."""
    sent = 0
    for alert in list(_due(way).order_by("opened_at")[:AT_ONCE]):
        if _claimed(way, alert):
            sent += _sent(way, alert)
    return sent


def _due(way: Way) -> QuerySet[Alert]:
    if not way.is_set():
        return Alert.objects.none()
    is_news = Q(state=Alert.State.OPEN) | Q(resolved_at__gte=Now() - NEWS)
    is_free = Q(**{way.claimed: None}) | Q(**{f"{way.claimed}__lt": Now()})
    return Alert.objects.filter(~Q(**{way.told: F("state")}), is_news, is_free)


def _claimed(way: Way, alert: Alert) -> bool:
    """Whether it is this process that sends it, in the state that it has here."""
    mine = _due(way).filter(pk=alert.pk, state=alert.state)
    if not mine.update(**{way.claimed: Now() + CLAIM}):
        return False
    alert.refresh_from_db()
    return True


def _sent(way: Way, alert: Alert) -> bool:
    problem = way.send(alert)
    tries = getattr(alert, way.tries) + 1 if problem else 0
    wait = min(RETRY * 2 ** min(tries, 10), LONGEST_RETRY)
    told = {} if problem else {way.told: alert.state}
    # Another state, or another sender, has its own claim by now.
    mine = Alert.objects.filter(pk=alert.pk, **{way.claimed: getattr(alert, way.claimed)})
    again = {way.claimed: Now() + wait if problem else None}
    mine.update(**told, **again, **{way.tries: tries, way.problem: problem[:500]})
    if problem:
        logger.warning("an alert could not be sent by %s: %s", way.name, problem)
    return not problem


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


WEBHOOK = Way(
    *("webhook", "posted", "claimed_until", "tries", "problem"),
    is_set=lambda: bool(settings.ALERTING.webhook_url),
    send=post,
)
MAIL = Way(
    *("mail", "mailed", "mail_claimed_until", "mail_tries", "mail_problem"),
    is_set=lambda: bool(settings.ALERTING.emails),
    send=_mail,
)
WAYS = (WEBHOOK, MAIL)
