"""Tools as a capability: a run whose code calls functions of its caller."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from uuid import UUID

from django.urls import URLPattern, path

from executions.capabilities.tools import calls
from executions.capabilities.tools.calls import ToolCallDispatcher
from executions.runs.event_log import EventLog
from executions.runs.extensions import Extension, RunPart
from executions.runs.models import Execution
from executions.runs.requests import ExecutionRequest
from executions.runs.results import TOOL_CALLS
from executions.runs.routing import takes_tools
from providers.errors import InvalidConfiguration
from providers.manager import Lease
from providers.values import Emit, Event, Job, SandboxSpec


class _RunWithTools(RunPart):
    """A run that calls tools: a provider that supports them, a sandbox that can be talked to while
    code runs, and the dispatcher of its calls."""

    def __init__(
        self, execution: Execution, request: ExecutionRequest, log: EventLog | None
    ) -> None:
        self._execution = execution
        self._request = request
        self._log = log
        self._dispatcher: ToolCallDispatcher | None = None

    def check_provider(self, lease: Lease) -> None:
        # The only provider of a route was not looked at before.
        if not takes_tools(lease):
            raise InvalidConfiguration(
                f"tools: The provider {lease.provider_id!r} does not support tools.",
                field="tools",
            )

    def specify(self, spec: SandboxSpec, *, seconds: float) -> SandboxSpec:
        return replace(spec, kept=True, seconds=seconds)

    def prepare(self, job: Job, sandbox: Any, emit: Emit | None) -> tuple[Job, Emit | None]:
        run = self._execution.pk.hex
        answer = sandbox.answer
        if self._execution.session_id is None:
            # A cell calls `main` only where it is given something.
            job = replace(job, arguments=self._request.arguments or {})
            answer = partial(sandbox.answer, run)
        tools = self._request.tools
        dispatcher = self._dispatcher = ToolCallDispatcher(
            self._execution, tools, self._log, answer
        )

        def tell(event: Event) -> None:
            if isinstance(event, Event) and event.type == "tool_call":
                dispatcher.take(event)
            elif emit is not None:
                emit(event)

        return replace(job, tools=[tool.name for tool in tools], run=run), tell

    def close(self) -> None:
        if self._dispatcher is not None:
            self._dispatcher.close()

    def result_metadata(self) -> Mapping[str, Any]:
        return {TOOL_CALLS: self._dispatcher.taken} if self._dispatcher is not None else {}


class ToolCalls(Extension):
    pages = ("executions.capabilities.tools.admin",)
    fields = ("tools",)

    def urls(self) -> Sequence[URLPattern]:
        from executions.capabilities.tools.api import ToolCallsView, ToolCallView

        calls_of = "api/v1/executions/<uuid:execution_id>/tool_calls"
        one = f"{calls_of}/<uuid:call_id>"
        return (
            path(calls_of, ToolCallsView.as_view(), name="execution-tool-calls"),
            path(one, ToolCallView.as_view(), name="execution-tool-call"),
        )

    def begin(
        self, execution: Execution, request: ExecutionRequest, log: EventLog | None
    ) -> RunPart | None:
        return _RunWithTools(execution, request, log) if request.tools else None

    def vouches_for(self, execution_id: UUID, event_type: str, said: Mapping[str, Any]) -> bool:
        """Return whether the ledger knows the call: who hears of it carries it out."""
        return event_type == "tool_call" and calls.was_handed_out(execution_id, said)

    def on_lost(self, execution: Execution) -> None:
        calls.give_up(execution.pk)


CAPABILITY = ToolCalls()
