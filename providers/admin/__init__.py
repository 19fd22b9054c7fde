from providers.admin.history import ConfigVersionAdmin
from providers.admin.pending import PendingChangeAdmin
from providers.admin.provider_config import ProviderConfigAdmin
from providers.admin.routing import BreakerAdmin, PriceAdmin, RouteAdmin

__all__ = (
    "BreakerAdmin",
    "ConfigVersionAdmin",
    "PendingChangeAdmin",
    "PriceAdmin",
    "ProviderConfigAdmin",
    "RouteAdmin",
)
