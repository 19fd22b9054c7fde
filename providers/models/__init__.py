from providers.models.provider_config import ProviderConfig

__all__ = ["ProviderConfig"]
