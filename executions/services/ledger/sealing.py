"""What the ledger says of an execution: hashes of what may be erased, and of all the rest."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import datetime
from decimal import Decimal
from typing import Any

from executions.models import Artifact, Execution, LedgerEntry
from executions.services.ledger.append import append
from executions.services.ledger.canonical import canonical, moment, text_hash

# The columns of the record that neither change after its end nor are ever erased.
_KEPT = (
    "tenant_slug",
    "api_key_name",
    "api_key_prefix",
    "subject",
    "request_id",
    "client_address",
    "idempotency_key",
    "request_hash",
    "language",
    "entrypoint",
    "mode",
    "code_hash",
    "input_files",
    "timeout",
    "status",
    "provider",
    "config_version",
    "runtime",
    "has_result",
    "stdout_truncated",
    "stderr_truncated",
    "exit_code",
    "artifact_count",
    "error_code",
    "error_message",
    "error_field",
    "retryable",
    "meta",
    "hops",
    "cost",
    "queue_ms",
    "start_ms",
    "run_ms",
    "total_ms",
    "created_at",
    "started_at",
    "finished_at",
)


def append_execution(content: dict[str, Any], execution: Execution) -> LedgerEntry:
    """Enter an ended execution. `content` comes from `execution_content`, made before the lock."""
    return append("execution", str(execution.pk), content, execution_id=execution.pk)


def execution_content(execution: Execution, artifacts: Sequence[Artifact]) -> dict[str, Any]:
    """What is entered of an ended execution, and what its caller's receipt says."""
    return {
        "tenant": execution.tenant_slug,
        "language": execution.language,
        "status": execution.status,
        "exit_code": execution.exit_code,
        "error_code": execution.error_code or None,
        "provider": execution.provider or None,
        "config_version": execution.config_version,
        "runtime": execution.runtime or None,
        "image_digest": _image_digest(execution),
        "finished_at": moment(execution.finished_at),
        "code_hash": execution.code_hash,
        "code_kept": execution.code != "",
        "files": execution.input_files,
        "record_hash": record_hash(execution),
        "artifacts": [artifact_content(artifact) for artifact in artifacts],
        **body_hashes(execution),
    }


def body_hashes(execution: Execution) -> dict[str, str | None]:
    """The hashes of the texts that retention may erase. No text and an empty one are one."""
    return {
        "arguments_hash": _hash(execution.arguments),
        "result_hash": _hash(execution.result),
        "outputs_hash": _hash(execution.outputs),
        "stdout_hash": _hash(execution.stdout),
        "stderr_hash": _hash(execution.stderr),
    }


def record_hash(execution: Execution) -> str:
    """One hash over every column that stays."""
    kept = {name: _value(getattr(execution, name)) for name in _KEPT}
    return "sha256:" + hashlib.sha256(canonical(kept).encode()).hexdigest()


def artifact_content(artifact: Artifact) -> dict[str, Any]:
    return {
        "name": artifact.name,
        "mime_type": artifact.mime_type,
        "size_bytes": artifact.size_bytes,
        "hash": f"sha256:{artifact.sha256}",
    }


def receipt_of(execution: Execution) -> dict[str, Any] | None:
    """The signed entry of an ended execution; None while it has none."""
    if execution.is_open:
        return None
    entry = execution.ledger_entry or LedgerEntry.objects.filter(execution_id=execution.pk).first()
    return entry.receipt if entry else None


def _hash(text: str) -> str | None:
    return text_hash(text) if text else None


def _value(value: Any) -> Any:
    if isinstance(value, datetime):
        return moment(value)
    return format(value, "f") if isinstance(value, Decimal) else value


def _image_digest(execution: Execution) -> str | None:
    digest = execution.meta.get("image_digest") or execution.meta.get("image")
    return digest if isinstance(digest, str) else None
