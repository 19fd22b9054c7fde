from __future__ import annotations

from django.db import models
from django.db.models import Q
from django.utils import timezone

from executions.runs.models import Execution


class Approval(models.Model):
    """A run that a policy holds in the queue until a person approves it.

    It is bound to the hash of the code and to that of the whole request: nothing else runs by it.
    """

    class Status(models.TextChoices):
        WAITING = "waiting", "Waiting"
        APPROVED = "approved", "Approved"
        REJECTED = "rejected", "Rejected"

    execution = models.OneToOneField(Execution, on_delete=models.CASCADE, related_name="approval")
    tenant_slug = models.CharField("tenant", max_length=64)
    code_hash = models.CharField(max_length=71)
    request_hash = models.CharField(
        max_length=64, help_text="Hash of code, arguments, files and target."
    )
    findings = models.JSONField(default=list, help_text="Findings of the policy.")
    status = models.CharField(max_length=8, choices=Status.choices, default=Status.WAITING)
    asked_at = models.DateTimeField("requested at", default=timezone.now, editable=False)
    decided_at = models.DateTimeField(null=True)
    decided_by = models.CharField(max_length=200, blank=True)

    class Meta:
        ordering = ("-pk",)
        permissions = (("decide_approval", "Can approve and reject code"),)
        indexes = (models.Index(fields=("status", "-id"), name="approval_status"),)
        constraints = (
            models.CheckConstraint(
                condition=Q(status__in=("waiting", "approved", "rejected")),
                name="approval_status_is_known",
            ),
            models.CheckConstraint(
                condition=Q(status="waiting", decided_at=None, decided_by="")
                | (~Q(status="waiting") & Q(decided_at__isnull=False) & ~Q(decided_by="")),
                name="approval_decided_by_somebody",
            ),
        )

    def __str__(self) -> str:
        return f"{self.execution_id} of {self.tenant_slug}"
