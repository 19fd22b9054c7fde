"""The app that knows where code runs."""

from __future__ import annotations

from django.apps import AppConfig
from django.core import checks
from django.utils.module_loading import autodiscover_modules


class ProvidersConfig(AppConfig):
    name = "providers"
    verbose_name = "Sandbox providers"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        autodiscover_modules("admin_routing")
        from providers.checks import check_fernet_keys

        checks.register(check_fernet_keys, checks.Tags.security)
