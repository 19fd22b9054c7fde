"""Every setting, declared once: environment variables with type, default, limits and meaning.

`sandbox_site.environment` reads them, and refuses a name that is not here. `manage.py settings`
lists them, and writes docs/settings.md from them.
"""

from __future__ import annotations

from sandbox_site.settings_table import sandboxes, service
from sandbox_site.settings_table.setting import Group, Setting

__all__ = ["FOREIGN", "GROUPS", "PREFIXES", "REFUSED", "SETTINGS", "Group", "Setting"]

GROUPS: tuple[Group, ...] = (
    service.SERVER,
    service.PRODUCTION,
    service.DATABASE,
    service.FILES,
    sandboxes.EXECUTIONS,
    sandboxes.SESSIONS,
    sandboxes.POOL,
    service.PROVIDERS,
    service.FETCHED_FILES,
    service.TEMPLATES,
    service.WEBHOOKS,
    service.VAULT,
    service.OBSERVABILITY,
    sandboxes.AGENT_SANDBOX,
    sandboxes.BRIDGE,
)
SETTINGS: dict[str, Setting] = {
    setting.name: setting for group in GROUPS for setting in group.settings
}

# Variables that do nothing here, with the reason. One that is set is an error at start.
REFUSED = {
    "SANDBOX_MAX_CODE_BYTES": "code has 1 MiB at most. Send more as a file of the request",
    "SANDBOX_MAX_RUN_AHEAD_DAYS": "a run may be scheduled 30 days ahead at most",
    "SANDBOX_MAX_SCHEDULES": "a tenant may have 20 schedules. Enter another number on the tenant's "
    "page in the admin",
    "SESSIONS_MAX_TOTAL": "the name of this limit is SANDBOX_MAX_TOTAL. Set that in its place",
    "SANDBOX_IMAGE": "the pool runs images that `manage.py build_images` has prepared. Name your "
    "image in SANDBOX_BASE_PYTHON_IMAGE",
    "WORK_ROOT": "no folder of this host is mounted into a sandbox. Files are stored in DATA_DIR "
    "or at STORAGE_URL",
}
# A variable that begins so and is not declared is an error at start: the name has a mistake.
PREFIXES = (
    "AUDIT_EXPORT_",
    "FERNET_",
    "LEDGER_",
    "SANDBOX_",
    "SESSIONS_",
    "SESSION_STORAGE_",
    "TEMPLATE_",
    "TEMPLATES_",
    "TENANT_STORAGE_",
)
# RAGFlow's names for its own parts, which may be in the same environment.
FOREIGN = frozenset(
    (
        "SANDBOX_ARTIFACT_BUCKET",
        "SANDBOX_ARTIFACT_EXPIRE_DAYS",
        "SANDBOX_ENABLED",
        "SANDBOX_ENABLE_SECCOMP",
        "SANDBOX_EXECUTOR_MANAGER_IMAGE",
        "SANDBOX_EXECUTOR_MANAGER_PORT",
    )
)
