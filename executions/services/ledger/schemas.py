"""What an entry binds of an execution, by the number that the entry names.

A schema that was shipped is data that never changes: what was sealed with it is verified with it.
To bind one more column, add a schema; to say it in the receipt as well, name it in `stated`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from executions.services.ledger.canonical import canonical, canonical_1

_RECORD_1 = (
    *("tenant_slug", "api_key_name", "api_key_prefix", "subject", "request_id", "client_address"),
    *("idempotency_key", "request_hash", "language", "entrypoint", "mode", "code_hash"),
    *("input_files", "timeout", "status", "provider", "config_version", "runtime", "has_result"),
    *("stdout_truncated", "stderr_truncated", "exit_code", "artifact_count", "error_code"),
    *("error_message", "error_field", "retryable", "meta", "hops", "cost", "queue_ms", "start_ms"),
    *("run_ms", "total_ms", "created_at", "started_at", "finished_at"),
)
_STATED_1 = ("language", "status", "exit_code", "config_version")
_RECORD_2 = (*_RECORD_1, "deadline", "isolation", "sharing")
_STATED_2 = (*_STATED_1, "has_result", "stdout_truncated", "stderr_truncated")
_STATED_3 = (*_STATED_2, "turn", "context_kept", "pid")
_IN_SESSION = ("session_id", "turn", "context", "context_kept", "pid", "background")
_RECORD_3 = (*_RECORD_2, *_IN_SESSION, "output_order")
# Who asked, by the caller's word; for whom is a body, of which there is a hash.
ASKED = ("agent", "model", "conversation", "traceparent", "trace_id")
# When it was to run, and by which schedule.
LATER = ("run_at", "schedule_id")


@dataclass(frozen=True)
class Schema:
    """How an execution is sealed.

    `record`: the columns that neither change after its end nor are ever erased; one hash is over
    all of them, and over the times of its artifacts `with_artifacts`. `stated`: the columns that
    the entry, and so the receipt, also says in clear.
    """

    record: tuple[str, ...]
    stated: tuple[str, ...]
    with_artifacts: bool
    canonical: Callable[[Any], str]


SCHEMAS: Mapping[int, Schema] = {
    1: Schema(_RECORD_1, _STATED_1, with_artifacts=False, canonical=canonical_1),
    2: Schema(_RECORD_2, _STATED_2, with_artifacts=True, canonical=canonical),
    3: Schema(
        record=_RECORD_3,
        stated=_STATED_3,
        with_artifacts=True,
        canonical=canonical,
    ),
    4: Schema(
        record=(*_RECORD_3, *ASKED, "priority"),
        stated=(*_STATED_3, "agent", "model", "conversation", "traceparent"),
        with_artifacts=True,
        canonical=canonical,
    ),
    5: Schema(
        record=(*_RECORD_3, *ASKED, "priority", *LATER),
        stated=(*_STATED_3, "agent", "model", "conversation", "traceparent", "run_at"),
        with_artifacts=True,
        canonical=canonical,
    ),
}
CURRENT = 5


def schema_of(stated: Mapping[str, Any]) -> Schema | None:
    """The schema an entry was sealed with; None for one that a later version brought."""
    return SCHEMAS.get(stated.get("schema", 1))
