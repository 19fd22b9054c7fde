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
    latency_ms = models.FloatField(help_text="Starting the provider and asking it how it is.")
    checked_at = models.DateTimeField()

    class Meta:
        verbose_name = "provider health"
        verbose_name_plural = "provider health"

    def __str__(self) -> str:
        return f"{self.provider_id}: {'healthy' if self.healthy else self.code or 'unhealthy'}"
