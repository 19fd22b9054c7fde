"""Trying a configuration out: really starting a sandbox with it and running code there.

A request that starts a provider for itself holds a thread of the web server while it waits. So that
some are left for others, only a few such requests may wait at once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from django.conf import settings
from django.views.decorators.debug import sensitive_variables

from providers import registry
from providers.addresses import check_resolved, given_addresses
from providers.base import SandboxProvider
from providers.errors import NotInitialized, ProviderUnavailable, RateLimited, SandboxError
from providers.isolation import IsolationUnmet, meets, of_sandbox
from providers.languages import probe_of
from providers.models import ProviderConfig
from providers.services.breaker import NOT_REACHABLE, STEP_SECONDS, told
from providers.services.configuration import merged_config, stored_config
from providers.services.history import SYSTEM
from providers.signals import configuration_tried
from providers.threads import start_thread
from providers.values import Job, SandboxSpec

DEADLINE_SECONDS = 45.0
# Tries whose time was over and that still go on. Each holds a thread.
MOST_LEFT = 8
RUN_SECONDS = 10.0

EXPECTED = "42"
_left: set[threading.Thread] = set()
_counting = threading.Lock()


@dataclass(frozen=True)
class Trial:
    """How a try went.

    `latency_ms` is from asking for a sandbox to having the program's output; without success,
    to its failure. `runtime` is what isolates, `isolation` how strongly. `code` is the SB code of a
    failure. `errors` maps refused fields to their messages.
    """

    success: bool
    message: str
    latency_ms: float | None = None
    runtime: str = ""
    language: str = ""
    code: str = ""
    field: str = ""
    isolation: str = ""
    errors: Mapping[str, str] | None = None

    def as_json(self) -> dict[str, Any]:
        return {
            "success": self.success,
            "message": self.message,
            "latency_ms": self.latency_ms,
            "runtime": self.runtime or None,
            "isolation": self.isolation or None,
            "language": self.language or None,
            "code": self.code or None,
            "field": self.field or None,
            "errors": dict(self.errors or {}),
        }


@sensitive_variables()
def try_provider(
    provider_id: str,
    config: Mapping[str, Any] | None = None,
    *,
    clear: tuple[str, ...] = (),
    author: str = SYSTEM,
) -> Trial:
    """Start the provider apart from the one in service, run a program, end it.

    Without `config` the stored one is tried; with it, secrets that came masked or empty are the
    stored ones, as long as they go where they went. Whoever listens to `configuration_tried` is
    told before anything is connected to; when he raises, nothing is. Never raises for what a
    backend does, and gives up after `DEADLINE_SECONDS`. Raises InvalidConfiguration only for an
    unknown provider.
    """
    provider_class = registry.get(provider_id)
    row = ProviderConfig.objects.defer("config").filter(provider_id=provider_id).first()
    try:
        stored = stored_config(row) or {}
        merged = merged_config(provider_class, stored if config is None else config, stored, clear)
    except SandboxError as error:
        return Trial(
            False,
            error.message,
            code=error.code,
            field=error.field or "",
            errors=getattr(error, "errors", None),
        )
    try:
        with waiting_apart():
            configuration_tried.send(
                sender=ProviderConfig,
                provider_id=provider_id,
                author=author,
                addresses=given_addresses(provider_class.config_fields, merged),
                stored=config is None,
            )
            began = perf_counter()
            trial = _bounded(provider_class, merged)
            if trial.message == NOT_REACHABLE:
                # When it failed would tell how.
                time.sleep(-(perf_counter() - began) % STEP_SECONDS)
            return trial
    except RateLimited as error:
        return Trial(False, error.message, code=error.code)


@sensitive_variables()
def _bounded(provider_class: type[SandboxProvider], config: dict[str, Any]) -> Trial:
    # A thread of its own, because a backend that never answers must not keep the caller.
    outcome: list[Trial] = []
    with _counting:
        _left.difference_update([thread for thread in _left if not thread.is_alive()])
        if len(_left) >= MOST_LEFT:
            raise RateLimited(
                f"{MOST_LEFT} tests have timed out and still wait for an answer. Try again later.",
            )
    worker = start_thread("trial", lambda: outcome.append(_try(provider_class, config)))
    worker.join(DEADLINE_SECONDS)
    if outcome:
        return outcome[0]
    with _counting:
        _left.add(worker)
    error = ProviderUnavailable(f"It did not answer within {DEADLINE_SECONDS:g} s.")
    return _failed(told(provider_class, config, error), DEADLINE_SECONDS * 1000)


@sensitive_variables()
def _try(provider_class: type[SandboxProvider], config: dict[str, Any]) -> Trial:
    provider = provider_class()
    began = perf_counter()
    try:
        check_resolved(provider_class.config_fields, config)
        if not provider.initialize_apart(config):
            raise NotInitialized("The provider did not start.")
        try:
            return _run(provider)
        finally:
            provider.close()
    except BaseException as error:
        return _failed(told(provider_class, config, error), _ms_since(began))


def _failed(error: SandboxError, latency_ms: float) -> Trial:
    return Trial(
        False,
        error.message,
        None if error.message == NOT_REACHABLE else latency_ms,
        code=error.code,
        field=error.field or "",
    )


def _run(provider: SandboxProvider) -> Trial:
    found = probe_of(provider.get_supported_languages())
    if found is None:
        raise ProviderUnavailable("There is no test program for its languages.")
    language, program = found
    began = perf_counter()
    sandbox = provider.open(SandboxSpec(language), "connection-test")
    try:
        isolation, _ = of_sandbox(provider, sandbox)
        if not meets(isolation, settings.MINIMUM_ISOLATION):
            raise IsolationUnmet(
                f"Its sandboxes have the isolation {isolation}, and MINIMUM_ISOLATION is "
                f"{settings.MINIMUM_ISOLATION}, so it would run nothing. A provider that "
                "declares no isolation counts as none."
            )
        result = sandbox.run(Job(program, language, RUN_SECONDS, entrypoint="script"))
        latency = _ms_since(began)
    finally:
        sandbox.close()
    runtime = str(result.metadata.get("runtime") or sandbox.metadata.get("runtime") or "")
    if result.timed_out:
        return Trial(
            False,
            "The test program did not finish in time.",
            latency,
            runtime,
            language,
            "SB005",
            isolation=isolation,
        )
    if result.stdout.strip() != EXPECTED:
        message = f"The test program printed {result.stdout[:80]!r} and not {EXPECTED!r}."
        return Trial(False, message, latency, runtime, language, "SB009", isolation=isolation)
    message = f"A sandbox was started and ran {language}."
    return Trial(True, message, latency, runtime, language, isolation=isolation)


def _ms_since(began: float) -> float:
    return round((perf_counter() - began) * 1000, 1)


AT_ONCE = 4
RETRY_AFTER_SECONDS = 10.0

_places = threading.BoundedSemaphore(AT_ONCE)


@contextmanager
def waiting_apart() -> Iterator[None]:
    """Hold one of the places. Raises RateLimited when all are taken."""
    if not _places.acquire(blocking=False):
        raise RateLimited(
            f"{AT_ONCE} providers are being started for tests or replays. Try again later.",
            retry_after=RETRY_AFTER_SECONDS,
        )
    try:
        yield
    finally:
        _places.release()
