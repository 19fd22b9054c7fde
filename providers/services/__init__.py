from providers.guarded import ConfigurationConflict, NotPermitted, two_person_rule
from providers.services.approval import approve, reject, request_change, request_rollback
from providers.services.configuration import (
    activate,
    merged_config,
    remove_config,
    save_config,
    stored_config,
)
from providers.services.rotation import Rotation, encrypted_fields, rotate, rotate_elsewhere

__all__ = [
    "ConfigurationConflict",
    "NotPermitted",
    "Rotation",
    "activate",
    "approve",
    "encrypted_fields",
    "merged_config",
    "reject",
    "remove_config",
    "request_change",
    "request_rollback",
    "rotate",
    "rotate_elsewhere",
    "save_config",
    "stored_config",
    "two_person_rule",
]
