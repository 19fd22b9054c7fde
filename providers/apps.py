"""The app that knows where code runs."""

from __future__ import annotations

from django.apps import AppConfig
from django.conf import settings
from django.core import checks
from django.db import close_old_connections, connections

from providers.options import use_options
from providers.threads import register_thread_hooks


class ProvidersConfig(AppConfig):
    name = "providers"
    verbose_name = "Sandbox providers"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        use_options(settings)
        register_thread_hooks(before_tick=close_old_connections, at_end=connections.close_all)

        from providers.checks import check_fernet_keys, check_local_python
        from providers.guarded import Child, Guarded, guard
        from providers.models import CircuitBreaker, ProviderPrice, Route, RouteStep

        checks.register(check_fernet_keys, checks.Tags.security)
        checks.register(check_local_python, checks.Tags.files)
        steps = Child(
            RouteStep,
            parent="route",
            accessor="steps",
            # Naming a provider needs none of its secrets.
            related="provider",
            unread="provider__config",
        )
        guard(Guarded(Route, children=(steps,)))
        guard(Guarded(ProviderPrice))
        guard(Guarded(CircuitBreaker, removal_only=True))
