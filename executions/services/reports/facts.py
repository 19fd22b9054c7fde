"""What a report says of one run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from executions.ledger.entry_format import moment
from executions.ledger.executions import Erasures
from executions.ledger.models import LedgerEntry
from executions.ledger.sealing import body_hashes, sealable
from executions.runs.models import Artifact, Execution
from executions.services.policies.told import policy_of

# Of a body: it is there, was never kept, was erased as an entry says, or is gone without one.
KEPT, NOT_KEPT, NONE, ERASED, REMOVED = "kept", "not kept", "none", "erased", "removed"
# Of a record: another tenant is named by it than by its entry.
MOVED = "moved"
_OUTPUTS = ("result", "outputs", "exception", "stdout", "stderr")


def run_facts(
    execution: Execution,
    entry: LedgerEntry | None,
    stated: Mapping[str, Any] | None,
    erasures: Erasures,
    *,
    artifacts: Iterable[Artifact],
    problem: str,
    held: bool,
    with_code: bool,
) -> dict[str, Any]:
    """All of it as JSON that has a canonical form. `stated` is what its entry says, where it is
    authentic; `problem` what is wrong with the record, "" where nothing is."""
    return {
        "id": str(execution.pk),
        **{name: sealable(getattr(execution, name)) for name in _COLUMNS},
        "api_key": sealable({"name": execution.api_key_name, "prefix": execution.api_key_prefix}),
        "asked_by": {name: sealable(getattr(execution, name)) for name in _ASKED},
        "code": sealable(execution.code) if with_code and execution.code else None,
        "error": _error(execution),
        "policy": sealable(policy_of(execution)),
        "bodies": {
            "code": _code_state(execution, stated, erasures),
            "output": _output_state(execution, stated, erasures),
        },
        "artifacts": [_artifact(each, execution, stated, erasures) for each in artifacts],
        "held": held,
        "problem": sealable(problem),
        "receipt": entry.receipt if entry is not None and stated is not None else None,
    }


_COLUMNS = (
    *("tenant_slug", "created_at", "run_at", "started_at", "finished_at", "mode", "language"),
    *("entrypoint", "subject", "request_id", "client_address", "session_id", "schedule_id"),
    *("replay_of_id", "code_hash", "timeout", "status", "exit_code", "provider"),
    *("config_version", "runtime", "isolation", "sharing", "cost", "queue_ms", "start_ms"),
    *("run_ms", "total_ms"),
)
_ASKED = ("agent", "model", "conversation", "on_behalf_of", "traceparent")


def _error(execution: Execution) -> dict[str, Any] | None:
    if not execution.error_code:
        return None
    return {
        "code": execution.error_code,
        "field": sealable(execution.error_field) or None,
        "message": sealable(execution.error_message),
    }


def _code_state(execution: Execution, stated: Mapping[str, Any] | None, erasures: Erasures) -> str:
    if execution.code:
        return KEPT
    if stated is None or not stated.get("code_kept"):
        return NOT_KEPT
    return ERASED if erasures.covers(execution, "code") else REMOVED


def _output_state(
    execution: Execution, stated: Mapping[str, Any] | None, erasures: Erasures
) -> str:
    there = body_hashes(execution)
    if stated is None or not any(stated.get(f"{name}_hash") for name in _OUTPUTS):
        return KEPT if any(there[f"{name}_hash"] for name in _OUTPUTS) else NONE
    gone = [name for name in _OUTPUTS if stated.get(f"{name}_hash") and not there[f"{name}_hash"]]
    if not gone:
        return KEPT
    return ERASED if erasures.covers(execution, "output") else REMOVED


def _artifact(
    artifact: Artifact,
    execution: Execution,
    stated: Mapping[str, Any] | None,
    erasures: Erasures,
) -> dict[str, Any]:
    state = KEPT
    if not artifact.file:
        is_erased = stated is not None and erasures.covers_artifacts(execution, stated)
        state = ERASED if is_erased else REMOVED
    return {
        "name": sealable(artifact.name),
        "mime_type": sealable(artifact.mime_type),
        "size_bytes": artifact.size_bytes,
        "hash": f"sha256:{artifact.sha256}",
        "bytes": state,
    }


def gone_facts(entry: LedgerEntry, stated: Mapping[str, Any], how: str) -> dict[str, Any]:
    """Of a run whose record is gone: what its entry still says, which is its receipt."""
    return {
        "id": str(entry.execution_id),
        "tenant_slug": sealable(stated.get("tenant")),
        "finished_at": moment(entry.at),
        "record": how,
        "receipt": entry.receipt,
    }
