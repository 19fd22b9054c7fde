"""What may be told of a provider that failed while it was tried or checked."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from django.views.decorators.debug import sensitive_variables

from providers.addresses import are_public, entered_addresses
from providers.base import SandboxProvider
from providers.errors import (
    ConnectionFailed,
    InvalidConfiguration,
    ProviderUnavailable,
    SandboxError,
)
from providers.isolation import IsolationUnmet
from providers.schema import mask

logger = logging.getLogger(__name__)

NOT_REACHABLE = "Not reachable. The server's log has the reason."

# A failure to reach an address is told at whole multiples of this, so that its time tells as
# little. Refused, filtered and not understood all take less: see `remote/checked_httpx.py`.
STEP_SECONDS = 10.0


@sensitive_variables()
def told(
    provider: type[SandboxProvider], config: Mapping[str, Any], error: BaseException
) -> SandboxError:
    """What whoever configures a provider may learn of its failure, without a secret.

    Of an address he entered that is all or nothing: whether a port of some machine is open, closed
    or speaks something else is told to nobody. The log has it.
    """
    if not isinstance(error, SandboxError):
        # Its text may hold whatever the backend or the configuration held.
        text = f"The provider failed with an unexpected {type(error).__name__}."
        error = ProviderUnavailable(text)
    error.message = redacted(provider, config, error.message)
    entered = entered_addresses(provider.config_fields, config)
    if (
        not entered
        or error.answered == "proof"
        or (isinstance(error, InvalidConfiguration) and not error.answered)
        # Found out with a sandbox that was handed out.
        or isinstance(error, IsolationUnmet)
        or (error.answered == "status" and are_public(entered.values()))
    ):
        return error
    logger.warning("provider %s is not reachable. %s: %s", provider.id, error.code, error.message)
    return ConnectionFailed(NOT_REACHABLE)


@sensitive_variables()
def redacted(provider: type[SandboxProvider], config: Mapping[str, Any], text: str) -> str:
    """`text` without the configuration's secrets, should a backend have quoted one."""
    for key, declared in provider.config_fields.items():
        secret = config.get(key)
        if declared.secret and secret and len(str(secret)) >= 4:
            text = text.replace(str(secret), mask(str(secret)))
    return text
