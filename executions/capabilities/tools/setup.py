"""What a run needs whose code may call tools: who takes that, a sandbox that stays, and a desk."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from executions.capabilities.tools.dispatcher import ToolCallDispatcher
from executions.runs.event_log import EventLog
from executions.runs.models import Execution
from executions.runs.requests import ExecutionRequest
from executions.runs.routing import takes_tools
from providers.errors import InvalidConfiguration
from providers.manager import Lease
from providers.values import Emit, Event, Job, SandboxSpec

# The key of a record's metadata under which it says how often its code called tools.
TOOL_CALLS = "tool_calls"


def require_tools(lease: Lease, request: ExecutionRequest) -> None:
    """Raises InvalidConfiguration where the provider runs no code that calls tools: the only one of
    a route is not looked at before."""
    if request.tools and not takes_tools(lease):
        raise InvalidConfiguration(
            f"tools: The provider {lease.provider_id!r} does not support tools.",
            field="tools",
        )


def kept_for(spec: SandboxSpec, seconds: float) -> SandboxSpec:
    """A sandbox for a single run: only one that is kept is talked to while code runs."""
    return replace(spec, kept=True, seconds=seconds)


def offer_tools(
    execution: Execution,
    request: ExecutionRequest,
    job: Job,
    sandbox: Any,
    log: EventLog | None,
) -> tuple[ToolCallDispatcher, Job, Emit]:
    """The desk for the run's calls, the job as such code is run, and who hears of its events."""
    run = execution.pk.hex
    answer = sandbox.answer
    if execution.session_id is None:
        # A cell calls `main` only where it is given something.
        job = replace(job, arguments=request.arguments or {})
        answer = partial(sandbox.answer, run)
    desk = ToolCallDispatcher(execution, request.tools, log, answer)

    def tell(event: Event) -> None:
        if isinstance(event, Event) and event.type == "tool_call":
            desk.take(event)
        elif log is not None:
            log.emit(event)

    return desk, replace(job, tools=[tool.name for tool in request.tools], run=run), tell
