"""From a stored configuration to a provider that is ready."""

from __future__ import annotations

import logging
import threading
import traceback

from django.views.decorators.debug import sensitive_variables

from providers import registry
from providers.addresses import AddressRefused, check_resolved
from providers.base import SandboxProvider
from providers.errors import InvalidConfiguration, NotInitialized, SandboxError
from providers.models import ProviderConfig

logger = logging.getLogger(__name__)


@sensitive_variables()
def start_provider(row: ProviderConfig, *, to_attach: bool = False) -> SandboxProvider:
    """The provider, initialized. Raises SandboxError, whatever went wrong.

    `to_attach`: only to use what it has opened before with this configuration.
    """
    secrets: list[str] = []
    try:
        provider_class = registry.get(row.provider_id)
        secrets = [
            str(row.config[key])
            for key, declared in provider_class.config_fields.items()
            if declared.secret and row.config.get(key)
        ]
        config = provider_class.check_config(row.config)
        check_resolved(provider_class.config_fields, config)
        provider = provider_class()
        start = provider.initialize_to_attach if to_attach else provider.initialize
        if not start(config):
            raise NotInitialized(f"Provider {row.provider_id!r} did not start.")
    except InvalidConfiguration as error:
        # Not the caller's mistake: SB002 would tell him with a 400 that it was.
        raise NotInitialized(
            f"The configuration of provider {row.provider_id!r} cannot be used. {error.message}"
        ) from None
    except AddressRefused:
        raise NotInitialized(
            f"The configuration of provider {row.provider_id!r} names an address that is not "
            "allowed. The server's log has the details."
        ) from None
    except SandboxError:
        raise
    except BaseException as error:  # a provider of another package may raise SystemExit
        if isinstance(error, KeyboardInterrupt) and _is_main_thread():
            raise
        report = traceback.format_exc()
        for secret in secrets:
            report = report.replace(secret, "••••")
        logger.error("Provider %r failed to start.\n%s", row.provider_id, report)
        raise NotInitialized(
            f"Provider {row.provider_id!r} failed to start ({type(error).__name__}). "
            "The server's log has the details."
        ) from None
    return provider


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
