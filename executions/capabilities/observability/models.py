"""The state of the audit export."""

from __future__ import annotations

from django.db import models

from executions.kernel.claims import Claimable


class AuditExport(Claimable):
    """How far the ledger was sent to one collector: a row for each destination.

    Who has claimed it sends, and nobody else. `sequence` is the last entry that the collector has;
    it only grows, by whoever still has the claim.
    """

    destination = models.CharField(
        max_length=200, unique=True, help_text="Kind and address of the collector."
    )
    sequence = models.BigIntegerField("last entry sent", default=0)
    sent_at = models.DateTimeField(null=True, help_text="Last successful delivery.")
    tries = models.PositiveIntegerField(
        "failed attempts", default=0, help_text="Failed attempts since."
    )
    retry_at = models.DateTimeField(null=True, editable=False)

    class Meta:
        ordering = ("destination",)

    def __str__(self) -> str:
        return self.destination
