"""The documented shape of an execution."""

from __future__ import annotations

from typing import Any

# The milliseconds of `timings`, one after the other.
PARTS = ("received_ms", "queue_ms", "start_ms", "run_ms", "closed_ms")


def sum_of_parts(body: dict[str, Any]) -> float:
    """What an execution's parts took together."""
    return sum(body["timings"][name] for name in PARTS)


SHAPE = {
    "id": str,
    "status": str,
    "session": type(None),
    "context": type(None),
    "context_kept": type(None),
    "pid": type(None),
    "agent": type(None),
    "model": type(None),
    "conversation": type(None),
    "on_behalf_of": type(None),
    "traceparent": type(None),
    "language": str,
    "provider": str,
    "runtime": str,
    "isolation": str,
    "sharing": str,
    "result": object,
    "has_result": bool,
    "stdout": str,
    "stderr": str,
    "stdout_truncated": bool,
    "stderr_truncated": bool,
    "exit_code": (int, type(None)),
    "outputs": list,
    "artifacts": list,
    "artifacts_skipped": list,
    "outputs_skipped": list,
    "advice": list,
    "error": (dict, type(None)),
    "exception": (dict, type(None)),
    "hops": list,
    "cost": (str, type(None)),
    "timings": dict,
    "created_at": str,
    "run_at": type(None),
    "schedule": type(None),
    "receipt": (dict, type(None)),
    "late_result": type(None),
    "files_saved": type(None),
    "restored": bool,
    "policy": (dict, type(None)),
    "observations": list,
    "network": dict | None,
    "template": dict | None,
}
