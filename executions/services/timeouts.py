"""How long a run may take: what its caller names, within what the provider carries out."""

from __future__ import annotations

import math

from django.conf import settings

from executions.kernel.declarations import refuse
from executions.services.asking import guarded
from executions.services.requests import ExecutionRequest
from providers.manager import Lease


def longest_at(lease: Lease) -> float | None:
    """The provider's own bound in seconds, None where it has none or none that can be one."""
    told = guarded(lease.provider_id, lambda: lease.provider.max_timeout)
    is_one = type(told) in (int, float) and 0 < told < math.inf  # type: ignore[operator]
    return told if is_one else None


def seconds_at(lease: Lease, request: ExecutionRequest) -> float:
    """The timeout in force at this provider.

    A run that names none has what is usual where it was asked for, else the provider's, or the
    service's where the provider has none. Raises InvalidConfiguration for a named one beyond the
    provider's.
    """
    longest = longest_at(lease)
    if request.timeout is None:
        if request.usual_timeout is not None:
            return min(request.usual_timeout, math.inf if longest is None else longest)
        unnamed = settings.SANDBOX_TIMEOUT_SEC if longest is None else longest
        return float(min(unnamed, settings.SANDBOX_MAX_TIMEOUT_SEC))
    if longest is not None and request.timeout > longest:
        refuse("timeout", f"{lease.provider_id} runs code for {longest:g} s at most.")
    return request.timeout
