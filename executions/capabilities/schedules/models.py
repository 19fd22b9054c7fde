from __future__ import annotations

from typing import Any

from django.db import models, transaction
from django.db.models import Q
from django.utils.timezone import now

from executions.kernel.text import uuid7
from executions.tenants.models import ApiKey, Tenant
from providers.fields import EncryptedJSONField


class Schedule(models.Model):
    """A recurring run of a tenant: a request, and the times at which it is due.

    `next_at` is the one of these that is due next, and null exactly while it is paused.
    """

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    tenant = models.ForeignKey(Tenant, on_delete=models.CASCADE, related_name="schedules")
    # Whose power it has: that of the key which has made or changed it last.
    api_key = models.ForeignKey(ApiKey, on_delete=models.SET_NULL, null=True, related_name="+")
    api_key_prefix = models.CharField(max_length=16)
    name = models.CharField(max_length=100)
    cron = models.CharField(max_length=100, help_text="Minute, hour, day, month, day of week.")
    timezone = models.CharField(max_length=64)
    request = EncryptedJSONField(editable=False)
    language = models.CharField(max_length=32)
    code_hash = models.CharField(max_length=71)
    paused_because = models.CharField(
        "pause reason", max_length=200, blank=True, default="", db_default=""
    )
    next_at = models.DateTimeField("next run", null=True)
    last_at = models.DateTimeField("last run", null=True)
    last_problem = models.CharField(
        "last error",
        max_length=300,
        blank=True,
        default="",
        db_default="",
        help_text="Why a run was skipped.",
    )
    created_at = models.DateTimeField(default=now, editable=False)

    class Meta:
        ordering = ("-id",)
        permissions = (("pause_schedule", "Can pause schedules"),)
        indexes = (
            models.Index(
                fields=("next_at",), name="schedule_due", condition=Q(next_at__isnull=False)
            ),
        )
        constraints = (
            models.CheckConstraint(
                condition=Q(paused_because="", next_at__isnull=False)
                | (~Q(paused_because="") & Q(next_at=None)),
                name="schedule_is_due_or_paused",
            ),
        )

    def __str__(self) -> str:
        return str(self.pk)

    def save(self, *args: Any, **kwargs: Any) -> None:
        """In one transaction with what is entered in the ledger."""
        with transaction.atomic(savepoint=False):
            super().save(*args, **kwargs)
