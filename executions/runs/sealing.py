"""What the ledger says of an execution: hashes of what may be erased, and of all the rest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from executions.ledger.append import append
from executions.ledger.entry import (
    CURRENT,
    SCHEMAS,
    Schema,
    canonical,
    moment,
    text_hash,
    to_canonical,
)
from executions.ledger.models import LedgerEntry
from executions.runs.models import Artifact, Execution
from executions.runs.results import policy_of


def append_execution(content: dict[str, Any], execution: Execution) -> LedgerEntry:
    """Enter an ended execution. `content` comes from `execution_content`, made before the lock."""
    return append("execution", str(execution.pk), content, execution_id=execution.pk)


def execution_content(execution: Execution, artifacts: Sequence[Artifact]) -> dict[str, Any]:
    """What is entered of an ended execution, and what its caller's receipt says."""
    schema = SCHEMAS[CURRENT]
    return {
        "schema": CURRENT,
        "tenant": execution.tenant_slug,
        **{name: to_canonical(getattr(execution, name)) for name in schema.stated},
        "error_code": execution.error_code or None,
        "error_field": execution.error_field or None,
        "error_hash": _hash(execution.error_message),
        "provider": execution.provider or None,
        "runtime": execution.runtime or None,
        "isolation": execution.isolation or None,
        "sharing": execution.sharing or None,
        "session": str(execution.session_id) if execution.session_id else None,
        "context": execution.context or None,
        "image_digest": _image_digest(execution),
        "finished_at": moment(execution.finished_at),
        "code_hash": execution.code_hash,
        "code_kept": execution.code != "",
        "files": to_canonical(execution.input_files),
        "replay_of": str(execution.replay_of_id) if execution.replay_of_id else None,
        "record_hash": record_hash(execution, schema, artifacts),
        "details_hash": details_hash(execution),
        "artifacts": [artifact_content(artifact) for artifact in artifacts],
        **body_hashes(execution),
        **_policy(execution),
    }


def _policy(execution: Execution) -> dict[str, Any]:
    """Which policy held, who has approved it, and one hash over all that is told of that."""
    told = policy_of(execution)
    if told is None:
        return {"policy_hash": None}
    said: dict[str, Any] = {"policy_hash": text_hash(canonical(to_canonical(told)))}
    if told["id"] is not None:
        said["policy"] = {"id": told["id"], "version": told["version"]}
    return {**said, "approved": to_canonical(told["approved"])} if told["approved"] else said


def body_hashes(execution: Execution) -> dict[str, str | None]:
    """The hashes of the texts that retention may erase. No text and an empty one are one."""
    return {
        "arguments_hash": _hash(execution.arguments),
        "result_hash": _hash(execution.result),
        "outputs_hash": _hash(execution.outputs),
        "exception_hash": _hash(execution.exception),
        "stdout_hash": _hash(execution.stdout),
        "stderr_hash": _hash(execution.stderr),
        "on_behalf_of_hash": _hash(execution.on_behalf_of or ""),
    }


def record_hash(execution: Execution, schema: Schema, artifacts: Sequence[Artifact]) -> str:
    """One hash over every column that stays."""
    kept = {name: to_canonical(getattr(execution, name)) for name in schema.record}
    kept["artifacts"] = [moment(artifact.created_at) for artifact in artifacts]
    return text_hash(canonical(kept))


def details_hash(execution: Execution) -> str:
    """One hash over what an answer says beside the outcome, as the answer has it."""
    details = {
        "created_at": moment(execution.created_at),
        "cost": to_canonical(execution.cost),
        "hops": to_canonical(execution.hops),
        "timings": {
            name: getattr(execution, name)
            for name in ("queue_ms", "start_ms", "run_ms", "total_ms")
        },
    }
    return text_hash(canonical(details))


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


def _image_digest(execution: Execution) -> str | None:
    digest = execution.meta.get("image_digest") or execution.meta.get("image")
    return digest if isinstance(digest, str) else None
