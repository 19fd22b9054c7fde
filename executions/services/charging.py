"""The end of what ran: its record is closed, and what it cost is spent in the same transaction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from django.db import transaction
from django.utils import timezone

from executions.models.artifact import Artifact
from executions.models.execution import Execution
from executions.services.record import close_record
from executions.services.spending import cost_of, spend


def record_end(
    execution: Execution,
    status: Execution.Status,
    values: Mapping[str, Any],
    artifacts: Sequence[Artifact] = (),
    *,
    only_if: str = "",
) -> bool:
    """Close what ran and count what it cost. As `close_record`."""
    cost = values.get("cost")
    if not cost:
        return close_record(execution, status, values, artifacts, only_if=only_if)
    with transaction.atomic():
        won = close_record(execution, status, values, artifacts, only_if=only_if)
        if won:
            spend(execution.tenant_slug, cost)
    return won


def end_by_others(
    execution: Execution, status: Execution.Status, changes: Mapping[str, Any], *, only_if: str = ""
) -> bool:
    """Close what no run of ours closes. As `close_record`.

    What runs in the background costs its time until now: nobody measures it but who closes its
    record. What the rest cost is told, and spent, by who runs it (`late_results`).
    """
    return record_end(execution, status, {**changes, **_until_now(execution)}, only_if=only_if)


def _until_now(execution: Execution) -> dict[str, Any]:
    # One without a number was not started, or is being ended by who has just started it.
    if not execution.background or execution.pid is None:
        return {}
    ran = timezone.now() - execution.created_at
    milliseconds = round(ran.total_seconds() * 1000, 3)
    cost = cost_of(execution.provider, {"start_ms": 0.0, "run_ms": milliseconds})
    return {"run_ms": milliseconds, "total_ms": milliseconds, "cost": cost}
