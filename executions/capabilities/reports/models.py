"""An auditor's report: what was asked for, how far it is, and the hashes of its two files."""

from __future__ import annotations

from django.db import models
from django.db.models import Q
from django.utils import timezone

from executions.kernel.claims import Claimable
from executions.kernel.text import uuid7


class Report(Claimable):
    """One report that somebody asked for. `capabilities.reports` makes it.

    Whoever makes it has claimed it, and says so again; a report whose maker is silent is begun
    anew. What is in the files is proven by their signatures, and their hashes are an entry of the
    ledger.
    """

    class State(models.TextChoices):
        WAITING = "waiting", "Queued"
        MAKING = "making", "Generating"
        READY = "ready", "Ready"
        FAILED = "failed", "Failed"

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    tenant_slug = models.CharField(
        "tenant", max_length=64, blank=True, help_text="Empty: all tenants."
    )
    since = models.DateTimeField(
        "since (inclusive)", null=True, blank=True, help_text="Runs created at or after this time."
    )
    until = models.DateTimeField(
        "until (exclusive)", null=True, blank=True, help_text="Runs created before this time."
    )
    ids = models.JSONField(
        "executions",
        default=list,
        blank=True,
        help_text="Execution ids. Empty: all in the time range.",
    )
    with_code = models.BooleanField(
        "include code", default=False, help_text="Otherwise only the hash of the code is included."
    )
    made_by = models.CharField("created by", max_length=200, editable=False)
    state = models.CharField(max_length=8, choices=State.choices, default=State.WAITING)
    created_at = models.DateTimeField(default=timezone.now, editable=False)
    started_at = models.DateTimeField(null=True, editable=False)
    finished_at = models.DateTimeField(null=True, editable=False)
    progress = models.CharField(max_length=200, blank=True, editable=False)
    runs = models.PositiveIntegerField(default=0, editable=False)
    truncated = models.BooleanField(default=False, editable=False)
    findings = models.PositiveIntegerField(null=True, editable=False)
    ledger_sequence = models.BigIntegerField(null=True, editable=False)
    json_hash = models.CharField("JSON hash", max_length=71, blank=True, editable=False)
    pdf_hash = models.CharField("PDF hash", max_length=71, blank=True, editable=False)
    files_removed_at = models.DateTimeField(null=True, editable=False)

    class Meta:
        ordering = ("-id",)
        default_permissions = ("view",)
        permissions = (("make_report", "Can make and download audit reports"),)
        indexes = (
            models.Index(
                fields=("id",),
                name="report_to_make",
                condition=Q(state__in=("waiting", "making")),
            ),
        )
        constraints = (
            models.CheckConstraint(
                condition=Q(state__in=("waiting", "making", "ready", "failed")),
                name="report_state_is_known",
            ),
            models.CheckConstraint(
                condition=~Q(state="ready") | (~Q(json_hash="") & ~Q(pdf_hash="")),
                name="report_ready_has_its_hashes",
            ),
        )

    def __str__(self) -> str:
        return str(self.pk)
