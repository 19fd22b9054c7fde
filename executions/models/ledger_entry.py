from __future__ import annotations

import json
from typing import Any

from django.db import models


class LedgerEntry(models.Model):
    """One link of the ledger: a signed statement that names its place and the link before it.

    `statement` is the canonical JSON text that was signed, and the only thing that counts. The
    other columns repeat parts of it for looking entries up; `verify_ledger` compares them. Rows
    are only ever added, by `executions.services.ledger`.
    """

    sequence = models.BigIntegerField(primary_key=True)
    kind = models.CharField(max_length=32)
    # No foreign key: the entry outlives the row, and its absence must show.
    execution_id = models.UUIDField(null=True, unique=True)
    bound_row = models.CharField(  # noqa: DJ001
        max_length=100,
        null=True,
        editable=False,
        help_text="Row of the statement, as `model key`. Empty if the entry is about no row; null "
        "for an execution.",
    )
    # Before the statement: SQLite reads a row to the last column that is asked for.
    subject = models.CharField(
        max_length=200,
        editable=False,
        help_text="Subject of the statement, cut to 200 characters; of an execution its tenant.",
    )
    at = models.DateTimeField()
    statement = models.TextField()
    digest = models.CharField(max_length=64, help_text="SHA-256 of the statement.")
    key_id = models.CharField(max_length=16)
    signature = models.CharField(max_length=88, help_text="Ed25519, base64.")

    class Meta:
        verbose_name = "ledger entry"
        verbose_name_plural = "ledger entries"
        ordering = ("-sequence",)
        indexes = [
            models.Index(fields=("kind", "sequence"), name="ledger_kind"),
            models.Index(fields=("kind", "subject", "sequence"), name="ledger_subject"),
            models.Index(
                fields=("bound_row", "sequence"),
                condition=models.Q(bound_row__isnull=False),
                name="ledger_bound_row",
            ),
        ]
        constraints = [
            models.CheckConstraint(
                condition=models.Q(sequence__gte=1), name="ledger_starts_at_one"
            ),
            models.CheckConstraint(
                condition=models.Q(kind="execution", execution_id__isnull=False)
                | (~models.Q(kind="execution") & models.Q(execution_id=None)),
                name="ledger_execution_has_its_id",
            ),
        ]

    def __str__(self) -> str:
        return f"{self.sequence} {self.kind}"

    @property
    def stated(self) -> dict[str, Any]:
        """The statement, read."""
        stated: dict[str, Any] = json.loads(self.statement)
        return stated

    @property
    def receipt(self) -> dict[str, Any]:
        """The statement with its signature: all that is needed to check it elsewhere."""
        return {**self.stated, "signature": self.signature}
