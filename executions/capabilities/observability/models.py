"""The state of the audit export."""

from __future__ import annotations

from django.db import models


class AuditExport(models.Model):
    """How far the ledger was sent to one collector: a row for each destination.

    Who holds the lease sends, and nobody else: `holder` until `held_until`. `sequence` is the last
    entry that the collector has; it only grows, by whoever still holds the lease.
    """

    destination = models.CharField(
        max_length=200, unique=True, help_text="Kind and address of the collector."
    )
    sequence = models.BigIntegerField("last entry sent", default=0)
    holder = models.CharField(max_length=64, blank=True, editable=False)
    held_until = models.DateTimeField(null=True, editable=False)
    sent_at = models.DateTimeField(null=True, help_text="Last successful delivery.")
    tries = models.PositiveIntegerField(
        "failed attempts", default=0, help_text="Failed attempts since."
    )
    retry_at = models.DateTimeField(null=True, editable=False)
    problem = models.CharField("last error", max_length=500, blank=True)

    class Meta:
        ordering = ("destination",)

    def __str__(self) -> str:
        return self.destination
