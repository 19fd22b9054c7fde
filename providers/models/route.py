from __future__ import annotations

from django.db import models
from django.db.models import Q

from providers import isolation
from providers.models.provider_config import ProviderConfig


class Route(models.Model):
    """Which providers may run code, and in what order; the most specific one that fits is taken.

    Without a row that fits, the active provider runs everything. `owner` is the name providers are
    told of whom an instance is for: a tenant's slug.
    """

    class Strategy(models.TextChoices):
        PRIORITY = "priority", "In order"
        CHEAPEST = "cheapest", "Cheapest first"
        LATENCY = "latency", "Fastest first"
        WEIGHTED = "weighted", "Split by weight"

    owner = models.CharField("tenant", max_length=64, blank=True, help_text="Empty: all tenants.")
    language = models.CharField(max_length=32, blank=True, help_text="Empty: all languages.")
    strategy = models.CharField(max_length=16, choices=Strategy.choices, default=Strategy.PRIORITY)
    region = models.CharField(
        max_length=64,
        blank=True,
        default="",
        db_default="",
        help_text="Providers in this region come first; the others are the fallback.",
    )
    minimum_isolation = models.CharField(
        max_length=16,
        blank=True,
        choices=isolation.CHOICES,
        help_text="Weaker sandboxes are not used on this route. The strictest of route, tenant and "
        "MINIMUM_ISOLATION applies.",
    )
    is_active = models.BooleanField("active", default=True)

    class Meta:
        ordering = ("owner", "language")
        constraints = (
            models.UniqueConstraint(
                fields=("owner", "language"),
                name="route_once_per_tenant_and_language",
                violation_error_message="There is already a route for this tenant and language.",
            ),
            models.CheckConstraint(
                condition=Q(strategy__in=("priority", "cheapest", "latency", "weighted")),
                name="route_strategy_is_known",
            ),
            models.CheckConstraint(
                condition=Q(minimum_isolation__in=("", *isolation.LEVELS)),
                name="route_minimum_isolation_is_known",
            ),
        )

    def __str__(self) -> str:
        return f"{self.owner or 'every tenant'}, {self.language or 'every language'}"


class RouteStep(models.Model):
    """A provider of a route. `weight` is its share of a split; 0 makes it a fallback only."""

    route = models.ForeignKey(Route, on_delete=models.CASCADE, related_name="steps")
    provider = models.ForeignKey(ProviderConfig, on_delete=models.CASCADE, related_name="+")
    position = models.PositiveSmallIntegerField(default=0)
    weight = models.PositiveIntegerField(default=1)

    class Meta:
        ordering = ("position", "pk")
        constraints = (
            models.UniqueConstraint(
                fields=("route", "provider"), name="route_names_a_provider_once"
            ),
        )

    def __str__(self) -> str:
        return f"{self.position}: {self.provider}"
