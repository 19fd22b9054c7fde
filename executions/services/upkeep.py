"""What the workers look after every few minutes, besides running executions."""

from __future__ import annotations

from django_q.models import Schedule

TASKS = {
    "executions.tasks.probe_providers": 1,
    "executions.tasks.sweep_leftovers": 5,
    "executions.tasks.watch_spending": 5,
}


def ensure_upkeep() -> None:
    """Schedule each task, every so many minutes. Safe to call at every start."""
    for task, minutes in TASKS.items():
        Schedule.objects.update_or_create(
            name=task,
            defaults={
                "func": task,
                "schedule_type": Schedule.MINUTES,
                "minutes": minutes,
                "repeats": -1,
            },
        )
