"""What the workers do by themselves, and how often."""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any

from django.db import close_old_connections, transaction
from django.db.models import Q
from django.utils import timezone
from django_q.models import Schedule
from django_q.tasks import async_task

logger = logging.getLogger(__name__)

EVERY_MINUTES = {
    "executions.tasks.end_stale_executions": 1,
    "executions.tasks.index_new_code": 1,
    "executions.tasks.watch_spending": 5,
    "executions.tasks.give_space_back": 5,
    "executions.tasks.write_ledger_checkpoint": 60,
    "executions.tasks.apply_retention": 24 * 60,
    "providers.tasks.check_health": 1,
    "providers.tasks.sweep_leftovers": 5,
}


def ensure_schedules() -> None:
    """Have the workers do what is due. Safe to call at every start.

    Of a row only its name and its next time count. What other rows there are is removed.
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
        logger.exception("what is due could not be queued")


def _enqueue_if_due(task: str, interval: timedelta, broker: Any) -> None:
    now = timezone.now()
    rows = Schedule.objects.filter(name=task)
    due = rows.filter(Q(next_run__lte=now) | Q(next_run__gt=now + interval) | Q(next_run=None))
    with transaction.atomic():
        if due.update(next_run=now + interval) or not rows.exists():
            async_task(task, broker=broker)
    if not rows.exists():
        ensure_schedules()


def _remove_unknown() -> None:
    unknown = Schedule.objects.exclude(name__in=EVERY_MINUTES) | Schedule.objects.filter(name=None)
    for pk, func in unknown.values_list("pk", "func"):
        logger.error(
            "a schedule is none of ours and was removed: %s",
            repr(func)[:200],
            extra={"alert": "unknown_schedule", "task": repr(func)[:200]},
        )
        Schedule.objects.filter(pk=pk).delete()
