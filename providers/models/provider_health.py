from __future__ import annotations

from django.db import models


class ProviderHealth(models.Model):
    """What the last background check of a configured provider found. One row each.

    `message` says why it is not healthy, or else who enforces what in its sandboxes.
    """

    provider_id = models.CharField("provider", max_length=64, primary_key=True)
    config_version = models.PositiveIntegerField()
    healthy = models.BooleanField()
    code = models.CharField(max_length=8, blank=True)
    message = models.CharField(max_length=500, blank=True)
    latency_ms = models.FloatField(help_text="Time to start the provider and check its health.")
    checked_at = models.DateTimeField()
    checks = models.PositiveBigIntegerField(default=0, db_default=0)
    good_checks = models.PositiveBigIntegerField(default=0, db_default=0)
    figures = models.JSONField(
        null=True, editable=False, help_text="Pool metrics as reported by the provider."
    )

    class Meta:
        verbose_name = "provider health"
        verbose_name_plural = "provider health"

    def __str__(self) -> str:
        return f"{self.provider_id}: {'healthy' if self.healthy else self.code or 'unhealthy'}"


class ProviderCheckCount(models.Model):
    """How many checks of a provider there were in one hour, and how many found it healthy."""

    provider_id = models.CharField("provider", max_length=64)
    hour = models.DateTimeField()
    checks = models.PositiveIntegerField(default=0)
    good_checks = models.PositiveIntegerField(default=0)

    class Meta:
        constraints = (
            models.UniqueConstraint(
                fields=("provider_id", "hour"), name="provider_check_count_once"
            ),
        )

    def __str__(self) -> str:
        return f"{self.provider_id} {self.hour:%Y-%m-%d %H}"
