"""Runs at a later time."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.utils import timezone

from executions.runs.models import Execution
from tests.conftest import Caller
from tests.support.running import run

CODE = "answer = ExecutionResult('it ran', '', 0, 0.0)"


def in_seconds(seconds: float) -> str:
    return (timezone.now() + timedelta(seconds=seconds)).isoformat()


def later(caller: Caller, seconds: float = 3600, code: str = CODE, **body: Any) -> Execution:
    answer = run(caller, code, mode="async", run_at=in_seconds(seconds), **body)
    assert (answer.status_code, answer.json()["status"]) == (202, "queued"), answer.content
    return Execution.objects.get(pk=answer.json()["id"])


def come(execution: Execution, seconds_ago: float = 1) -> None:
    """Let its time come: of the request, and in the row."""
    at = timezone.now() - timedelta(seconds=seconds_ago)
    execution.refresh_from_db()
    execution.pending = {**(execution.pending or {}), "run_at": at.isoformat()}
    execution.run_at = at
    execution.save()
