"""Looking at every configured provider in the background, for the admin's badges."""

from __future__ import annotations

from time import perf_counter

from django.utils import timezone
from django.views.decorators.debug import sensitive_variables

from providers import registry
from providers.errors import UNAVAILABLE, SandboxError
from providers.models import ProviderConfig, ProviderHealth
from providers.services.configuration import stored_config
from providers.services.trial import redacted


def check_all() -> int:
    """Check each configured provider and note what came of it. How many are healthy.

    A provider is started apart from the one in service, asked for its health, and closed: no
    sandbox is bought from a service that charges for them.
    """
    rows = list(ProviderConfig.objects.defer("config"))
    ProviderHealth.objects.exclude(provider_id__in=[row.provider_id for row in rows]).delete()
    return sum(check(row).healthy for row in rows)


@sensitive_variables()
def check(row: ProviderConfig) -> ProviderHealth:
    """Check one provider now and keep the finding. Never raises for what a backend does."""
    began = perf_counter()
    code, message = "", ""
    config: dict[str, object] = {}
    try:
        provider_class = registry.get(row.provider_id)
        config = provider_class.check_config(stored_config(row) or {})
        provider = provider_class()
        provider.initialize(config)
        try:
            health = provider.health_check()
        finally:
            provider.close()
        if not health:
            code, message = UNAVAILABLE.code, redacted(provider_class, config, health.message)
    except SandboxError as error:
        code, message = error.code, error.message
        if config:
            message = redacted(provider_class, config, message)
    except Exception as error:
        code, message = UNAVAILABLE.code, f"The check failed with {type(error).__name__}."
    found, _ = ProviderHealth.objects.update_or_create(
        provider_id=row.provider_id,
        defaults={
            "config_version": row.version,
            "healthy": not code,
            "code": code,
            "message": message[:500],
            "latency_ms": round((perf_counter() - began) * 1000, 1),
            "checked_at": timezone.now(),
        },
    )
    return found
