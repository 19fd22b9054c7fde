"""Counters of executions, and the state of the audit export."""

from __future__ import annotations

from django.db import models

from executions.kernel.claims import Claimable


class ExecutionCount(models.Model):
    """How many executions ended in one hour, by where and how they ended."""

    hour = models.DateTimeField()
    provider = models.CharField(max_length=64)
    status = models.CharField(max_length=16)
    error_code = models.CharField(max_length=8)
    count = models.PositiveBigIntegerField()
    cost = models.FloatField(default=0)
    faults = models.PositiveBigIntegerField(
        default=0,
        db_default=0,
        help_text="Provider failures before any tenant code ran.",
    )
    priced = models.PositiveBigIntegerField(
        default=0, db_default=0, help_text="Executions with a cost."
    )
    went_on = models.PositiveBigIntegerField(
        default=0,
        db_default=0,
        help_text="Attempts that failed over to another provider; not in count.",
    )

    class Meta:
        constraints = (
            models.UniqueConstraint(
                fields=("hour", "provider", "status", "error_code"),
                name="execution_count_once",
            ),
        )

    def __str__(self) -> str:
        return f"{self.hour:%Y-%m-%d %H} {self.provider} {self.status}"


class ExecutionLatency(models.Model):
    """How many executions of one hour took how long. `bucket` is the scale of `counters`."""

    hour = models.DateTimeField()
    provider = models.CharField(max_length=64)
    bucket = models.PositiveSmallIntegerField()
    count = models.PositiveBigIntegerField()

    class Meta:
        constraints = (
            models.UniqueConstraint(
                fields=("hour", "provider", "bucket"), name="execution_latency_once"
            ),
        )

    def __str__(self) -> str:
        return f"{self.hour:%Y-%m-%d %H} {self.provider} {self.bucket}"


class ExecutionTotal(models.Model):
    """How many there were of something since counting began, and how much of it in all.

    A row is one series of `/metrics`: few, and never more with time. `label` is the status with its
    error code of an outcome, and the upper bound in seconds of a duration's bucket.
    """

    kind = models.CharField(max_length=16)
    provider = models.CharField(max_length=64)
    label = models.CharField(max_length=32)
    count = models.PositiveBigIntegerField()
    amount = models.FloatField(default=0, help_text="Seconds for durations, cost for outcomes.")

    class Meta:
        constraints = (
            models.UniqueConstraint(
                fields=("kind", "provider", "label"), name="execution_total_once"
            ),
        )

    def __str__(self) -> str:
        return f"{self.kind} {self.provider} {self.label}"


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
