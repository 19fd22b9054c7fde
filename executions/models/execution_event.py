from __future__ import annotations

from django.db import models
from django.db.models import F, Q

from executions.models.execution import Execution


class ExecutionEvent(models.Model):
    """Some events of a run one after the other, for those who follow it from another process.

    They are the record's texts once more, and removed a minute after its end.
    """

    execution = models.ForeignKey(Execution, on_delete=models.CASCADE, related_name="events")
    first = models.PositiveIntegerField()
    last = models.PositiveIntegerField()
    bodies = models.TextField(help_text="JSON list of the events sent to clients.")

    class Meta:
        ordering = ("execution", "first")
        constraints = (
            models.UniqueConstraint(fields=("execution", "first"), name="execution_event_once"),
            models.CheckConstraint(
                condition=Q(last__gte=F("first")), name="execution_event_has_some"
            ),
        )

    def __str__(self) -> str:
        return f"{self.execution_id}: {self.first} to {self.last}"
