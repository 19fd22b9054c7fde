"""Ending what processes of ours have left behind at the services."""

from __future__ import annotations

import logging

from providers import registry
from providers.base import SandboxProvider
from providers.errors import InvalidConfiguration, SandboxError
from providers.models import ProviderConfig
from providers.named import lease_of

logger = logging.getLogger(__name__)


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
        except BaseException:
            # The others are swept all the same, whatever a provider of another package raises.
            logger.exception("provider %s failed to be swept", provider_id)
    if ended:
        logger.warning("%d sandboxes of ended processes were destroyed", ended)
    return ended
