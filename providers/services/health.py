"""Looking at every configured provider in the background, for the badges and for the routes."""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter

from django.utils import timezone
from django.views.decorators.debug import sensitive_variables

from providers import registry
from providers.addresses import check_resolved
from providers.errors import ProviderUnavailable, SandboxError
from providers.models import ProviderConfig, ProviderHealth, RouteStep
from providers.services import breaker
from providers.services.configuration import stored_config
from providers.services.failures import NOT_REACHABLE, STEP_SECONDS, told


def check_all() -> int:
    """Check each configured provider and note what came of it. How many are healthy.

    A provider is started apart from the one in service, asked for its health, and closed: no
    sandbox is bought from a service that charges for them. The breakers of those that a route
    names are told; a good answer does not close an open one, but lets one request try.
    """
    rows = list(ProviderConfig.objects.defer("config"))
    ProviderHealth.objects.exclude(provider_id__in=[row.provider_id for row in rows]).delete()
    routed = set(RouteStep.objects.values_list("provider__provider_id", flat=True))
    return sum(_check(row, tell_breaker=row.provider_id in routed) for row in rows)


def _check(row: ProviderConfig, *, tell_breaker: bool) -> bool:
    began = perf_counter()
    failure, enforced_by = _look_at(row)
    latency_ms = (perf_counter() - began) * 1000
    if failure and failure.message == NOT_REACHABLE:
        latency_ms += -latency_ms % (STEP_SECONDS * 1000)
    ProviderHealth.objects.update_or_create(
        provider_id=row.provider_id,
        defaults={
            "config_version": row.version,
            "healthy": failure is None,
            "code": failure.code if failure else "",
            "message": (failure.message if failure else enforced_by)[:500],
            "latency_ms": round(latency_ms, 1),
            "checked_at": timezone.now(),
        },
    )
    if tell_breaker and failure:
        breaker.report_failure(row.provider_id, failure)
    elif tell_breaker:
        breaker.let_one_try(row.provider_id)
    return failure is None


@sensitive_variables()
def _look_at(row: ProviderConfig) -> tuple[SandboxError | None, str]:
    """Why it cannot serve now, without a secret; None when it can, and then what holds its runs."""
    config: dict[str, object] = {}
    try:
        provider_class = registry.get(row.provider_id)
        config = provider_class.check_config(stored_config(row) or {})
        check_resolved(provider_class.config_fields, config)
        provider = provider_class()
        provider.initialize_apart(config)
        try:
            health = provider.health_check()
        finally:
            provider.close()
        if health:
            return None, in_words(health.details.get("enforced_by"))
        unhealthy = ProviderUnavailable(health.message)
        unhealthy.answered = health.answered
        return told(provider_class, config, unhealthy), ""
    except SandboxError as error:
        return (told(provider_class, config, error) if config else error), ""
    except BaseException as error:
        return told(provider_class, config, error), ""


def in_words(enforced_by: object) -> str:
    """What a provider says of who enforces what, in one line."""
    if not isinstance(enforced_by, Mapping):
        return ""
    return "; ".join(f"{str(name).replace('_', ' ')}: {by}" for name, by in enforced_by.items())
