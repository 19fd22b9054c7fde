from __future__ import annotations

from django.db import models
from django.db.models import Q
from django.utils import timezone

from executions.runs.models import Execution


class RunSignal(models.Model):
    """What somebody wants of a run that another process has: it looks once a second.

    Who asked for the end of one is entered in the ledger; a row goes once its execution has ended.
    """

    class Kind(models.TextChoices):
        CANCEL = "cancel", "Cancel"
        FOLLOW = "follow", "Store events for other processes"

    execution = models.ForeignKey(Execution, on_delete=models.CASCADE, related_name="signals")
    kind = models.CharField(max_length=8, choices=Kind.choices)
    asked_by = models.CharField(max_length=200)
    asked_at = models.DateTimeField(default=timezone.now, editable=False)

    class Meta:
        ordering = ("pk",)
        constraints = (
            models.UniqueConstraint(fields=("execution", "kind"), name="run_signal_once"),
            models.CheckConstraint(
                condition=Q(kind__in=("cancel", "follow")), name="run_signal_kind_is_known"
            ),
        )

    def __str__(self) -> str:
        return f"{self.kind} {self.execution_id}"
