"""Looking after providers while nobody uses them: are they well, and what did they leave behind."""

from __future__ import annotations

import logging

from providers import registry
from providers.base import SandboxProvider
from providers.errors import InvalidConfiguration, ProviderUnavailable, SandboxError
from providers.models import ProviderConfig, RouteStep
from providers.named import lease_of
from providers.services import breaker

logger = logging.getLogger(__name__)


def probe_providers() -> int:
    """Ask every provider of a route how it is, and let its breaker know. How many are well.

    A good answer does not close an open breaker: it lets one request try.
    """
    well = 0
    for provider_id in sorted(
        set(RouteStep.objects.values_list("provider__provider_id", flat=True))
    ):
        try:
            with lease_of(provider_id) as lease:
                health = lease.provider.health_check()
        except SandboxError as error:
            breaker.report_failure(provider_id, error)
            continue
        if health:
            well += 1
            breaker.let_one_try(provider_id)
        else:
            breaker.report_failure(provider_id, ProviderUnavailable(health.message))
    return well


def sweep_leftovers() -> int:
    """End what dead processes have left at every configured service. How many were ended."""
    ended = 0
    for provider_id in ProviderConfig.objects.values_list("provider_id", flat=True):
        try:
            if registry.get(provider_id).sweep is SandboxProvider.sweep:
                continue
            with lease_of(provider_id) as lease:
                ended += lease.provider.sweep()
        except InvalidConfiguration:
            continue
        except SandboxError as error:
            logger.warning("provider %s cannot be swept. %s", provider_id, error.message)
    if ended:
        logger.warning("%d sandboxes of ended processes were destroyed", ended)
    return ended
