"""What an entry binds of an execution, by the number that the entry names.

A schema of a release is data that never changes: what was sealed with it is verified with it. To
bind one more column, add a schema; to say it in the receipt as well, name it in `stated`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Schema:
    """How an execution is sealed.

    `record`: the columns that neither change after its end nor are ever erased; one hash is over
    all of them and over the times of its artifacts. `stated`: the columns that the entry, and so
    the receipt, also says in clear.
    """

    record: tuple[str, ...]
    stated: tuple[str, ...]


SCHEMAS: Mapping[int, Schema] = {
    1: Schema(
        record=(
            *("tenant_slug", "api_key_name", "api_key_prefix", "subject", "request_id"),
            *("client_address", "idempotency_key", "request_hash", "language", "entrypoint"),
            *("mode", "code_hash", "input_files", "timeout", "deadline", "status", "provider"),
            *("config_version", "runtime", "isolation", "sharing", "has_result"),
            *("stdout_truncated", "stderr_truncated", "exit_code", "artifact_count"),
            *("error_code", "error_message", "error_field", "retryable", "meta", "hops", "cost"),
            *("queue_ms", "start_ms", "run_ms", "total_ms"),
            *("created_at", "started_at", "finished_at"),
            *("session_id", "turn", "context", "context_kept", "pid", "background"),
            "output_order",
            # By the caller's word; on whose behalf it ran is a body, of which there is a hash.
            *("agent", "model", "conversation", "traceparent", "trace_id", "priority"),
            *("run_at", "schedule_id"),
        ),
        stated=(
            *("language", "status", "exit_code", "config_version", "has_result"),
            *("stdout_truncated", "stderr_truncated", "turn", "context_kept", "pid"),
            *("agent", "model", "conversation", "traceparent", "run_at"),
        ),
    ),
}
CURRENT = 1


def schema_of(stated: Mapping[str, Any]) -> Schema | None:
    """The schema an entry was sealed with; None for one that a later version brought."""
    return SCHEMAS.get(stated["schema"])
