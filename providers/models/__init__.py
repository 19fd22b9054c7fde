from providers.models.account_hold import AccountHold
from providers.models.breaker import CircuitBreaker
from providers.models.config_version import ConfigVersion, PendingChange
from providers.models.price import ProviderPrice
from providers.models.provider_config import ProviderConfig
from providers.models.provider_health import ProviderCheckCount, ProviderHealth
from providers.models.route import Route, RouteStep

__all__ = (
    "AccountHold",
    "CircuitBreaker",
    "ConfigVersion",
    "PendingChange",
    "ProviderCheckCount",
    "ProviderConfig",
    "ProviderHealth",
    "ProviderPrice",
    "Route",
    "RouteStep",
)
