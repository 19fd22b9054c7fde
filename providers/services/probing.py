"""Finding out whether a provider is ill, with a program of our own.

A run that ended badly after its code had started says nothing of the provider: the code may have
brought it about. So a tiny program is run in a sandbox of its own, in the background, and what
becomes of that counts for the breaker.
"""

from __future__ import annotations

import logging
import threading
import time
from datetime import timedelta
from functools import partial

from django.db import Error as DatabaseFailure
from django.db import connections
from django.db.models import Q
from django.utils import timezone

from providers.base import SandboxProvider
from providers.errors import ProviderUnavailable, RateLimited, SandboxError
from providers.languages import probe_of
from providers.leases import lease_of
from providers.models import CircuitBreaker
from providers.remote.deadline import DeadlinePassed, call_within
from providers.services import breaker
from providers.services.trial import EXPECTED
from providers.threads import NoThreadLeft, start_thread
from providers.values import ExecutionResult, Job, SandboxSpec

logger = logging.getLogger(__name__)

# Of all processes together, one probe of a provider in this time.
PAUSE = timedelta(seconds=5)

# A failed probe is repeated until the breaker knows, and after this pause.
AGAIN_SECONDS = 1.0

# For all of a probe: a place in the pool, a start, the program, the end.
DEADLINE_SECONDS = 40.0
RUN_SECONDS = 5.0

# No tenant's slug can have a colon in it.
OWNER = "service:probe"

_going_on: set[str] = set()
_lock = threading.Lock()


def doubt(provider_id: str) -> bool:
    """Have the provider probed in the background. False where it just was, or is now."""
    with _lock:
        if provider_id in _going_on:
            return False
        _going_on.add(provider_id)
    started = False
    try:
        if _is_due(provider_id):
            _start(provider_id)
            started = True
    except NoThreadLeft as error:
        logger.error("provider %s is not probed now: %s", provider_id, error.message)
    finally:
        if not started:
            _end(provider_id)
    return started


def probe(provider_id: str) -> SandboxError | None:
    """Run the program once. Why it did not come to its end, None when it did."""
    try:
        call_within(
            DEADLINE_SECONDS, lambda: _probe(provider_id), line=f"the probes of {provider_id}"
        )
    except SandboxError as error:
        return error
    except DeadlinePassed:
        return ProviderUnavailable(f"A probe had no answer in {DEADLINE_SECONDS:g} s.")
    except BaseException as error:
        logger.exception("probe of provider %s failed", provider_id)
        return ProviderUnavailable(f"A probe failed with {type(error).__name__}.")
    return None


def _is_due(provider_id: str) -> bool:
    """Whether it is this process's turn: the others find another time in the row."""
    now = timezone.now()
    row, _ = CircuitBreaker.objects.get_or_create(provider_id=provider_id)
    due = Q(probed_at=None) | Q(probed_at__lt=now - PAUSE)
    return CircuitBreaker.objects.filter(due, pk=row.pk).update(probed_at=now) == 1


def _start(provider_id: str) -> None:
    start_thread("probe", partial(_decide, provider_id))


def _decide(provider_id: str) -> None:
    try:
        for attempt in range(breaker.THRESHOLD):
            if attempt:
                time.sleep(AGAIN_SECONDS)
            error = probe(provider_id)
            if error is None:
                breaker.report_success(provider_id)
                return
            if isinstance(error, RateLimited):
                # It is full, which is no illness.
                return
            logger.warning("a probe of provider %s failed: %s", provider_id, error.message)
            breaker.report_failure(provider_id, error)
    except DatabaseFailure:
        logger.exception("the circuit breaker of %s could not be updated", provider_id)
    finally:
        _end(provider_id)


def _end(provider_id: str) -> None:
    with _lock:
        _going_on.discard(provider_id)


def _probe(provider_id: str) -> None:
    try:
        with lease_of(provider_id) as lease:
            _run(lease.provider)
    finally:
        # `call_within` gives every call a thread of its own.
        connections.close_all()


def _run(provider: SandboxProvider) -> None:
    found = probe_of(provider.get_supported_languages())
    if found is None:
        raise RateLimited("There is no test program for its languages.")
    language, program = found
    sandbox = provider.open(SandboxSpec(language), OWNER)
    try:
        result = sandbox.run(Job(program, language, RUN_SECONDS, entrypoint="script"))
    finally:
        sandbox.close()
    if not isinstance(result, ExecutionResult) or str(result.stdout).strip() != EXPECTED:
        raise ProviderUnavailable("The test program did not print the expected text.")
