"""Running code from within this process: `execute_code(code)`, recorded like any other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from executions.runs.provider_calls import Route
from executions.runs.requests import Caller, ExecutionRequest
from executions.runs.service import execute_sync
from executions.tenants.service import internal_tenant
from providers.errors import ProviderUnavailable
from providers.values import ExecutionResult


def execute_code(
    code: str,
    language: str = "python",
    timeout: float = 30,
    arguments: Mapping[str, Any] | None = None,
) -> ExecutionResult:
    """Run code with the active provider and wait for it, at most `timeout` seconds.

    With `arguments`, `main(**arguments)` is called and what it returns is the result. Code that
    fails, runs too long or needs too much memory is a result too. Raises SandboxError when the
    request is refused or could not be carried out.
    """
    request = ExecutionRequest(code, language=language, timeout=timeout, arguments=arguments)
    return run_in_process(request)


def run_in_process(request: ExecutionRequest, route: Route | None = None) -> ExecutionResult:
    """Run and record a request of this process's own, for which no API key vouches."""
    outcome = execute_sync(request, Caller(internal_tenant()), route=route)
    if outcome.error is not None:
        raise outcome.error
    if outcome.result is None:
        raise ProviderUnavailable("The request was queued; only synchronous ones have a result.")
    return outcome.result
