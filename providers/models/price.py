from __future__ import annotations

from django.db import models
from django.db.models import Q


class ProviderPrice(models.Model):
    """What a second of a provider's sandbox costs. One without a price costs nothing."""

    provider_id = models.CharField("provider", max_length=64, unique=True)
    per_second = models.DecimalField(
        max_digits=12,
        decimal_places=8,
        help_text="In the currency of all prices and budgets, from the start of a sandbox on.",
    )

    class Meta:
        verbose_name = "price"
        ordering = ("provider_id",)
        constraints = (
            models.CheckConstraint(condition=Q(per_second__gte=0), name="price_is_not_negative"),
        )

    def __str__(self) -> str:
        return f"{self.provider_id}: {self.per_second}"
