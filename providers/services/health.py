"""Looks at every configured provider in the background, ends what our processes left at services,
and reduces what a provider says of its pool to known numbers and short names: it is the word of
whatever service is asked.
"""

from __future__ import annotations

import logging
import math
import re
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from time import monotonic, perf_counter
from typing import Any

from django.db.models import F
from django.utils import timezone
from django.views.decorators.debug import sensitive_variables

from providers import registry
from providers.addresses import check_resolved
from providers.base import SandboxProvider
from providers.errors import (
    ConnectionFailed,
    InvalidConfiguration,
    ProviderUnavailable,
    SandboxError,
)
from providers.leases import lease_of
from providers.models import ProviderCheckCount, ProviderConfig, ProviderHealth, RouteStep
from providers.schema import Schema
from providers.services import breaker
from providers.services.breaker import NOT_REACHABLE, STEP_SECONDS, told
from providers.services.configuration import Unreadable, stored_config
from providers.threads import NoThreadLeft, start_thread

logger = logging.getLogger(__name__)

# Less than the minute until the next check.
CHECK_SECONDS = 30.0
# Of the counts by the hour, which availability is told from.
KEPT_HOURS = 24 * 90

_going_on: set[str] = set()
_lock = threading.Lock()


def check_all() -> int:
    """Check each configured provider and note what came of it. How many are healthy.

    A provider is started apart from the one in service, asked for its health, and closed: no
    sandbox is bought from a service that charges for them. All are asked at once, and one that does
    not answer within CHECK_SECONDS is not healthy; nor is it asked again until it has. The breakers
    of those that a route names are told.
    """
    rows = list(ProviderConfig.objects.defer("config"))
    ProviderHealth.objects.exclude(provider_id__in=[row.provider_id for row in rows]).delete()
    long_ago = timezone.now() - timedelta(hours=KEPT_HOURS)
    ProviderCheckCount.objects.filter(hour__lt=long_ago).delete()
    routed = set(RouteStep.objects.values_list("provider__provider_id", flat=True))
    deadline = monotonic() + CHECK_SECONDS
    looks = [(row, _begin(row)) for row in rows]
    return sum(
        _note(row, _found(row.provider_id, look, deadline), tell_breaker=row.provider_id in routed)
        for row, look in looks
    )


@dataclass(frozen=True)
class _Found:
    """Why a provider cannot serve now, without a secret; None when it can.

    Then `enforced_by` says what holds its runs.
    """

    failure: SandboxError | None
    enforced_by: str
    latency_ms: float
    figures: dict[str, Any] = field(default_factory=dict)


@sensitive_variables()
def _begin(row: ProviderConfig) -> Future[_Found] | None:
    """None while an earlier look has not ended."""
    try:
        return _look_in_background(row.provider_id, stored_config(row) or {})
    except Unreadable as error:
        # The others are looked at all the same.
        return _ended(error)


def _ended(failure: SandboxError) -> Future[_Found]:
    found: Future[_Found] = Future()
    found.set_result(_Found(failure, "", 0.0))
    return found


@sensitive_variables()
def _look_in_background(provider_id: str, config: dict[str, Any]) -> Future[_Found] | None:
    with _lock:
        if provider_id in _going_on:
            return None
        _going_on.add(provider_id)
    found: Future[_Found] = Future()
    looked: list[_Found] = []

    def look() -> None:
        began = perf_counter()
        failure, enforced_by, figures = _look_at(provider_id, config)
        latency_ms = (perf_counter() - began) * 1000
        looked.append(_Found(failure, enforced_by, latency_ms, figures))

    def note_end() -> None:
        with _lock:
            _going_on.discard(provider_id)
        if looked:
            found.set_result(looked[0])

    try:
        start_thread("health", look, at_end=note_end)
    except NoThreadLeft as error:
        # It says nothing against the provider, so it is a failure that no breaker counts.
        return _ended(error)
    return found


def _found(provider_id: str, look: Future[_Found] | None, deadline: float) -> _Found:
    if look is not None:
        with suppress(TimeoutError):
            return look.result(max(0.0, deadline - monotonic()))
    logger.warning("provider %s has not answered a check in its time", provider_id)
    return _Found(ConnectionFailed(NOT_REACHABLE), "", CHECK_SECONDS * 1000)


