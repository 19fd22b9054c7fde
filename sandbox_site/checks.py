"""System checks: what must hold before any process of this project may serve."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.core import checks
from django.core.checks import CheckMessage, Error, Tags, register
from django.core.exceptions import ImproperlyConfigured

from providers.checks import INSTALLATION
from sandbox_site.private_files import is_open_to_others


def secret_key() -> str:
    """SECRET_KEY, or "" where it is not set and Django would raise."""
    try:
        return settings.SECRET_KEY
    except ImproperlyConfigured:
        return ""


@register(Tags.security)
def https_has_a_trusted_proxy(**_: Any) -> list[CheckMessage]:
    """A proxy that ends HTTPS is named; without, every request is redirected for ever."""
    if settings.HTTPS_ONLY and not settings.TRUSTED_PROXIES:
        return [
            checks.Warning(
                "HTTPS_ONLY is on and TRUSTED_PROXIES is empty: X-Forwarded-Proto is ignored.",
                hint="Name the proxy that ends HTTPS, such as TRUSTED_PROXIES=127.0.0.1.",
                id="sandbox_site.W001",
            )
        ]
    return []


@register(Tags.security)
def secret_key_is_its_own(**_: Any) -> list[CheckMessage]:
    """SECRET_KEY is set, and credentials are not encrypted with it."""
    if not secret_key():
        return [
            Error(
                "SECRET_KEY is not set.",
                hint="Run `make run` or `python manage.py bootstrap`, which generate it, "
                "or set SECRET_KEY or SECRET_KEY_FILE.",
                id="sandbox_site.E001",
            )
        ]
    if secret_key() in settings.FERNET_KEYS:
        return [
            Error(
                "FERNET_KEYS holds SECRET_KEY: a leaked session key would decrypt credentials.",
                hint="Put a new key first, run `python manage.py rotate_keys`, remove the old one.",
                id="sandbox_site.E002",
            )
        ]
    return []


@register(INSTALLATION)
def instance_fits_the_database(**_: Any) -> list[CheckMessage]:
    """Keys and files are those of the installation whose database it is, where there is one."""
    from sandbox_site import installation

    if problem := installation.problems():
        return [Error(problem, id="sandbox_site.E004")]
    return []


@register(Tags.security)
def data_directory_is_private(**_: Any) -> list[CheckMessage]:
    """Nobody else may read keys, records and artifacts; `private_files` has tried to see to it."""
    if not is_open_to_others(settings.DATA_DIR):
        return []
    return [
        Error(
            f"{settings.DATA_DIR} is open to other users, and its mode cannot be changed.",
            hint="Make the user of the service its owner (chown), then chmod 700.",
            id="sandbox_site.E003",
        )
    ]
