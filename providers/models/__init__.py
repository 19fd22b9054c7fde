from providers.models.config_version import ConfigVersion, PendingChange
from providers.models.provider_config import ProviderConfig

__all__ = ("ConfigVersion", "PendingChange", "ProviderConfig")
