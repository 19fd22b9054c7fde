"""One line of JSON for each operation, with figures and names but neither code nor content.

Every line has the same names, null where an operation has nothing of the kind: who for
(`tenant_id`), where (`provider`, `instance_id`, `region`), what (`operation`, `language`,
`code_hash`) and what came of it (`status`, `exit_code`, `duration_ms`, `memory_used_mb`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from django.utils import timezone

from executions.text import storable

audit_log = logging.getLogger("executions.audit")

SUCCESS = "success"
_NAMES = (
    *("tenant_id", "provider", "instance_id", "language", "code_hash", "duration_ms"),
    *("exit_code", "memory_used_mb", "region", "error_code", "request_id", "api_key"),
    *("session_id", "ledger_sequence", "ledger_digest"),
)
_MOST_CHARACTERS = 300


def log_operation(operation: str, status: str, *, at: datetime | None = None, **facts: Any) -> None:
    """`status` is "success", or how it failed. Of `facts` nothing is a secret or anybody's data."""
    line = {
        **dict.fromkeys(_NAMES),
        **facts,
        "timestamp": (at or timezone.now()).isoformat(),
        "operation": operation,
        "status": status,
    }
    audit_log.info("%s %s", operation, status, extra=line)


def log_entry(entry: Any, subject: str, content: Mapping[str, Any]) -> None:
    """Of what was entered in the ledger, an execution apart: sessions, keys, settings, people."""
    is_session = entry.kind == "session"
    log_operation(
        f"{entry.kind}.{content.get('action') or 'entered'}",
        "refused" if entry.kind == "refusal" else SUCCESS,
        at=entry.at,
        tenant_id=_text(content.get("tenant_slug") or content.get("tenant")),
        provider=_text(content.get("provider")),
        session_id=_text(content.get("row")) if is_session else None,
        actor=_text(content.get("actor")),
        subject=None if is_session else _text(subject),
        reason=_text(
            content.get("closed_because") or content.get("because") or content.get("reason")
        ),
        ledger_sequence=entry.sequence,
        ledger_digest=entry.digest,
    )


def _text(value: Any) -> str | None:
    return storable(value)[:_MOST_CHARACTERS] if isinstance(value, str) and value else None
