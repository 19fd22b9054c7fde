from __future__ import annotations

from decimal import Decimal

from django.core.exceptions import ValidationError
from django.db import models
from django.db.models import Q

from providers import registry
from providers.errors import InvalidConfiguration


class ProviderPrice(models.Model):
    """What a run costs at a provider: each one, each second of it, and each second for each GB of
    its sandbox's memory. One without a price has that of the first configuration of its class;
    where that has none either, it costs nothing.
    """

    provider_id = models.CharField("provider", max_length=64, unique=True)
    per_second = models.DecimalField(
        max_digits=12,
        decimal_places=8,
        help_text="From the start of the sandbox. All prices and budgets use one currency.",
    )
    per_run = models.DecimalField(
        max_digits=12,
        decimal_places=8,
        blank=True,
        default=0,
        db_default=0,
        help_text="Added to every run.",
    )
    per_gb_second = models.DecimalField(
        "per GB-second",
        max_digits=12,
        decimal_places=8,
        blank=True,
        default=0,
        db_default=0,
        help_text="For services that bill by memory.",
    )
    memory_gb = models.DecimalField(
        "memory (GB)",
        max_digits=8,
        decimal_places=3,
        blank=True,
        default=0,
        db_default=0,
        help_text="Memory of one sandbox as billed.",
    )

    class Meta:
        verbose_name = "price"
        ordering = ("provider_id",)
        constraints = (
            models.CheckConstraint(condition=Q(per_second__gte=0), name="price_is_not_negative"),
            models.CheckConstraint(
                condition=Q(per_run__gte=0, per_gb_second__gte=0, memory_gb__gte=0),
                name="price_of_run_and_memory_is_not_negative",
            ),
        )

    def __str__(self) -> str:
        return f"{self.provider_id}: {self.per_second}"

    def clean(self) -> None:
        """Raises ValidationError for a provider that there is not: nothing would cost its price."""
        try:
            registry.get(self.provider_id)
        except InvalidConfiguration as error:
            raise ValidationError({"provider_id": error.message}) from None
        for name in ("per_run", "per_gb_second", "memory_gb"):
            if getattr(self, name) is None:
                setattr(self, name, Decimal(0))

    @property
    def of_second(self) -> Decimal:
        """What a second costs, memory included."""
        return self.per_second + self.per_gb_second * self.memory_gb
