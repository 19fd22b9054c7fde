from providers.services.configuration import (
    ConfigurationConflict,
    activate,
    merged_config,
    save_config,
    stored_config,
)
from providers.services.rotation import Rotation, encrypted_fields, rotate

__all__ = [
    "ConfigurationConflict",
    "Rotation",
    "activate",
    "encrypted_fields",
    "merged_config",
    "rotate",
    "save_config",
    "stored_config",
]
