"""What the workers do by themselves, and how often."""

from __future__ import annotations

import logging
from datetime import datetime, timedelta
from typing import Any

from django.conf import settings
from django.db import close_old_connections, transaction
from django.db.models import Q
from django.utils import timezone
from django_q.models import Schedule
from django_q.tasks import async_task

logger = logging.getLogger(__name__)

EVERY_MINUTES = {
    "executions.tasks.end_stale_executions": 1,
    "executions.tasks.forget_events": 1,
    "executions.tasks.tend_sessions": 1,
    "executions.tasks.tend_webhooks": 1,
    "executions.tasks.begin_schedules": 1,
    "executions.tasks.index_new_code": 1,
    "executions.tasks.watch_alerts": 1,
    "executions.tasks.export_ledger": 1,
    "executions.tasks.export_metrics": 1,
    "executions.tasks.make_reports": 1,
    "executions.tasks.check_ledger": 1,
    "executions.tasks.remove_tenants": 1,
    "executions.tasks.watch_spending": 5,
    "executions.tasks.give_space_back": 5,
    "executions.tasks.collect_blobs": 20,
    "executions.tasks.write_ledger_checkpoint": 60,
    "executions.tasks.apply_retention": 24 * 60,
    "executions.tasks.discard_unfinished_uploads": 24 * 60,
    "providers.tasks.check_health": 1,
    "providers.tasks.sweep_leftovers": 5,
}


# Whose names begin so is a task of this or another version, which may be running beside this one.
_OURS = ("executions.tasks.", "providers.tasks.")


def ensure_schedules() -> None:
    """Have the workers do what is due. Safe to call at every start.

    Of a row only its name and its next time count. What nobody of ours can have written is removed.
    """
    _remove_unknown()
    for task, minutes in EVERY_MINUTES.items():
        values = {
            "func": task,
            "schedule_type": Schedule.MINUTES,
            "minutes": minutes,
            "repeats": -1,
            "hook": None,
            "args": None,
            "kwargs": None,
        }
        if not Schedule.objects.filter(name=task).update(**values):
            Schedule.objects.create(name=task, **values)


def enqueue_due(broker: Any = None) -> None:
    """Queue what is due. Of several clusters one does: whose UPDATE counted.

    A time that lies further ahead than it can be was not written by us, and is due.
    """
    close_old_connections()
    try:
        _remove_unknown()
        for task, minutes in EVERY_MINUTES.items():
            _enqueue_if_due(task, timedelta(minutes=minutes), broker)
    except Exception:
        # The cluster's guard calls this, and is to go on guarding.
        logger.exception("the due tasks could not be queued")


def note_done(task: str, began: datetime) -> None:
    """Have a task that succeeded wait for its next time, counted from when it was queued."""
    interval = timedelta(minutes=EVERY_MINUTES.get(task, 0))
    if interval > _trial():
        close_old_connections()
        Schedule.objects.filter(name=task).update(next_run=began + interval)


def _enqueue_if_due(task: str, interval: timedelta, broker: Any) -> None:
    """A broker may lose a task, with the cluster it was sent to or by itself: until it is done it
    is due again after `_trial`, however rare it is."""
    now = timezone.now()
    rows = Schedule.objects.filter(name=task)
    due = rows.filter(Q(next_run__lte=now) | Q(next_run__gt=now + interval) | Q(next_run=None))
    with transaction.atomic():
        if due.update(next_run=now + min(interval, _trial())) or not rows.exists():
            async_task(task, broker=broker)
    if not rows.exists():
        ensure_schedules()


def _trial() -> timedelta:
    return timedelta(seconds=settings.Q_CLUSTER["retry"])


def _remove_unknown() -> None:
    unknown = Schedule.objects.exclude(name__in=EVERY_MINUTES) | Schedule.objects.filter(name=None)
    for pk, name, func in unknown.values_list("pk", "name", "func"):
        if name == func and name.startswith(_OURS):
            continue
        logger.error(
            "a schedule does not belong to this service and was removed: %s",
            repr(func)[:200],
            extra={"alert": "unknown_schedule", "task": repr(func)[:200]},
        )
        Schedule.objects.filter(pk=pk).delete()
