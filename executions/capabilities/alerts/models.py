"""Something that somebody should know, from when it was first seen until it is over."""

from __future__ import annotations

from django.db import models
from django.db.models import Q

from executions.kernel.claims import Claimable


class Alert(models.Model):
    """One rule that is not kept, of one subject. Open as long as it is; acknowledged by a person.

    `active_key` is the rule and its subject while it is open and null afterwards, so that no two
    are open of the same.
    """

    class Severity(models.TextChoices):
        CRITICAL = "critical", "Critical"
        WARNING = "warning", "Warning"

    class State(models.TextChoices):
        OPEN = "open", "Open"
        RESOLVED = "resolved", "Resolved"

    rule = models.CharField(max_length=64)
    subject = models.CharField(max_length=100, blank=True, help_text="Provider, host or tenant.")
    active_key = models.CharField(max_length=170, null=True, unique=True)  # noqa: DJ001
    severity = models.CharField(max_length=8, choices=Severity.choices)
    state = models.CharField(max_length=8, choices=State.choices, default=State.OPEN)
    message = models.TextField()
    value = models.FloatField(null=True, help_text="Last measured value.")
    threshold = models.FloatField(null=True, help_text="Limit.")
    opened_at = models.DateTimeField()
    seen_at = models.DateTimeField("last seen at", help_text="Last check that found it.")
    resolved_at = models.DateTimeField(null=True)
    acknowledged_at = models.DateTimeField(null=True)
    acknowledged_by = models.CharField(max_length=150, blank=True)

    class Meta:
        ordering = ("-opened_at", "-id")
        permissions = (("acknowledge_alert", "Can acknowledge alerts"),)
        indexes = (
            models.Index(fields=("-opened_at", "-id"), name="alert_opened"),
            models.Index(fields=("rule", "subject", "-id"), name="alert_of_rule"),
        )
        constraints = (
            models.CheckConstraint(
                condition=Q(state="open", active_key__isnull=False, resolved_at=None)
                | Q(state="resolved", active_key=None, resolved_at__isnull=False),
                name="alert_open_has_a_key_and_resolved_a_time",
            ),
            models.CheckConstraint(
                condition=Q(acknowledged_at=None, acknowledged_by="")
                | (Q(acknowledged_at__isnull=False) & ~Q(acknowledged_by="")),
                name="alert_is_acknowledged_by_somebody",
            ),
        )

    def __str__(self) -> str:
        return f"{self.rule} {self.subject}".strip()


class AlertDelivery(Claimable):
    """The latest state of an alert that is still to be told in one way."""

    alert = models.ForeignKey(Alert, on_delete=models.CASCADE, related_name="deliveries")
    way = models.CharField(max_length=8)

    class Meta:
        default_permissions = ()
        constraints = (models.UniqueConstraint(fields=("alert", "way"), name="alert_once_per_way"),)

    def __str__(self) -> str:
        return f"{self.alert} by {self.way}"
