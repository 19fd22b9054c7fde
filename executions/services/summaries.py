"""An execution in short, as lists and webhooks tell it."""

from __future__ import annotations

from typing import Any

from executions.kernel.text import from_json
from executions.models.execution import Execution
from executions.models.late_result import LateResult
from executions.services.claims import CLAIMS
from providers.values import ARTIFACTS_SKIPPED, OUTPUTS_SKIPPED


def execution_summary(execution: Execution) -> dict[str, Any]:
    """What a list shows of an execution: everything but the parts that may be large."""
    return {
        "id": str(execution.pk),
        "status": execution.status,
        **place_of(execution),
        "mode": execution.mode,
        "priority": execution.Priority(execution.priority).label,
        "language": execution.language,
        "provider": execution.provider,
        "runtime": execution.runtime,
        "isolation": execution.isolation,
        "sharing": execution.sharing,
        "exit_code": execution.exit_code,
        "error": error_of(execution),
        "timings": timings_of(execution),
        "created_at": execution.created_at.isoformat(),
        **plan_of(execution),
    }


def place_of(execution: Execution) -> dict[str, Any]:
    """Where it ran, which is null outside sessions, and who asked for it."""
    return {
        "session": str(execution.session_id) if execution.session_id else None,
        "context": execution.context or None,
        "context_kept": execution.context_kept,
        "pid": execution.pid,
        **{name: getattr(execution, name) or None for name in (*CLAIMS, "traceparent")},
    }


def error_of(execution: Execution | LateResult) -> dict[str, str] | None:
    """The verdict that it ended with; None for one that ran to its end."""
    if not execution.error_code:
        return None
    return {"code": execution.error_code, "message": execution.error_message}


def omissions_of(execution: Execution) -> dict[str, list[dict[str, str]]]:
    """What was left out of its files and of its outputs, each with the reason."""
    return {
        key: [
            {"name": name, "reason": reason} for name, reason in _entries(execution.meta.get(key))
        ]
        for key in (ARTIFACTS_SKIPPED, OUTPUTS_SKIPPED)
    }


def omission_lines(execution: Execution) -> list[str]:
    """The same, as a line for each."""
    return [
        _line(f"{what}{entry['name']}", entry["reason"]) if entry["name"] else entry["reason"]
        for what, key in (("file ", ARTIFACTS_SKIPPED), ("", OUTPUTS_SKIPPED))
        for entry in omissions_of(execution)[key]
    ]


def _line(name: str, reason: str) -> str:
    return f"{name} was {reason if reason.startswith('cut: ') else f'left out: {reason}'}"


def _entries(kept: Any) -> list[list[str]]:
    return kept if isinstance(kept, list) else []


def exception_of(execution: Execution) -> dict[str, str] | None:
    """What ended its program, by its own account: type, message, traceback. None where nothing is
    known of it, or it was erased."""
    if not execution.exception:
        return None
    told: dict[str, str] = from_json(execution.exception)
    return told


def plan_of(execution: Execution) -> dict[str, str | None]:
    """The time that it was asked for at, null for as soon as possible, and the schedule that has
    begun it."""
    return {
        "run_at": execution.run_at.isoformat() if execution.run_at else None,
        "schedule": str(execution.schedule_id) if execution.schedule_id else None,
    }


def timings_of(execution: Execution) -> dict[str, float | None]:
    """Milliseconds; None for what did not happen, or not yet."""
    return {
        "queue_ms": execution.queue_ms,
        "start_ms": execution.start_ms,
        "run_ms": execution.run_ms,
        "total_ms": execution.total_ms,
    }
