"""What the workers do by themselves, and how often."""

from __future__ import annotations

from django_q.models import Schedule

_EVERY_MINUTES = {
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
    """Have the workers do what is due. Safe to call at every start."""
    for task, minutes in _EVERY_MINUTES.items():
        Schedule.objects.update_or_create(
            name=task,
            defaults={
                "func": task,
                "schedule_type": Schedule.MINUTES,
                "minutes": minutes,
                "repeats": -1,
            },
        )
