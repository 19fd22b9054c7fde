from __future__ import annotations

from typing import Any

from django.core.validators import MaxValueValidator
from django.db import models, transaction
from django.db.models import Q
from django.utils import timezone

from providers import isolation

_DAYS = "Days; 0 keeps for ever, empty is as the installation has it. Hashes are always kept."
_CUT = "What is beyond it is left out, and named in the answer."
_BOUND = "Beyond it requests are refused with SB008. Empty is as the installation has it."


def _bound(label: str, help_text: str, most: int) -> models.PositiveIntegerField[Any, Any]:
    return models.PositiveIntegerField(
        label,
        null=True,
        blank=True,
        validators=[MaxValueValidator(most)],
        help_text=f"{help_text} {_BOUND}",
    )


def _limit(label: str, help_text: str, most: int) -> models.PositiveIntegerField[Any, Any]:
    """How much of what a run leaves or says is kept."""
    return models.PositiveIntegerField(
        label,
        null=True,
        blank=True,
        validators=[MaxValueValidator(most)],
        help_text=f"{help_text} {_CUT} Empty is as the installation has it.",
    )


class Tenant(models.Model):
    """Whoever owns API keys and executions. The slug is what records and commands call it by."""

    slug = models.SlugField(max_length=64, unique=True)
    name = models.CharField(max_length=200)
    created_at = models.DateTimeField(default=timezone.now, editable=False)
    is_active = models.BooleanField(
        default=True, help_text="The keys of an inactive tenant are refused."
    )
    removal_began_at = models.DateTimeField(
        "being removed since",
        null=True,
        blank=True,
        editable=False,
        help_text="Its rows go a few at a time, and it goes with the last of them.",
    )

    max_running = _bound("most running", "Executions at once, however they came; 0: none.", 10_000)
    max_queued = _bound("most queued", "Executions waiting for a worker.", 100_000)
    max_stored_mib = _bound(
        "most stored per day",
        "MiB in a day (UTC): queued requests, output, results and artifacts.",
        100 * 1024 * 1024,
    )
    max_requests_per_minute = _bound(
        "most requests per minute", "API requests with its keys, whatever they ask.", 10_000_000
    )
    max_executions_per_day = _bound(
        "most executions per day", "In a day (UTC), however they came.", 1_000_000_000
    )
    max_seconds_per_day = _bound(
        "most seconds per day",
        "Seconds that its executions run in a day (UTC). Each reserves its timeout until it ends.",
        1_000_000_000,
    )
    max_sessions = _bound(
        "most sessions",
        "Open at once; the one that was unused for longest makes room for another.",
        10_000,
    )
    max_schedules = _bound("most schedules", "Those that are paused, too.", 10_000)
    max_storage_mib = _bound("most storage", "MiB of saved files of its sessions.", 2**30)

    # Together they stay below what an answer of the pool service may have (`wire.REQUEST_LIMIT`).
    max_output_kb = _limit("output of a run", "kB of stdout, and of stderr.", 10_000)
    max_outputs = _limit("rich outputs of a run", "Values that are shown.", 200)
    max_outputs_mib = _limit("size of rich outputs", "MiB of all of a run.", 32)
    max_artifacts = _limit("artifacts of a run", "Files that it leaves in artifacts/.", 200)
    max_artifact_mib = _limit("size of an artifact", "MiB of each.", 64)
    max_artifacts_mib = _limit("size of artifacts", "MiB of all of a run.", 64)

    keep_code_days = models.PositiveSmallIntegerField(
        "keep code",
        null=True,
        blank=True,
        help_text=f"{_DAYS} Code, arguments, and for whom it was run.",
    )
    keep_output_days = models.PositiveSmallIntegerField(
        "keep output", null=True, blank=True, help_text=f"{_DAYS} Output and results."
    )
    keep_artifacts_days = models.PositiveSmallIntegerField(
        "keep artifacts", null=True, blank=True, help_text=f"{_DAYS} Files left behind."
    )
    keep_records_days = models.PositiveSmallIntegerField(
        "keep records",
        null=True,
        blank=True,
        help_text="Days until all of an execution goes but its ledger entry, and never fewer than "
        "SANDBOX_RECORDS_FLOOR_DAYS; 0 keeps for ever, empty is as the installation has it.",
    )

    minimum_isolation = models.CharField(
        max_length=16,
        blank=True,
        choices=isolation.CHOICES,
        help_text="Nothing of this tenant's runs in a sandbox isolated less. The strictest of "
        "tenant, route and MINIMUM_ISOLATION holds.",
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
