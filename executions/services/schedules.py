"""What the workers do by themselves, and how often."""

from __future__ import annotations

from django_q.models import Schedule

_EVERY = {
    "executions.tasks.end_stale_executions": Schedule.MINUTES,
    "executions.tasks.index_new_code": Schedule.MINUTES,
    "executions.tasks.write_ledger_checkpoint": Schedule.HOURLY,
    "executions.tasks.apply_retention": Schedule.DAILY,
}


def ensure_schedules() -> None:
    """Have the workers do what is due. Safe to call at every start."""
    for task, how_often in _EVERY.items():
        Schedule.objects.update_or_create(
            name=task,
            defaults={"func": task, "schedule_type": how_often, "minutes": 1, "repeats": -1},
        )
