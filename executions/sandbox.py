"""A sandbox for code that runs in this process: `get_sandbox().execute(code)`.

`SANDBOX_TYPE` names the kind of sandbox, whichever provider is active for the API.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from django.conf import settings

from executions.client import run_in_process
from executions.runs.provider_calls import Route
from executions.runs.requests import ExecutionRequest
from providers import registry
from providers.errors import InvalidConfiguration, ProviderUnavailable
from providers.leases import lease_of

_PROVIDERS = {"local": "local", "docker": "self_managed", "e2b": "e2b"}

# A sandbox for this process needs no service beside it.
_OVERRIDES = {"docker": {"without_service": "in_process"}}


_TIMED_OUT = -1


@dataclass(frozen=True)
class SandboxResult:
    """What came of the code. `duration` is seconds.

    Of code that ran too long `exit_code` is -1, and `stderr` ends with "Execution timed out"; where
    something else ended it, `exit_code` is None.
    """

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
        """Run code and wait for it, at most `timeout` seconds, the provider's own when None.

        Code that fails or runs too long is a result. Raises SandboxError when it could not run.
        """
        request = ExecutionRequest(code, language=language, timeout=timeout)
        result = run_in_process(request, self.route)
        return SandboxResult(
            stdout=result.stdout,
            stderr=_told(result.stderr) if result.timed_out else result.stderr,
            exit_code=_TIMED_OUT if result.timed_out else result.exit_code,
            duration=result.execution_time,
            truncated=result.truncated,
            timed_out=result.timed_out,
            meta=result.metadata,
        )


def _told(stderr: str) -> str:
    return f"{stderr.rstrip()}\nExecution timed out".lstrip("\n")


def get_sandbox() -> Sandbox:
    """The sandbox `SANDBOX_TYPE` asks for, in whatever case, `local` when it is empty.

    Raises InvalidConfiguration for a type there is not, ProviderUnavailable for one whose
    provider is not installed. There is no falling back to another.
    """
    sandbox_type = settings.SANDBOX_TYPE.lower() or "local"
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
    return Sandbox(provider_id, lambda *, wait=True: lease_of(provider_id, overrides, wait=wait))
