"""Something that somebody should know, from when it was first seen until it is over."""

from __future__ import annotations

from django.db import models
from django.db.models import Q


class Alert(models.Model):
    """One rule that is not kept, of one subject. Open as long as it is; acknowledged by a person.

    `active_key` is the rule and its subject while it is open and null afterwards, so that no two
    are open of the same. Who mails or posts it has claimed that before, so that of several
    processes one does.
    """

    class Severity(models.TextChoices):
        CRITICAL = "critical", "Critical"
        WARNING = "warning", "Warning"

    class State(models.TextChoices):
        OPEN = "open", "Open"
        RESOLVED = "resolved", "Resolved"

    rule = models.CharField(max_length=64)
    subject = models.CharField(
        max_length=100, blank=True, help_text="The provider, host or tenant that it is about."
    )
    active_key = models.CharField(max_length=170, null=True, unique=True)  # noqa: DJ001
    severity = models.CharField(max_length=8, choices=Severity.choices)
    state = models.CharField(max_length=8, choices=State.choices, default=State.OPEN)
    message = models.TextField()
    value = models.FloatField(null=True, help_text="What was measured last.")
    threshold = models.FloatField(null=True, help_text="What it is compared with.")
    opened_at = models.DateTimeField()
    seen_at = models.DateTimeField(help_text="When it was found to hold last.")
    resolved_at = models.DateTimeField(null=True)
    acknowledged_at = models.DateTimeField(null=True)
    acknowledged_by = models.CharField(max_length=150, blank=True)
    mailed = models.CharField(
        max_length=8, blank=True, editable=False, help_text="The state that was mailed last."
    )
    posted = models.CharField(
        max_length=8, blank=True, editable=False, help_text="And the one that was posted last."
    )
    claimed_until = models.DateTimeField(
        null=True, editable=False, help_text="Until then somebody posts it."
    )
    tries = models.PositiveIntegerField(
        default=0, editable=False, help_text="Of posting the state, without success."
    )
    problem = models.CharField(
        max_length=500, blank=True, help_text="Why it could not be posted last."
    )
    mail_claimed_until = models.DateTimeField(
        null=True, editable=False, help_text="Until then somebody mails it."
    )
    mail_tries = models.PositiveIntegerField(
        default=0, db_default=0, editable=False, help_text="Of mailing the state, without success."
    )
    mail_problem = models.CharField(
        max_length=500,
        blank=True,
        default="",
        db_default="",
        help_text="Why it could not be mailed last.",
    )

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
