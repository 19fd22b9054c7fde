"""The circuit breaker of each provider, in the database so that all processes share it, and what
may be told of a failure.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.db.models import Case, F, When
from django.db.models.expressions import Combinable
from django.utils import timezone
from django.views.decorators.debug import sensitive_variables

from providers import errors
from providers.addresses import are_public, entered_addresses
from providers.base import SandboxProvider
from providers.errors import (
    ConnectionFailed,
    InvalidConfiguration,
    ProviderUnavailable,
    SandboxError,
)
from providers.isolation import IsolationUnmet
from providers.models import CircuitBreaker
from providers.schema import mask

logger = logging.getLogger(__name__)

THRESHOLD = 3
# Failures of requests that are further apart are not one after the other.
TOGETHER = timedelta(minutes=10)
RETRY_AFTER = timedelta(seconds=10)
LONGEST_RETRY = timedelta(minutes=5)
TRIAL_TIME = timedelta(seconds=30)
LATENCY_SHARE = 0.2
FLUSH_SECONDS = 10.0

# What says that a provider is ill. A rate limit or a refused request says nothing of the kind.
ILL = (
    errors.NOT_INITIALIZED,
    errors.CONNECTION_FAILED,
    errors.CREATION_FAILED,
    errors.UNAVAILABLE,
)

_lock = threading.Lock()
_latencies: dict[str, tuple[float, float]] = {}
_troubled: set[str] = set()
_trials: set[str] = set()


@dataclass(frozen=True)
class Standing:
    """What one look at a breaker said: whether a request may be sent to the provider."""

    provider_id: str
    row: CircuitBreaker | None
    is_out: bool

    def claim(self) -> bool:
        """Be the one to try a provider that was out of service. True also where nobody need."""
        row = self.row
        if row is None or row.state == CircuitBreaker.State.CLOSED:
            return not self.is_out
        now = timezone.now()
        _troubled.add(self.provider_id)
        mine = CircuitBreaker.objects.filter(pk=row.pk, state=row.state, retry_at=row.retry_at)
        if self.is_out or mine.update(retry_at=now + TRIAL_TIME, changed_at=now) != 1:
            return False
        _trials.add(self.provider_id)
        return True


def standing_of(provider_id: str) -> Standing:
    """Whether it is in service. Of an open breaker whose time has come, see `Standing.claim`."""
    row = CircuitBreaker.objects.filter(provider_id=provider_id).first()
    if row is None or row.state == CircuitBreaker.State.CLOSED:
        if row is not None and (row.failures or row.failed_checks):
            _troubled.add(provider_id)
        return Standing(provider_id, row, False)
    return Standing(provider_id, row, row.retry_at is None or row.retry_at > timezone.now())


def admits(provider_id: str) -> bool:
    """Whether a request may be sent there now.

    Of an open breaker whose time has come one caller in all processes is admitted, who has
    TRIAL_TIME to report; after that it is another one's turn.
    """
    return standing_of(provider_id).claim()


def report_success(provider_id: str, latency_ms: float | None = None) -> None:
    """A request was carried out. Closes the breaker; writes only when there is news."""
    if provider_id in _troubled:
        _troubled.discard(provider_id)
        _trials.discard(provider_id)
        sick = CircuitBreaker.objects.filter(provider_id=provider_id).exclude(
            state=CircuitBreaker.State.CLOSED, failures=0, failed_checks=0
        )
        if sick.update(
            state=CircuitBreaker.State.CLOSED,
            failures=0,
            failed_checks=0,
            openings=0,
            retry_at=None,
            error_code="",
            error_message="",
            changed_at=timezone.now(),
        ):
            logger.info("provider %s is in service", provider_id)
    if latency_ms is not None:
        _note_latency(provider_id, latency_ms)


def report_failure(provider_id: str, error: SandboxError) -> None:
    """A request failed. THRESHOLD of them one after the other open the breaker.

    What failed when code may have been running says nothing: the code may have brought it about.
    Nor is what failed long ago one after the other with this: of a fallback that is used now and
    then, nobody hears of the successes in between.
    """
    if error.entry not in ILL or error.started:
        return
    now = timezone.now()
    again = When(failed_at__gte=now - TOGETHER, then=F("failures") + 1)
    _note_failure(provider_id, error, "failures", Case(again, default=1), failed_at=now)


def report_check(provider_id: str, error: SandboxError | None) -> None:
    """The background's check of a provider ended. THRESHOLD bad ones in a row open the breaker.

    They are counted apart from requests, of which a good check says nothing. One such does not
    close an open breaker, but lets a request try.
    """
    if error is None:
        row = CircuitBreaker.objects.filter(provider_id=provider_id)
        row.exclude(failed_checks=0).update(failed_checks=0)
        let_one_try(provider_id)
    elif error.entry in ILL:
        _note_failure(provider_id, error, "failed_checks", F("failed_checks") + 1)


def _note_failure(
    provider_id: str, error: SandboxError, counter: str, count: Combinable, **values: datetime
) -> None:
    _troubled.add(provider_id)
    now = timezone.now()
    row, _ = CircuitBreaker.objects.get_or_create(provider_id=provider_id)
    mine = CircuitBreaker.objects.filter(pk=row.pk)
    mine.update(
        **{counter: count},
        error_code=error.code,
        error_message=error.message,
        changed_at=now,
        **values,
    )
    row.refresh_from_db()
    is_trial = counter == "failures" and provider_id in _trials
    if is_trial:
        _trials.discard(provider_id)
    failures = row.failures if counter == "failures" else row.failed_checks
    # What had been sent before it opened may fail late; that says nothing new.
    is_late = row.state == CircuitBreaker.State.OPEN and not is_trial
    # A trial that fails is enough: how long ago the failures before it were says nothing.
    is_enough = failures >= THRESHOLD or (is_trial and row.state == CircuitBreaker.State.OPEN)
    if is_late or not is_enough:
        return
    wait = min(RETRY_AFTER * 2 ** min(row.openings, 10), LONGEST_RETRY)
    # One of those who fail at once opens it: the others find another count of openings.
    opened = mine.filter(openings=row.openings).update(
        state=CircuitBreaker.State.OPEN,
        openings=F("openings") + 1,
        retry_at=now + wait,
    )
    if opened:
        logger.warning(
            "provider %s is out of service for %d s. %s: %s",
            provider_id,
            wait.total_seconds(),
            error.code,
            error.message,
        )


def give_back(provider_id: str) -> None:
    """Whoever was admitted as a trial has not tried. The next one may."""
    if provider_id in _trials:
        _trials.discard(provider_id)
        let_one_try(provider_id)


def let_one_try(provider_id: str) -> None:
    """Have the next request to an open breaker be its trial, because a probe gives hope."""
    CircuitBreaker.objects.filter(provider_id=provider_id, state=CircuitBreaker.State.OPEN).update(
        retry_at=timezone.now()
    )


def latencies() -> dict[str, float]:
    """What is known of each provider's latency, in milliseconds."""
    rows = CircuitBreaker.objects.exclude(latency_ms=None)
    known = {row.provider_id: row.latency_ms for row in rows if row.latency_ms is not None}
    with _lock:
        return known | {provider_id: value for provider_id, (value, _) in _latencies.items()}


def _note_latency(provider_id: str, latency_ms: float) -> None:
    now = time.monotonic()
    with _lock:
        value, written = _latencies.get(provider_id, (latency_ms, 0.0))
        value += LATENCY_SHARE * (latency_ms - value)
        due = not written or now - written >= FLUSH_SECONDS
        _latencies[provider_id] = (value, now if due else written)
    if due:
        CircuitBreaker.objects.update_or_create(
            provider_id=provider_id, defaults={"latency_ms": value}
        )


def forget() -> None:
    """Drop what this process remembers; what is shared stays."""
    with _lock:
        _latencies.clear()
    _troubled.clear()
    _trials.clear()


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
