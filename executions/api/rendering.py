"""Records as JSON, in the shapes that clients are written against."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from django.http import HttpResponse
from django.urls import reverse

from executions.models import Artifact, Execution
from executions.services.ledger import receipt_of
from executions.text import from_json


def json_response(body: Any, status: int = 200) -> HttpResponse:
    content = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode(errors="replace")
    return HttpResponse(content, status=status, content_type="application/json")


def execution_summary(execution: Execution) -> dict[str, Any]:
    """What a list shows of an execution: everything but the parts that may be large."""
    return {
        "id": str(execution.pk),
        "status": execution.status,
        "mode": execution.mode,
        "language": execution.language,
        "provider": execution.provider,
        "runtime": execution.runtime,
        "isolation": execution.isolation,
        "sharing": execution.sharing,
        "exit_code": execution.exit_code,
        "error": _error(execution),
        "timings": _timings(execution),
        "created_at": execution.created_at.isoformat(),
    }


def execution_detail(
    execution: Execution, absolute: Callable[[str], str] = lambda path: path
) -> dict[str, Any]:
    """One execution in full. `absolute` makes a path on this service into a URL."""
    artifacts = execution.artifacts.all() if execution.artifact_count else ()
    return {
        "id": str(execution.pk),
        "status": execution.status,
        "language": execution.language,
        "provider": execution.provider,
        "runtime": execution.runtime,
        "isolation": execution.isolation,
        "sharing": execution.sharing,
        "result": from_json(execution.result) if execution.result else None,
        "has_result": execution.has_result,
        "stdout": execution.stdout,
        "stderr": execution.stderr,
        "stdout_truncated": execution.stdout_truncated,
        "stderr_truncated": execution.stderr_truncated,
        "exit_code": execution.exit_code,
        "outputs": from_json(execution.outputs) if execution.outputs else [],
        "artifacts": [_artifact(execution, artifact, absolute) for artifact in artifacts],
        "error": _error(execution),
        "hops": execution.hops,
        "cost": None if execution.cost is None else str(execution.cost),
        "timings": _timings(execution),
        "created_at": execution.created_at.isoformat(),
        "receipt": receipt_of(execution),
    }


def _artifact(
    execution: Execution, artifact: Artifact, absolute: Callable[[str], str]
) -> dict[str, Any]:
    path = reverse("execution-artifact", args=[execution.pk, artifact.name])
    return {
        "name": artifact.name,
        "mime_type": artifact.mime_type,
        "size_bytes": artifact.size_bytes,
        "url": absolute(path),
    }


def _error(execution: Execution) -> dict[str, str] | None:
    if not execution.error_code:
        return None
    return {"code": execution.error_code, "message": execution.error_message}


def _timings(execution: Execution) -> dict[str, float | None]:
    return {
        "queue_ms": execution.queue_ms,
        "start_ms": execution.start_ms,
        "run_ms": execution.run_ms,
        "total_ms": execution.total_ms,
    }
