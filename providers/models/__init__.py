from providers.models.breaker import CircuitBreaker
from providers.models.price import ProviderPrice
from providers.models.provider_config import ProviderConfig
from providers.models.route import Route, RouteStep

__all__ = ["CircuitBreaker", "ProviderConfig", "ProviderPrice", "Route", "RouteStep"]
