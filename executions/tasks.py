"""What the workers are asked to do, by dotted name. Rules live in the services."""

from __future__ import annotations

from executions.services import spending, stale, worker
from providers.services import probe


def run_queued_execution(execution_id: str) -> None:
    worker.run_queued(execution_id)


def end_stale_executions() -> int:
    return stale.end_stale_executions()


def probe_providers() -> int:
    return probe.probe_providers()


def sweep_leftovers() -> int:
    return probe.sweep_leftovers()


def watch_spending() -> int:
    return spending.watch_spending()
