"""The pages of routes, prices and circuit breakers, and the one on which a provider is chosen to be
configured.
"""

from __future__ import annotations

from decimal import Decimal
from typing import TYPE_CHECKING, Any

from django.contrib import admin
from django.db.models import ForeignKey, Prefetch, QuerySet
from django.forms import BaseInlineFormSet
from django.http import HttpRequest
from django.template.response import TemplateResponse
from django.utils.html import escape
from unfold.admin import ModelAdmin, TabularInline

from providers import registry
from providers.admin_pages import GuardedAdmin, choice, once
from providers.errors import InvalidConfiguration
from providers.languages import TABLE
from providers.models import CircuitBreaker, ProviderConfig, ProviderPrice, Route, RouteStep
from providers.services.impact import without_price, without_route
from providers.services.route_order import known_regions

if TYPE_CHECKING:
    _RouteAdmin = admin.ModelAdmin[Route]
    _StepInline = admin.TabularInline[RouteStep, Route]
    _PriceAdmin = admin.ModelAdmin[ProviderPrice]
    _BreakerAdmin = admin.ModelAdmin[CircuitBreaker]
else:
    _RouteAdmin = _PriceAdmin = _BreakerAdmin = ModelAdmin
    _StepInline = TabularInline


class StepFormSet(BaseInlineFormSet):  # type: ignore[type-arg]
    """The steps of a route, one at least: without any the active provider would run all of it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        told = {"too_few_forms": "A route needs at least one provider."}
        super().__init__(*args, **{"error_messages": told, **kwargs})


class StepInline(_StepInline):
    model = RouteStep
    formset = StepFormSet
    min_num = 1

    def get_extra(self, request: HttpRequest, obj: Route | None = None, **kwargs: Any) -> int:
        return 0 if obj is None else 1

    def get_formset(self, request: HttpRequest, obj: Route | None = None, **kwargs: Any) -> Any:
        return super().get_formset(request, obj, **{"validate_min": True, **kwargs})

    def formfield_for_foreignkey(
        self, db_field: ForeignKey[Any, Any], request: HttpRequest, **kwargs: Any
    ) -> Any:
        # Naming a provider needs none of its secrets, nor the key that they were encrypted with.
        kwargs["queryset"] = ProviderConfig.objects.defer("config")
        form_field: Any = super().formfield_for_foreignkey(db_field, request, **kwargs)
        # Read once for the page, not once for every step on it.
        if not hasattr(request, "_step_choices"):
            request._step_choices = list(form_field.choices)  # type: ignore[attr-defined]
        form_field.choices = request._step_choices  # type: ignore[attr-defined]
        return form_field

    def get_queryset(self, request: HttpRequest) -> QuerySet[RouteStep]:
        return super().get_queryset(request).select_related("provider").defer("provider__config")


@admin.register(Route)
class RouteAdmin(GuardedAdmin, _RouteAdmin):
    list_display = ("__str__", "providers", "strategy", "region", "minimum_isolation", "is_active")
    inlines = (StepInline,)

    def get_form(
        self, request: HttpRequest, obj: Route | None = None, change: bool = False, **kwargs: Any
    ) -> Any:
        """With what there is to choose from, and with what follows from making it inactive."""
        form = super().get_form(request, obj, change, **kwargs)
        fields = form.base_fields
        if "language" in fields:
            languages = [known.name for known in TABLE]
            stored = (obj.language, obj.region) if obj else ("", "")
            fields["language"] = choice(fields["language"], languages, "All languages", stored[0])
            fields["region"] = choice(fields["region"], known_regions(), "Any", stored[1])
        if (
            "is_active" in fields
            and obj is not None
            and (told := once(request, "without route", lambda: without_route(obj)))
        ):
            # The theme takes a help text for HTML.
            fields["is_active"].help_text = escape(f"If deactivated: {' '.join(told)}")
        return form

    def consequences(self, row: Route) -> list[str]:
        return without_route(row)

    def get_queryset(self, request: HttpRequest) -> QuerySet[Route]:
        # Naming a provider needs none of its secrets.
        steps = RouteStep.objects.select_related("provider").defer("provider__config")
        return super().get_queryset(request).prefetch_related(Prefetch("steps", steps))

    @admin.display(description="providers (in order)")
    def providers(self, route: Route) -> str:
        return ", ".join(step.provider.provider_id for step in route.steps.all()) or "-"


@admin.register(ProviderPrice)
class PriceAdmin(GuardedAdmin, _PriceAdmin):
    list_display = ("provider_id", "a_second", "a_run", "a_gb_second", "memory")

    def get_form(
        self,
        request: HttpRequest,
        obj: ProviderPrice | None = None,
        change: bool = False,
        **kwargs: Any,
    ) -> Any:
        form = super().get_form(request, obj, change, **kwargs)
        if (field := form.base_fields.get("provider_id")) is not None:
            rows = ProviderConfig.objects.values_list("provider_id", flat=True)
            known = {*registry.all_providers(), *once(request, "configured", lambda: list(rows))}
            stored = obj.provider_id if obj else ""
            form.base_fields["provider_id"] = choice(field, known, stored=stored)
        return form

    @admin.display(description="per second", ordering="per_second")
    def a_second(self, row: ProviderPrice) -> str:
        return _amount(row.per_second)

    @admin.display(description="per run", ordering="per_run")
    def a_run(self, row: ProviderPrice) -> str:
        return _amount(row.per_run)

    @admin.display(description="per GB-second", ordering="per_gb_second")
    def a_gb_second(self, row: ProviderPrice) -> str:
        return _amount(row.per_gb_second)

    @admin.display(description="memory (GB)", ordering="memory_gb")
    def memory(self, row: ProviderPrice) -> str:
        return _amount(row.memory_gb)

    def consequences(self, row: ProviderPrice) -> list[str]:
        return without_price(row)


def _amount(number: Decimal) -> str:
    """Without the zeros that a column has behind it."""
    return f"{number.normalize():f}" if number else "-"


@admin.register(CircuitBreaker)
class BreakerAdmin(GuardedAdmin, _BreakerAdmin):
    """Only to be looked at and deleted: deleting one puts its provider back into service."""

    list_display = (
        "provider_id",
        "state",
        "failures",
        "retry_at",
        "error_code",
        "error_message",
        "latency_ms",
        "probed_at",
        "changed_at",
    )

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(
        self, request: HttpRequest, obj: CircuitBreaker | None = None
    ) -> bool:
        return False


def asked_for(request: HttpRequest) -> str:
    """The id of the configuration that is to be added. Raises InvalidConfiguration for a name that
    cannot be one.
    """
    class_id, name = request.GET.get("provider", ""), request.GET.get("name", "")
    return registry.named(class_id, name) if name else class_id


def pick_page(admin: ModelAdmin[Any], request: HttpRequest) -> TemplateResponse:
    """All classes, with what is configured of each."""
    problem = ""
    try:
        asked_for(request)
    except InvalidConfiguration as error:
        problem = error.message
    rows = {row.provider_id: row for row in admin.get_queryset(request)}
    providers = [
        (
            provider,
            rows.get(class_id),
            [row for key, row in rows.items() if key.startswith(f"{class_id}@")],
        )
        for class_id, provider in registry.all_providers().items()
    ]
    context = {
        **admin.admin_site.each_context(request),
        "opts": admin.model._meta,
        "title": "Choose a provider",
        "providers": providers,
        "problem": problem,
        "broken": registry.broken(),
    }
    return TemplateResponse(request, "admin/providers/providerconfig/pick.html", context)
