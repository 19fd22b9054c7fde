from __future__ import annotations

from decimal import Decimal

from django.core.exceptions import ValidationError
from django.db import models
from django.db.models import Q

from executions.tenants.models import Tenant


class Spending(models.Model):
    """What a tenant's executions of one day (UTC) are estimated to have cost."""

    tenant_slug = models.CharField(max_length=64)
    day = models.DateField()
    amount = models.DecimalField(max_digits=18, decimal_places=8, default=0)
    executions = models.PositiveIntegerField(default=0)

    class Meta:
        verbose_name_plural = "spending"
        ordering = ("-day", "tenant_slug")
        constraints = (
            models.UniqueConstraint(
                fields=("tenant_slug", "day"), name="spending_once_per_tenant_and_day"
            ),
        )
        indexes = (models.Index(fields=("day",), name="spending_day"),)

    def __str__(self) -> str:
        return f"{self.tenant_slug} {self.day}: {self.amount}"


class Budget(models.Model):
    """The most that may be spent in a day or a calendar month (UTC), by one tenant or by all.

    At `warn_percent` there is an alert; at `limit` nothing more is run (SB008). What is already
    running then is finished, so the last executions may go beyond it.
    """

    class Period(models.TextChoices):
        DAY = "day", "Day"
        MONTH = "month", "Month"

    tenant_slug = models.CharField(
        "tenant", max_length=64, blank=True, help_text="Empty: all tenants together."
    )
    period = models.CharField(max_length=8, choices=Period.choices, default=Period.MONTH)
    limit = models.DecimalField(max_digits=14, decimal_places=4)
    warn_percent = models.PositiveSmallIntegerField("warn at (%)", default=80)

    class Meta:
        ordering = ("tenant_slug", "period")
        constraints = (
            models.UniqueConstraint(
                fields=("tenant_slug", "period"), name="budget_once_per_tenant_and_period"
            ),
            models.CheckConstraint(condition=Q(limit__gte=0), name="budget_is_not_negative"),
        )

    def __str__(self) -> str:
        limit = f"{Decimal(self.limit).normalize():f}"
        return f"{self.tenant_slug or 'all tenants'}: {limit} a {self.period}"

    def clean(self) -> None:
        """Raises ValidationError for a tenant that there is not: its budget would stop nobody."""
        if self.tenant_slug and not Tenant.objects.filter(slug=self.tenant_slug).exists():
            raise ValidationError({"tenant_slug": "Must be the slug of a tenant, or empty."})


class SpendingAlert(models.Model):
    """Something about spending that somebody should know, told once a day; of a tenant's budgets of
    a day and of a month each."""

    class Kind(models.TextChoices):
        WARNING = "warning", "Budget nearly used up"
        STOP = "stop", "Budget used up"
        SPIKE = "spike", "Spending spike"

    kind = models.CharField(max_length=8, choices=Kind.choices)
    tenant_slug = models.CharField("tenant", max_length=64, blank=True)
    # Empty for what is of no budget.
    period = models.CharField(
        max_length=8, choices=Budget.Period.choices, blank=True, default="", db_default=""
    )
    day = models.DateField()
    message = models.TextField()
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ("-created_at",)
        constraints = (
            models.UniqueConstraint(
                fields=("kind", "tenant_slug", "period", "day"), name="alert_once_a_day"
            ),
        )

    def __str__(self) -> str:
        return self.message
