"""The app that knows where code runs."""

from __future__ import annotations

from django.apps import AppConfig
from django.core import checks


class ProvidersConfig(AppConfig):
    name = "providers"
    verbose_name = "Sandbox providers"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from providers.checks import check_fernet_keys

        checks.register(check_fernet_keys, checks.Tags.security)
