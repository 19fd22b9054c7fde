from __future__ import annotations

from django.db import models


class TenantUsage(models.Model):
    """What a tenant has used up on one day (UTC), added to as it is used.

    What is bounded per day is counted here, so that a bound costs one row to look at.
    """

    tenant_slug = models.CharField(max_length=64)
    day = models.DateField()
    stored_bytes = models.PositiveBigIntegerField(
        default=0, help_text="Queued requests, output, results and artifacts."
    )

    class Meta:
        constraints = (
            models.UniqueConstraint(
                fields=("tenant_slug", "day"), name="tenant_usage_once_per_tenant_and_day"
            ),
        )

    def __str__(self) -> str:
        return f"{self.tenant_slug} {self.day}: {self.stored_bytes} bytes"
