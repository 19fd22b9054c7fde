"""A verification of the whole ledger that somebody asked for in the admin."""

from __future__ import annotations

from django.db import models
from django.db.models import Q


class LedgerCheck(models.Model):
    """One reading of the ledger: asked for, then read by a worker, then known to be intact or not.

    `active_key` is ONE until it is over and null afterwards, so that of two presses of the button,
    on whatever hosts, one counts. `process_id` is the lease of the process that reads.
    """

    class State(models.TextChoices):
        WAITING = "waiting", "Queued"
        RUNNING = "running", "Running"
        INTACT = "intact", "Verified: no problems found"
        NOT_INTACT = "not_intact", "Problems found"
        FAILED = "failed", "Aborted"

    ONE = "one"

    active_key = models.CharField(max_length=8, null=True, unique=True)  # noqa: DJ001
    state = models.CharField(max_length=12, choices=State.choices, default=State.WAITING)
    asked_by = models.CharField("requested by", max_length=150)
    asked_at = models.DateTimeField("requested at")
    process_id = models.UUIDField(null=True, editable=False)
    started_at = models.DateTimeField(null=True)
    finished_at = models.DateTimeField(null=True)
    total = models.PositiveBigIntegerField(default=0, help_text="Entries at the start.")
    entries = models.PositiveBigIntegerField("entries checked", default=0)
    executions = models.PositiveBigIntegerField(default=0)
    rows = models.PositiveBigIntegerField("other rows", default=0)
    unproven = models.PositiveBigIntegerField("rows without an entry", default=0)
    checkpoints = models.PositiveBigIntegerField(default=0)
    findings = models.PositiveBigIntegerField(default=0)
    first_findings = models.JSONField(default=list, help_text="The first findings.")
    problem = models.CharField(
        "error", max_length=500, blank=True, help_text="Why the verification was aborted."
    )

    class Meta:
        verbose_name = "verification"
        ordering = ("-id",)
        default_permissions = ("view",)
        permissions = (("request_ledgercheck", "Can run ledger verification"),)
        constraints = (
            models.CheckConstraint(
                condition=Q(
                    state__in=("waiting", "running"),
                    active_key="one",
                    active_key__isnull=False,
                    finished_at=None,
                )
                | Q(
                    state__in=("intact", "not_intact", "failed"),
                    active_key=None,
                    finished_at__isnull=False,
                ),
                name="ledger_check_is_open_or_over",
            ),
        )

    def __str__(self) -> str:
        return f"Verification {self.pk}"

    @property
    def is_open(self) -> bool:
        return self.state in (self.State.WAITING, self.State.RUNNING)
