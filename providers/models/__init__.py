from providers.models.config_version import ConfigVersion, PendingChange
from providers.models.provider_config import ProviderConfig
from providers.models.provider_health import ProviderHealth

__all__ = ("ConfigVersion", "PendingChange", "ProviderConfig", "ProviderHealth")
