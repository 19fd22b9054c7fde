"""What a new installation needs before it can serve. Each step does nothing the second time."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

from django.conf import settings
from django.contrib.auth import get_user_model
from django.db import transaction

from executions.tenants.keys import create_api_key, ensure_key
from executions.tenants.models import Tenant
from executions.tenants.service import DEMO, INTERNAL, create_tenant
from providers.addresses import is_loopback
from providers.models import ProviderConfig
from providers.runtime.service.docker_check import Docker, find_docker
from providers.runtime.service.settings import IMAGE_FIELDS
from providers.services.configuration import activate, save_config
from sandbox_site import keys
from sandbox_site.checks import secret_key

CREDENTIALS = "credentials.txt"
# Whose the key of SANDBOX_API_KEY is.
AGENT_SANDBOX = "agent-sandbox"
_WHY = {
    "self_managed": "No provider was chosen, and a pool for containers is available now.",
    "local": "No provider was chosen, and a pool for containers is no longer available.",
}
# Where a service listens, which is not where it is reached.
_EVERYWHERE = ("0.0.0.0", "::")  # noqa: S104


def ensure_keys(data_dir: Path) -> None:
    """Generate the keys that the environment did not bring. Raises keys.KeysLost."""
    data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    if secret_key() and settings.FERNET_KEYS and settings.LEDGER_KEYS:
        return
    keys.create(data_dir)
    generated = keys.read(data_dir)
    # The settings were read before there were keys.
    if not secret_key():
        settings.SECRET_KEY = generated["SECRET_KEY"]
    if not settings.FERNET_KEYS:
        settings.FERNET_KEYS = keys.split(generated["FERNET_KEYS"])
    if not settings.LEDGER_KEYS:
        settings.LEDGER_KEYS = keys.split(generated["LEDGER_KEYS"])


def has_accounts() -> bool:
    """Whether anybody has one: what is in a database without any, `migrate` has put there."""
    return get_user_model().objects.exists() or Tenant.objects.exclude(slug=INTERNAL).exists()


def ensure_accounts(data_dir: Path) -> dict[str, str]:
    """An administrator and a tenant with an API key, where there are none.

    Returns what was created, by name. It is also kept in the data directory, written before the
    rows are committed: an account whose password nobody knows is worse than a line too many.
    """
    with transaction.atomic():
        created = _ensure_admin() | _ensure_tenant()
        if created:
            _keep(data_dir / CREDENTIALS, created)
    return created


def ensure_given_key() -> bool:
    """Have SANDBOX_API_KEY open the door to one tenant, and no former value of it.

    Whether anything changed. Raises InvalidConfiguration for a value that is a key already.
    """
    key_text = settings.AGENT_SANDBOX.api_key
    if not key_text:
        return False
    tenant = Tenant.objects.filter(slug=AGENT_SANDBOX).first()
    return ensure_key(
        tenant or create_tenant(AGENT_SANDBOX, "Agent Sandbox"), "SANDBOX_API_KEY", key_text
    )


def ensure_provider() -> str:
    """Choose what runs the code, until somebody else has chosen: containers, else `local`.

    Returns what the operator should know, "" for nothing. Raises InvalidConfiguration.
    """
    active = ProviderConfig.objects.defer("config").filter(is_active=True).first()
    if active is not None and not _was_chosen_here(active):
        return ""
    docker = find_docker()
    if active is not None and docker is Docker.FORBIDDEN and not _pool_is_elsewhere():
        # The pool service may, as a unit of its own.
        return ""
    has_pool = docker is Docker.READY or _pool_is_elsewhere()
    wanted = "self_managed" if has_pool else "local"
    advice = [docker.value] if docker is Docker.WITHOUT_IMAGES else []
    if active is None or active.provider_id != wanted:
        reason = _WHY[wanted] if active is not None else "First provider of a new installation."
        if not ProviderConfig.objects.filter(provider_id=wanted).exists():
            save_config(wanted, _pool_config() if wanted == "self_managed" else {}, reason=reason)
        _remember(activate(wanted, reason=reason))
        if active is not None:
            advice.append(
                f"Code now runs at the provider {wanted}, no longer at {active.provider_id}. "
                f"{reason} Activate a provider in the admin to keep it."
            )
    return " ".join(advice)


def _pool_is_elsewhere() -> bool:
    """Whether POOL_HOST names another machine's service, as it does between containers."""
    host = settings.POOL_HOST
    return host not in _EVERYWHERE and not is_loopback(host)


def _pool_config() -> dict[str, Any]:
    """For the service that `manage.py up` starts, or for one elsewhere.

    That one's images are the registry's, which the configuration has to name.
    """
    host = settings.POOL_HOST
    if host in _EVERYWHERE:
        host = "127.0.0.1"
    shown = f"[{host}]" if ":" in host else host
    return {
        "endpoint": f"http://{shown}:{settings.POOL_PORT}",
        "token": settings.POOL_TOKEN,
        "pool_size": settings.POOL_SIZE,
        **(_images() if _pool_is_elsewhere() else {}),
    }


def _images() -> dict[str, str]:
    """Those that the settings name, by field of the configuration."""
    return {IMAGE_FIELDS[language]: name for language, name in settings.POOL_IMAGES.items() if name}


def _was_chosen_here(row: ProviderConfig) -> bool:
    """Whether the row is as we left it. Who saves or activates one changes its time."""
    path = _choice_file()
    return path.exists() and path.read_text(encoding="utf-8") == _state(row)


def _remember(row: ProviderConfig) -> None:
    path = _choice_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_state(row), encoding="utf-8")


def _choice_file() -> Path:
    return Path(settings.DATA_DIR) / "run" / "chosen-provider"


def _state(row: ProviderConfig) -> str:
    return f"{row.provider_id} {row.version} {row.updated_at.isoformat()}"


def _ensure_admin() -> dict[str, str]:
    users = get_user_model().objects
    if users.filter(is_superuser=True).exists():
        return {}
    password = secrets.token_urlsafe(16)
    users.create_superuser(username="admin", password=password)
    return {"ADMIN_USER": "admin", "ADMIN_PASSWORD": password}


def _ensure_tenant() -> dict[str, str]:
    if Tenant.objects.exclude(slug=INTERNAL).exists():
        return {}
    _, key_text = create_api_key(create_tenant(DEMO, "Demo"), "first key")
    return {"API_KEY": key_text}


def _keep(path: Path, created: dict[str, str]) -> None:
    kept = path.read_text(encoding="utf-8") if path.exists() else ""
    lines = "".join(f"{name}={value}\n" for name, value in created.items())
    draft = path.with_name(f".{path.name}")
    keys.write_private(draft, kept + lines)
    draft.replace(path)
