"""Starting the providers of all routes before a request needs them.

Where a process does so, a request that has another provider to go to does not wait for one that is
still starting. Elsewhere, as in a command that runs one program, it does: nobody else starts it.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager

from django.db import Error as DatabaseFailure

from providers import draining
from providers.leases import lease_of
from providers.manager import Lease
from providers.models import RouteStep
from providers.provider_status import languages_of
from providers.threads import Loop

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0


def is_on() -> bool:
    """Whether this process starts its providers ahead."""
    return _loop.is_running


def start_ahead() -> None:
    """Do so from now on, in a thread that waits for none of them."""
    _loop.start()


def start_all() -> None:
    """Have each that is not there, or was configured anew, started; look at the others."""
    steps = RouteStep.objects.filter(route__is_active=True).order_by()
    for provider_id in set(steps.values_list("provider__provider_id", flat=True)):
        _look_at(lease_of(provider_id, wait=False))


def _look_at(lent: AbstractContextManager[Lease]) -> None:
    try:
        with lent as lease:
            languages_of(lease.provider)
    except DatabaseFailure:
        raise
    except Exception as error:
        # It is starting, or a request will be told why it does not.
        logger.debug("not ready yet: %s", error)


def _look() -> float:
    try:
        start_all()
    except DatabaseFailure as error:
        logger.info("Providers could not be started in advance: %s", error)
    return LOOK_SECONDS


_loop = Loop("start-ahead", _look, goes_on=lambda: not draining.is_ending())
