"""What sessions add to runs: where a cell runs, its turn, and the ends of processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

from executions.kernel.coroutines import Coroutine
from executions.runs.event_log import EventLog
from executions.runs.extensions import Extension, Placement, RunPart, Waiting
from executions.runs.models import Execution
from executions.runs.provider_calls import Step
from executions.runs.requests import Caller, ExecutionRequest
from executions.sessions import cell_order, due
from executions.sessions.cells import cell_of, steps_of_queued
from executions.sessions.commands import stop_command
from executions.sessions.maintenance import maintain_in_background
from executions.sessions.storage.wake import RESTORED


class _Turn(RunPart):
    """The turn of one cell in its context."""

    def admit(
        self, request: ExecutionRequest, execution: Execution, waiting: Waiting = nullcontext
    ) -> Coroutine[None]:
        return cell_order.wait_turn(execution, waiting)


class Sessions(Extension):
    """Registered behind all capabilities: a cell waits for its turn once it may run at all."""

    metadata_keys = (RESTORED,)

    def place(self, request: ExecutionRequest, caller: Caller) -> Placement | None:
        return cell_of(request.session, request, caller) if request.session is not None else None

    def place_queued(self, request: ExecutionRequest) -> Sequence[Step] | None:
        session_id = request.session
        return steps_of_queued(session_id, request) if session_id is not None else None

    def before_insert(self, execution: Execution) -> None:
        if execution.session_id is not None:
            cell_order.enqueue(execution)

    def begin(
        self, execution: Execution, request: ExecutionRequest, log: EventLog | None
    ) -> RunPart | None:
        return _Turn() if execution.session_id is not None else None

    def stop_process(self, execution: Execution) -> Coroutine[None]:
        return stop_command(execution)

    def after_run(self, execution: Execution) -> None:
        if execution.session_id is not None:
            cell_order.ended(execution)

    def start_worker(self, goes_on: Callable[[], bool]) -> None:
        due.begin()
        maintain_in_background(goes_on)
