"""Routes, prices and the state of the breakers, in plain pages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.contrib import admin
from django.db.models import ForeignKey, QuerySet
from django.http import HttpRequest

from providers.models import CircuitBreaker, ProviderConfig, ProviderPrice, Route, RouteStep

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

    def formfield_for_foreignkey(
        self, db_field: ForeignKey[Any, Any], request: HttpRequest, **kwargs: Any
    ) -> Any:
        # Naming a provider needs none of its secrets, nor the key that they were encrypted with.
        kwargs["queryset"] = ProviderConfig.objects.defer("config")
        return super().formfield_for_foreignkey(db_field, request, **kwargs)

    def get_queryset(self, request: HttpRequest) -> QuerySet[RouteStep]:
        return super().get_queryset(request).select_related("provider").defer("provider__config")


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
