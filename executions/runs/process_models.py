from __future__ import annotations

from django.db import models
from django.db.models import Q
from django.db.models.functions import Now

from executions.kernel.text import uuid7


class Process(models.Model):
    """A process that may run executions, and its sign of life: `beat` grows while it lives.

    Whether it lives is decided by who watches `beat`, and by no clock
    (`executions.runs.process_reaper`). The times are the database's, and for people to read.
    """

    class Kind(models.TextChoices):
        WEB = "web", "Web"
        WORKER = "worker", "Worker"
        COMMAND = "command", "Command"

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    instance = models.CharField(max_length=100)
    kind = models.CharField(max_length=8, choices=Kind.choices)
    pid = models.PositiveBigIntegerField("process id")
    tag = models.CharField(
        max_length=64,
        blank=True,
        default="",
        db_default="",
        editable=False,
        help_text="Marks its sandboxes at remote services.",
    )
    beat = models.PositiveBigIntegerField(default=0)
    figures = models.JSONField(
        null=True, editable=False, help_text="Metrics of its pools and host at the last heartbeat."
    )
    started_at = models.DateTimeField(db_default=Now())
    renewed_at = models.DateTimeField("last heartbeat", db_default=Now())
    draining = models.BooleanField(
        default=False, help_text="Finishes running work and starts nothing new."
    )
    ended_at = models.DateTimeField(null=True, help_text="When it stopped, or was found dead.")

    class Meta:
        verbose_name_plural = "processes"
        ordering = ("-id",)
        indexes = (
            # Read by every process once a second.
            models.Index(fields=("id",), name="process_alive", condition=Q(ended_at=None)),
        )
        constraints = (
            models.CheckConstraint(
                condition=Q(kind__in=("web", "worker", "command")), name="process_kind_is_known"
            ),
        )

    def __str__(self) -> str:
        return f"{self.kind}, instance {self.instance}, pid {self.pid}"
