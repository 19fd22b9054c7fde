"""Executions that are held open for a test, as those of processes elsewhere would be."""

from __future__ import annotations

from typing import Any

from executions.runs.models import Execution
from executions.runs.record import close_record, open_record
from executions.runs.requests import Caller as By
from executions.runs.requests import ExecutionRequest
from tests.conftest import Caller


def opened(caller: Caller, mode: str = "sync", **request: Any) -> Execution:
    """A record whose code nobody runs. Raises what `open_record` does."""
    asked = ExecutionRequest(request.pop("code", "pass"), mode=mode, **request)
    return open_record(asked, By.of_key(caller.api_key))[0]


def ended(execution: Execution, **changes: Any) -> None:
    assert close_record(execution, Execution.Status.SUCCEEDED, {"exit_code": 0, **changes})


def bounded(caller: Caller, **bounds: int | None) -> None:
    """Give the caller's tenant bounds of its own."""
    for name, bound in bounds.items():
        setattr(caller.tenant, name, bound)
    caller.tenant.save()
