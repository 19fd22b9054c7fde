"""Executions that have ended."""

from __future__ import annotations

from typing import Any

from django.utils import timezone

from executions.runs.models import Execution
from executions.runs.record import close_record
from tests.conftest import Caller


def ended(caller: Caller, status: str = "succeeded", **changes: Any) -> Execution:
    now = timezone.now()
    execution = Execution(
        tenant=caller.tenant,
        tenant_slug=caller.tenant.slug,
        language="python",
        entrypoint="auto",
        timeout=1,
        code_hash="sha256:" + "0" * 64,
        status="running",
        deadline=now,
        started_at=now,
    )
    execution.save(force_insert=True)
    values = {"provider": "local", "total_ms": 10.0, **changes}
    assert close_record(execution, Execution.Status(status), values)
    return execution
