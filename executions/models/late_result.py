from __future__ import annotations

from django.db import models
from django.utils import timezone

from executions.models.execution import Execution


class LateResult(models.Model):
    """What came of a run whose record had been closed before it could be written.

    The record had been closed as lost, and stays so: its receipt was given. This is beside it, and
    entered in the ledger by itself. Artifacts are named here; their bytes were not kept.
    """

    execution = models.OneToOneField(
        Execution, on_delete=models.CASCADE, related_name="late_result"
    )
    status = models.CharField(max_length=16, choices=Execution.Status.choices)
    exit_code = models.IntegerField(null=True)
    error_code = models.CharField(max_length=8, blank=True)
    error_message = models.TextField(blank=True)
    has_result = models.BooleanField(default=False)
    result = models.TextField(blank=True, help_text="JSON; empty if there is none.")
    outputs = models.TextField(
        blank=True, help_text="JSON list of MIME bundles; empty if there are none."
    )
    stdout = models.TextField(blank=True)
    stderr = models.TextField(blank=True)
    stdout_truncated = models.BooleanField(default=False)
    stderr_truncated = models.BooleanField(default=False)
    artifacts = models.JSONField(default=list, help_text="Name, type, size and hash of each.")
    cost = models.DecimalField(max_digits=14, decimal_places=8, null=True)
    finished_at = models.DateTimeField(help_text="When the code ended.")
    created_at = models.DateTimeField(default=timezone.now, editable=False)

    class Meta:
        ordering = ("pk",)

    def __str__(self) -> str:
        return f"{self.execution_id}: {self.status}"