def _note(row: ProviderConfig, found: _Found, *, tell_breaker: bool) -> bool:
    failure, latency_ms = found.failure, found.latency_ms
    if failure and failure.message == NOT_REACHABLE:
        latency_ms += -latency_ms % (STEP_SECONDS * 1000)
    good, now = int(failure is None), timezone.now()
    values = {
        "config_version": row.version,
        "healthy": failure is None,
        "code": failure.code if failure else "",
        "message": (failure.message if failure else found.enforced_by)[:500],
        "latency_ms": round(latency_ms, 1),
        "checked_at": now,
        "figures": found.figures,
    }
    ProviderHealth.objects.update_or_create(
        provider_id=row.provider_id,
        defaults={**values, "checks": F("checks") + 1, "good_checks": F("good_checks") + good},
        create_defaults={**values, "checks": 1, "good_checks": good},
    )
    hour = now.replace(minute=0, second=0, microsecond=0)
    ProviderCheckCount.objects.get_or_create(provider_id=row.provider_id, hour=hour)
    ProviderCheckCount.objects.filter(provider_id=row.provider_id, hour=hour).update(
        checks=F("checks") + 1, good_checks=F("good_checks") + good
    )
    if tell_breaker:
        breaker.report_check(row.provider_id, failure)
    return failure is None


@sensitive_variables()
def _look_at(
    provider_id: str, stored: dict[str, Any]
) -> tuple[SandboxError | None, str, dict[str, Any]]:
    """Why it cannot serve now, without a secret; None when it can, and then what holds its runs.

    And what it says of its pool.
    """
    config: dict[str, Any] = {}
    try:
        provider_class = registry.get(provider_id)
        config = provider_class.check_config(stored)
        check_resolved(provider_class.config_fields, config)
        provider = provider_class()
        provider.initialize_apart(config)
        try:
            health = provider.health_check()
            # What a pool of each host has is told by the processes of the host.
            own = {} if provider.pool_figures() else figures_of(health.details)
        finally:
            provider.close()
        figures = own | region_of(provider_class.config_fields, config)
        if health:
            return None, in_words(health.details.get("enforced_by")), figures
        unhealthy = ProviderUnavailable(health.message)
        unhealthy.answered = health.answered
        return told(provider_class, config, unhealthy), "", figures
    except SandboxError as error:
        return (told(provider_class, config, error) if config else error), "", {}
    except BaseException as error:
        return told(provider_class, config, error), "", {}


def in_words(enforced_by: object) -> str:
    """What a provider says of who enforces what, in one line."""
    if not isinstance(enforced_by, Mapping):
        return ""
    return "; ".join(f"{str(name).replace('_', ' ')}: {by}" for name, by in enforced_by.items())


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


# Of a pool: what it has now, and what it has counted since it began.
NUMBERS = (
    *("capacity", "busy", "idle", "kept", "creating", "ending", "waiting"),
    *("started", "failed", "restarts", "refused", "creation_ms"),
)
# Of each host of several: texts, and how much of them.
MOST_HOSTS = 100
_OF_A_HOST = {"address": 500, "state": 40, "problem": 300}
_RUNTIME = re.compile(r"[A-Za-z0-9._ -]{1,32}")
_REGION = re.compile(r"[A-Za-z0-9._-]{1,64}")


def figures_of(details: Mapping[str, Any]) -> dict[str, Any]:
    """Of `Health.details`; empty for what keeps no pool."""
    found = _known(details, NUMBERS)
    hosts = details.get("hosts")
    if isinstance(hosts, list):
        found["hosts"] = [_host(each) for each in hosts[:MOST_HOSTS] if isinstance(each, Mapping)]
    return found if "capacity" in found else {}


def _host(said: Mapping[str, Any]) -> dict[str, Any]:
    texts = {name: str(said.get(name, ""))[:most] for name, most in _OF_A_HOST.items()}
    return {**texts, **_known(said, (*NUMBERS, "sessions"))}


def _known(said: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Those of these numbers that are some, and the runtime."""
    found: dict[str, Any] = {}
    for name in names:
        value = said.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            number = float(value)
            if math.isfinite(number) and 0 <= number < 2**53:
                found[name] = value
    runtime = said.get("runtime")
    if isinstance(runtime, str) and _RUNTIME.fullmatch(runtime):
        found["runtime"] = runtime
    return found


def region_of(fields: Schema, config: Mapping[str, Any]) -> dict[str, str]:
    """Where a service is, by its configuration, which says so in no secret."""
    declared, region = fields.get("region"), config.get("region")
    if declared is None or declared.secret or not isinstance(region, str):
        return {}
    return {"region": region} if _REGION.fullmatch(region) else {}
