"""Routes, prices and the state of the breakers, in plain pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django.contrib import admin
from django.http import HttpRequest

from providers.models import CircuitBreaker, ProviderPrice, Route, RouteStep

if TYPE_CHECKING:
    _RouteAdmin = admin.ModelAdmin[Route]
    _StepInline = admin.TabularInline[RouteStep, Route]
    _PriceAdmin = admin.ModelAdmin[ProviderPrice]
    _BreakerAdmin = admin.ModelAdmin[CircuitBreaker]
else:
    _RouteAdmin = _PriceAdmin = _BreakerAdmin = admin.ModelAdmin
    _StepInline = admin.TabularInline


class StepInline(_StepInline):
    model = RouteStep
    extra = 1


@admin.register(Route)
class RouteAdmin(_RouteAdmin):
    list_display = ("__str__", "strategy", "is_active")
    inlines = (StepInline,)


@admin.register(ProviderPrice)
class PriceAdmin(_PriceAdmin):
    list_display = ("provider_id", "per_second")


@admin.register(CircuitBreaker)
class BreakerAdmin(_BreakerAdmin):
    """Only to be looked at and deleted: deleting one puts its provider back into service."""

    list_display = (
        "provider_id",
        "state",
        "failures",
        "retry_at",
        "error_code",
        "error_message",
        "latency_ms",
        "changed_at",
    )

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(
        self, request: HttpRequest, obj: CircuitBreaker | None = None
    ) -> bool:
        return False
