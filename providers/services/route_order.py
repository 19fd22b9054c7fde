"""The order in which providers are tried for one request."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal

from providers.languages import normalize_language
from providers.models import ProviderConfig, ProviderPrice, Route, RouteStep
from providers.registry import class_id
from providers.services.breaker import latencies
from providers.services.configuration import Unreadable, stored_config
from providers.services.settings_cache import CachedQuery

# What the prices of runs are compared at.
_USUAL_SECONDS = Decimal(10)


def planned(owner: str, language: str) -> list[str]:
    """The ids of the providers to try, the first one first. Empty: whichever is active.

    The route for this tenant and language goes before the tenant's, that before the language's,
    and that before the one for all.
    """
    found = _fitting(owner, language)
    if found is None:
        return []
    route, steps = found
    ordered = _ORDERS[route.strategy](steps)
    if route.region:
        known = _regions()
        ordered = sorted(
            ordered, key=lambda step: known.get(step.provider.provider_id) != route.region
        )
    return [step.provider.provider_id for step in ordered]


def route_minimum(owner: str, language: str) -> str:
    """The least isolation that the route for these demands, "" for none."""
    found = _fitting(owner, language)
    return found[0].minimum_isolation if found else ""


def takes(route: Route, owner: str, language: str) -> bool:
    """Whether it is a route for these, if not the first. Two names of one language lead the same
    way: what a route demands is not passed by the other one.
    """
    languages = ("", normalize_language(language))
    return route.owner in ("", owner) and normalize_language(route.language) in languages


def _fitting(owner: str, language: str) -> tuple[Route, list[RouteStep]] | None:
    """A route of the very name of a language goes before that of its other name."""
    known = _routes()
    fitting = [
        (bool(route.owner), bool(route.language), route.language == language, number)
        for number, (route, _) in enumerate(known)
        if takes(route, owner, language)
    ]
    return known[max(fitting)[-1]] if fitting else None


def reachable(owner: str) -> set[str]:
    """Every provider that some route of this tenant names."""
    return {
        step.provider.provider_id
        for route, steps in _routes()
        if route.owner in ("", owner)
        for step in steps
    }


@dataclass(frozen=True)
class Price:
    """Of a run, and of each second of it, the memory of its sandbox included."""

    run: Decimal
    second: Decimal

    def of(self, seconds: Decimal) -> Decimal:
        return self.run + self.second * seconds


def price_of(provider_id: str) -> Price | None:
    """What runs at a provider cost. A configuration without a price of its own has that of the
    first of its class; None where neither has one: it costs nothing.
    """
    known = _prices()
    return known.get(provider_id) or known.get(class_id(provider_id))


def _load_routes() -> list[tuple[Route, list[RouteStep]]]:
    return [
        (route, list(route.steps.select_related("provider").defer("provider__config")))
        for route in Route.objects.filter(is_active=True)
    ]


_routes = CachedQuery(_load_routes, Route, RouteStep, ProviderConfig)


def _load_regions() -> dict[str, str]:
    """By provider, the region that its configuration names; of one that cannot be read, none."""
    found = {}
    for row in ProviderConfig.objects.defer("config"):
        with suppress(Unreadable):
            found[row.provider_id] = str((stored_config(row) or {}).get("region") or "")
    return found


_regions = CachedQuery(_load_regions, ProviderConfig)


def known_regions() -> set[str]:
    """Those that some configuration names."""
    return {region for region in _regions().values() if region}


_prices = CachedQuery(
    lambda: {
        row.provider_id: Price(row.per_run, row.of_second) for row in ProviderPrice.objects.all()
    },
    ProviderPrice,
)


def _by_position(steps: list[RouteStep]) -> list[RouteStep]:
    return steps


def _by_price(steps: list[RouteStep]) -> list[RouteStep]:
    free = Price(Decimal(0), Decimal(0))
    return sorted(
        steps,
        key=lambda step: (price_of(step.provider.provider_id) or free).of(_USUAL_SECONDS),
    )


def _by_latency(steps: list[RouteStep]) -> list[RouteStep]:
    # One that nobody has measured yet goes first, so that it gets measured.
    known = latencies()
    return sorted(steps, key=lambda step: known.get(step.provider.provider_id, 0.0))


def _by_weight(steps: list[RouteStep]) -> list[RouteStep]:
    """Drawn without replacement: each is first as often as its share of the weights says.

    Efraimidis and Spirakis, Weighted random sampling with a reservoir, 2006.
    """
    draw = {step.pk: random.random() for step in steps}  # noqa: S311 - no secret depends on it
    return sorted(
        steps,
        key=lambda step: draw[step.pk] ** (1 / step.weight) if step.weight else -1.0,
        reverse=True,
    )


_ORDERS: dict[str, Callable[[list[RouteStep]], list[RouteStep]]] = {
    Route.Strategy.PRIORITY: _by_position,
    Route.Strategy.CHEAPEST: _by_price,
    Route.Strategy.LATENCY: _by_latency,
    Route.Strategy.WEIGHTED: _by_weight,
}
