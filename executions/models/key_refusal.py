from __future__ import annotations

from django.db import models


class KeyRefusal(models.Model):
    """When a refusal of a key, for one reason, was entered in the ledger last.

    A row for each key and reason, so that however often a key is refused, and by however many
    processes, the ledger grows by a bounded number of entries.
    """

    subject = models.CharField(
        max_length=32, help_text="Number of the key; all unknown keys share one."
    )
    reason = models.CharField(max_length=32)
    entered_at = models.DateTimeField()

    class Meta:
        constraints = (
            models.UniqueConstraint(fields=("subject", "reason"), name="key_refusal_once"),
        )

    def __str__(self) -> str:
        return f"{self.subject}: {self.reason}"
