"""A sandbox for code that runs in this process: `get_sandbox().execute(code)`.

`SANDBOX_TYPE` names the kind of sandbox, whichever provider is active for the API.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from django.conf import settings

from executions.client import run_in_process
from executions.services.requests import ExecutionRequest
from executions.services.run import Route
from providers import registry
from providers.errors import InvalidConfiguration, ProviderUnavailable
from providers.manager import Lease, ProviderManager, _Slot, manager
from providers.models import ProviderConfig

_PROVIDERS = {"local": "local", "docker": "self_managed", "e2b": "e2b"}

# A sandbox for this process needs no service beside it.
_OVERRIDES = {"docker": {"without_service": "in_process"}}


@dataclass(frozen=True)
class SandboxResult:
    """What came of the code. `duration` is seconds; `exit_code` is None when we ended the code."""

    stdout: str
    stderr: str
    exit_code: int | None
    duration: float
    truncated: bool = False
    timed_out: bool = False
    meta: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Sandbox:
    """One kind of sandbox. Every execution gets a fresh one, and a record."""

    provider_id: str
    route: Route = field(repr=False)

    def execute(
        self, code: str, language: str = "python", timeout: float | None = None
    ) -> SandboxResult:
        """Run code and wait for it, at most `timeout` seconds (`SANDBOX_TIMEOUT_SEC` when None).

        Code that fails or runs too long is a result. Raises SandboxError when it could not run.
        """
        request = ExecutionRequest(code, language=language, timeout=timeout)
        result = run_in_process(request, self.route)
        return SandboxResult(
            stdout=result.stdout,
            stderr=result.stderr,
            exit_code=result.exit_code,
            duration=result.execution_time,
            truncated=result.truncated,
            timed_out=result.timed_out,
            meta=result.metadata,
        )


def get_sandbox() -> Sandbox:
    """The sandbox `SANDBOX_TYPE` asks for, `local` when it is empty.

    Raises InvalidConfiguration for a type there is not, ProviderUnavailable for one whose
    provider is not installed. There is no falling back to another.
    """
    sandbox_type = settings.SANDBOX_TYPE or "local"
    if sandbox_type not in _PROVIDERS:
        raise InvalidConfiguration(
            f"SANDBOX_TYPE: There is no {sandbox_type!r}. Known: {', '.join(_PROVIDERS)}.",
            field="SANDBOX_TYPE",
        )
    provider_id = _PROVIDERS[sandbox_type]
    try:
        provider = registry.get(provider_id)
    except InvalidConfiguration as error:
        raise ProviderUnavailable(
            f"SANDBOX_TYPE={sandbox_type} needs the provider {provider_id!r}. {error.message} "
            "Install it, or choose another SANDBOX_TYPE.",
            field="SANDBOX_TYPE",
        ) from error
    overrides = {
        name: value
        for name, value in _OVERRIDES.get(sandbox_type, {}).items()
        if name in provider.config_fields
    }
    return Sandbox(provider_id, _route(provider_id, overrides))


def _route(provider_id: str, overrides: Mapping[str, Any]) -> Route:
    def lease() -> AbstractContextManager[Lease]:
        active = ProviderConfig.objects.filter(is_active=True, provider_id=provider_id).exists()
        # What is active follows its configuration as it is stored.
        shared = active and not overrides
        return manager.lease() if shared else _named(provider_id, overrides).lease()

    return lease


class _NamedManager(ProviderManager):
    """Lends one provider whether it is active or not, by its stored configuration or defaults.

    `overrides` hold in place of what is stored.
    """

    def __init__(self, provider_id: str, overrides: Mapping[str, Any]) -> None:
        self._provider_id = provider_id
        self._overrides = overrides
        super().__init__()

    def _look(self) -> tuple[_Slot, ProviderConfig] | None:
        row = ProviderConfig.objects.filter(provider_id=self._provider_id).first()
        if row is None:
            row = ProviderConfig(provider_id=self._provider_id, version=0, config={})
        row.config = {**row.config, **self._overrides}
        key = (row.pk or 0, row.version)
        return (self._put_in_force(_Slot(key)), row) if self._is_news(key) else None


_managers: dict[str, _NamedManager] = {}
_managers_lock = threading.Lock()


def _named(provider_id: str, overrides: Mapping[str, Any]) -> _NamedManager:
    with _managers_lock:
        if provider_id not in _managers:
            _managers[provider_id] = _NamedManager(provider_id, overrides)
            atexit.register(_managers[provider_id].close)
        return _managers[provider_id]
