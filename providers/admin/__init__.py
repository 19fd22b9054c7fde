from providers.admin.history import ConfigVersionAdmin
from providers.admin.pending import PendingChangeAdmin
from providers.admin.provider_config import ProviderConfigAdmin

__all__ = ("ConfigVersionAdmin", "PendingChangeAdmin", "ProviderConfigAdmin")
