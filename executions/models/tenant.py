from __future__ import annotations

from typing import Any

from django.core.validators import MaxValueValidator
from django.db import models, transaction
from django.db.models import Q
from django.utils import timezone

from providers import isolation


def _bound(label: str, help_text: str, most: int) -> models.PositiveIntegerField[Any, Any]:
    return models.PositiveIntegerField(
        label,
        null=True,
        blank=True,
        validators=[MaxValueValidator(most)],
        help_text=help_text,
    )


def _limit(label: str, help_text: str, most: int) -> models.PositiveIntegerField[Any, Any]:
    """How much of what a run leaves or says is kept."""
    return models.PositiveIntegerField(
        label,
        null=True,
        blank=True,
        validators=[MaxValueValidator(most)],
        help_text=help_text,
    )


class Tenant(models.Model):
    """The owner of API keys and executions. Records and commands name it by its slug."""

    slug = models.SlugField(max_length=64, unique=True)
    name = models.CharField(max_length=200)
    created_at = models.DateTimeField(default=timezone.now, editable=False)
    is_active = models.BooleanField(
        "active", default=True, help_text="API keys of an inactive tenant are rejected."
    )
    removal_began_at = models.DateTimeField(
        "removal started",
        null=True,
        blank=True,
        editable=False,
        help_text="Rows are deleted in batches; the tenant row is deleted last.",
    )

    max_running = _bound("max concurrent executions", "0 blocks all executions.", 10_000)
    max_queued = _bound("max queued executions", "Executions that wait for a worker.", 100_000)
    max_stored_mib = _bound(
        "max stored per day (MiB)",
        "Queued requests, output, results and artifacts. The day is UTC.",
        100 * 1024 * 1024,
    )
    max_requests_per_minute = _bound(
        "max requests per minute", "All API requests with the tenant's keys.", 10_000_000
    )
    max_executions_per_day = _bound("max executions per day", "The day is UTC.", 1_000_000_000)
    max_seconds_per_day = _bound(
        "max execution time per day (seconds)",
        "A running execution counts with its full timeout. The day is UTC.",
        1_000_000_000,
    )
    max_sessions = _bound(
        "max open sessions",
        "A new session beyond this closes the one that was idle longest.",
        10_000,
    )
    max_schedules = _bound("max schedules", "Paused schedules count too.", 10_000)
    max_storage_mib = _bound("storage limit (MiB)", "Saved files of sessions and snapshots.", 2**30)

    # Together they stay below what an answer of the pool service may have (`wire.REQUEST_LIMIT`).
    max_output_kb = _limit("max output (kB)", "Each for stdout and stderr.", 10_000)
    max_outputs = _limit("max rich outputs", "Number per run.", 200)
    max_outputs_mib = _limit("max rich output size (MiB)", "Total per run.", 32)
    max_artifacts = _limit("max artifacts", "Files in artifacts/, per run.", 200)
    max_artifact_mib = _limit("max artifact size (MiB)", "Per file.", 64)
    max_artifacts_mib = _limit("max total artifact size (MiB)", "Total per run.", 64)

    keep_code_days = models.PositiveSmallIntegerField(
        "code retention (days)",
        null=True,
        blank=True,
        help_text="Code, arguments and the on-behalf-of subject.",
    )
    keep_output_days = models.PositiveSmallIntegerField(
        "output retention (days)", null=True, blank=True, help_text="Output and results."
    )
    keep_artifacts_days = models.PositiveSmallIntegerField(
        "artifact retention (days)", null=True, blank=True, help_text="Artifact files."
    )
    keep_records_days = models.PositiveSmallIntegerField(
        "record retention (days)",
        null=True,
        blank=True,
        help_text="The whole record; its ledger entry stays. "
        "At least SANDBOX_MIN_RECORD_RETENTION_DAYS.",
    )

    minimum_isolation = models.CharField(
        max_length=16,
        blank=True,
        choices=isolation.CHOICES,
        help_text="Weaker sandboxes are not used for this tenant. The strictest of tenant, route "
        "and MINIMUM_ISOLATION applies.",
    )

    class Meta:
        ordering = ("slug",)
        constraints = (
            models.CheckConstraint(
                condition=Q(minimum_isolation__in=("", *isolation.LEVELS)),
                name="tenant_minimum_isolation_is_known",
            ),
            models.CheckConstraint(
                condition=Q(removal_began_at=None) | Q(is_active=False),
                name="tenant_that_goes_is_inactive",
            ),
        )

    def __str__(self) -> str:
        return self.slug

    def save(self, *args: Any, **kwargs: Any) -> None:
        """In one transaction with what is entered in the ledger."""
        with transaction.atomic(savepoint=False):
            super().save(*args, **kwargs)
