"""What the workers are asked to do, by dotted name. Rules live in the services."""

from __future__ import annotations

from executions.services import stale, worker


def run_queued_execution(execution_id: str) -> None:
    worker.run_queued(execution_id)


def end_stale_executions() -> int:
    return stale.end_stale_executions()
