"""What follows when a provider, a route or a price goes, in sentences for who decides."""

from __future__ import annotations

from django.db.models import Prefetch, QuerySet

from providers.models import ProviderConfig, ProviderPrice, Route, RouteStep
from providers.registry import class_id
from providers.services.route_order import takes


def without_provider(row: ProviderConfig) -> list[str]:
    """Once its configuration is removed."""
    told = []
    if row.is_active:
        told.append(
            "This is the active provider. Runs without a route are rejected until another provider "
            "is activated."
        )
    active = "" if row.is_active else _active()
    for route in _routes().filter(steps__provider=row).distinct():
        others = [name for name in _names(route) if name != row.provider_id]
        told.append(f"Runs of route {route}: {_goes_on(others, active)}.")
    return told


def without_route(route: Route) -> list[str]:
    """Once it is removed or not active any more. Nothing for one that is not active now."""
    if route.pk is None or not route.is_active:
        return []
    told = [f"Runs of route {route}: {_instead(route)}."]
    if route.minimum_isolation:
        told.append(f"Its minimum isolation, {route.minimum_isolation}, no longer applies.")
    return told


def without_price(row: ProviderPrice) -> list[str]:
    """Once it is removed."""
    told = [f"Runs on {row.provider_id} will be {_price_without(row)}."]
    if names := _others_at_price(row):
        told.append(f"The same applies to configurations without a price: {', '.join(names)}.")
    return told


def _price_without(row: ProviderPrice) -> str:
    first = class_id(row.provider_id)
    others = ProviderPrice.objects.exclude(pk=row.pk).filter(provider_id=first)
    return f"priced as {first}" if others.exists() else "unpriced, and not limited by budgets"


def _others_at_price(row: ProviderPrice) -> list[str]:
    """The configurations that have this price because they have none of their own."""
    if class_id(row.provider_id) != row.provider_id:
        return []
    of_class = ProviderConfig.objects.filter(provider_id__startswith=f"{row.provider_id}@")
    priced = ProviderPrice.objects.values("provider_id")
    unpriced = of_class.exclude(provider_id__in=priced).order_by("provider_id")
    return list(unpriced.values_list("provider_id", flat=True))


def _instead(route: Route) -> str:
    """What takes over most of what this route takes."""
    others = [
        other
        for other in _routes().exclude(pk=route.pk)
        if takes(other, route.owner, route.language)
    ]
    if not others:
        return _goes_on([], _active())
    best = max(others, key=lambda other: (bool(other.owner), bool(other.language)))
    return f"use route {best} and {_goes_on(_names(best), _active())}"


def _goes_on(names: list[str], active: str) -> str:
    if names:
        return f"continue with {', '.join(names)}"
    if active:
        return f"use the active provider ({active})"
    return "have no provider and are rejected"


def _names(route: Route) -> list[str]:
    return [step.provider.provider_id for step in route.steps.all()]


def _routes() -> QuerySet[Route]:
    steps = RouteStep.objects.select_related("provider").defer("provider__config")
    return Route.objects.filter(is_active=True).prefetch_related(Prefetch("steps", steps))


def _active() -> str:
    rows = ProviderConfig.objects.filter(is_active=True)
    return rows.values_list("provider_id", flat=True).first() or ""
