from __future__ import annotations

from typing import Any

from django.db import models, transaction
from django.db.models import Q
from django.utils import timezone

from executions.kernel.claims import Claimable
from executions.kernel.text import uuid7
from executions.runs.models import Execution
from executions.tenants.models import Tenant
from providers.fields import EncryptedTextField


class WebhookSecret(models.Model):
    """What a tenant's webhooks are signed with: `whsec_` and base64, as Standard Webhooks has it.

    With several in force each signs, so that receivers can go from one to the next.
    """

    tenant = models.ForeignKey(Tenant, on_delete=models.CASCADE, related_name="webhook_secrets")
    secret = EncryptedTextField(editable=False)
    created_at = models.DateTimeField(default=timezone.now, editable=False)
    retired_at = models.DateTimeField(null=True, blank=True, editable=False)

    class Meta:
        ordering = ("tenant", "pk")

    def __str__(self) -> str:
        return f"webhook secret {self.pk}"

    def save(self, *args: Any, **kwargs: Any) -> None:
        """In one transaction with what is entered in the ledger."""
        with transaction.atomic(savepoint=False):
            super().save(*args, **kwargs)


class WebhookDelivery(Claimable):
    """That an execution has ended, to be told to the URL that its request named.

    The row is there from the request on. It becomes due in the transaction that ends the execution,
    so that nothing ends untold, and stays until it is old. That it waits for an approval is told
    first, by the same row, which then waits for the end.
    """

    class Event(models.TextChoices):
        FINISHED = "execution.finished", "Execution finished"
        WAITING_FOR_APPROVAL = "execution.waiting_for_approval", "Waiting for approval"

    class State(models.TextChoices):
        WAITING = "waiting", "Waiting for the execution"
        DUE = "due", "Pending"
        DELIVERED = "delivered", "Delivered"
        FAILED = "failed", "Failed"

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    tenant = models.ForeignKey(Tenant, on_delete=models.CASCADE, related_name="+")
    tenant_slug = models.CharField(max_length=64)
    execution = models.OneToOneField(Execution, on_delete=models.CASCADE, related_name="delivery")
    url = EncryptedTextField(editable=False)
    receiver = models.CharField(
        max_length=300, help_text="Scheme, host and port of the URL; the path may be secret."
    )
    event = models.CharField(
        max_length=32, choices=Event.choices, default=Event.FINISHED, db_default=Event.FINISHED
    )
    state = models.CharField(max_length=16, choices=State.choices, default=State.WAITING)
    last_status = models.PositiveSmallIntegerField(
        null=True, help_text="HTTP status of the last response; the body is not stored."
    )
    claimed_until = models.DateTimeField("next attempt at", null=True)
    give_up_at = models.DateTimeField("last attempt at the latest", null=True)
    created_at = models.DateTimeField(default=timezone.now, editable=False)
    ended_at = models.DateTimeField(null=True)

    class Meta:
        ordering = ("-id",)
        verbose_name_plural = "webhook deliveries"
        permissions = (("resend_webhookdelivery", "Can send webhooks again"),)
        indexes = [
            # From one tenant with something due to the next, and of each the first.
            models.Index(
                fields=("tenant_slug", "claimed_until"),
                name="webhook_due",
                condition=Q(state="due"),
            ),
            models.Index(
                fields=("execution",), name="webhook_waiting", condition=Q(state="waiting")
            ),
            models.Index(
                fields=("ended_at",), name="webhook_ended", condition=Q(ended_at__isnull=False)
            ),
        ]
        constraints = [
            models.CheckConstraint(
                condition=Q(state="due", claimed_until__isnull=False, give_up_at__isnull=False)
                | Q(~Q(state="due"), claimed_until=None),
                name="webhook_due_has_a_time",
            ),
            models.CheckConstraint(
                condition=Q(state__in=("waiting", "due"), ended_at=None)
                | Q(state__in=("delivered", "failed"), ended_at__isnull=False),
                name="webhook_ended_exactly_when_over",
            ),
            models.CheckConstraint(
                condition=Q(event="execution.finished")
                | Q(event="execution.waiting_for_approval", state="due"),
                name="webhook_event_is_known",
            ),
        ]

    def __str__(self) -> str:
        return str(self.pk)
