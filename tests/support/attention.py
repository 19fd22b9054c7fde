"""What waits for an administrator."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.utils import timezone

from executions.runs.models import Execution
from tests.conftest import Caller

NOW = timezone.now()


def waiting(caller: Caller, **values: Any) -> Execution:
    return Execution.objects.create(
        **{
            "tenant": caller.tenant,
            "tenant_slug": caller.tenant.slug,
            "language": "python",
            "entrypoint": "auto",
            "mode": "async",
            "timeout": 1,
            "code_hash": "sha256:" + "0" * 64,
            "status": "queued",
            "created_at": NOW,
            "deadline": NOW + timedelta(hours=1),
            **values,
        }
    )
