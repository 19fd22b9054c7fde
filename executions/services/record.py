"""The audited row of one execution: written before anything runs, completed exactly once."""

from __future__ import annotations

import copy
import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.conf import settings
from django.db import IntegrityError, OperationalError, transaction
from django.utils import timezone

from executions.models import ApiKey, Artifact, Execution, Tenant
from executions.services import payloads, statistics
from executions.services.admission import counted_alone, refuse_beyond_bounds, was_refused
from executions.services.disk import look_again_at_disk, refuse_when_full
from executions.services.ledger import append_execution
from executions.services.ledger.sealing import execution_content
from executions.services.requests import ExecutionRequest
from executions.services.spending import refuse_over_budget
from executions.text import storable
from providers.base import ExecutionResult, InputFile
from providers.errors import (
    InvalidConfiguration,
    ProviderUnavailable,
    RateLimited,
    SandboxError,
)

audit_log = logging.getLogger("executions.audit")

QUEUE_ALLOWANCE = timedelta(hours=1)
START_ALLOWANCE = timedelta(minutes=2)


class IdempotencyConflict(InvalidConfiguration):
    """The key was used before, with another request."""

    @property
    def http_status(self) -> int:
        return 409


@dataclass(frozen=True)
class Caller:
    """Who asks. Code run from within this process has a tenant and no key."""

    tenant: Tenant
    api_key: ApiKey | None = None
    request_id: str = ""
    client_address: str = ""
    replay_of: Execution | None = None

    @classmethod
    def of_key(cls, api_key: ApiKey, *, request_id: str = "", client_address: str = "") -> Caller:
        return cls(api_key.tenant, api_key, request_id, client_address)


@dataclass
class Outcome:
    """A record, and the result it was completed with or the error that prevented one.

    Both are None when this attempt did not run anything: it is queued, or its idempotency key
    stands for an earlier one.
    """

    execution: Execution
    result: ExecutionResult | None = None
    error: SandboxError | None = None


def open_record(request: ExecutionRequest, caller: Caller) -> tuple[Execution, bool]:
    """The row of a new attempt and True, or the one its idempotency key stands for and False.

    Raises RateLimited beyond the tenant's bounds or a budget and ProviderUnavailable when the disk
    is nearly full, each before anything is recorded, and IdempotencyConflict when the key came
    with another request before.
    """
    queued = request.mode == Execution.Mode.ASYNC
    status = Execution.Status.QUEUED if queued else Execution.Status.RUNNING
    size = payloads.size_of(request) if queued else 0
    execution: Execution | None = None
    try:
        refuse_over_budget(caller.tenant.slug)
        refuse_when_full()
        if size > payloads.LARGE_BYTES or was_refused(caller.tenant):
            # Before anything is hashed or written for it.
            refuse_beyond_bounds(caller.tenant, status, size)
        execution = _unsaved(request, caller, status)
        if queued:
            payloads.keep(execution, request)
        _save_within_bounds(execution, caller.tenant, size)
    except BaseException as problem:
        if queued and execution is not None:
            payloads.forget(execution.pk)
        if isinstance(problem, IntegrityError | RateLimited | ProviderUnavailable):
            # What a known key stands for is told, whatever there is room for.
            recorded = _recorded(caller.tenant, request)
            if recorded is not None:
                return recorded, False
        raise
    return execution, True


def _save_within_bounds(execution: Execution, tenant: Tenant, size: int) -> None:
    try:
        with counted_alone(tenant.slug):
            refuse_beyond_bounds(tenant, Execution.Status(execution.status), size)
            execution.save(force_insert=True)
            if size:
                statistics.count_stored(tenant.slug, size)
    except OperationalError:
        look_again_at_disk()
        refuse_when_full()
        raise


def _unsaved(request: ExecutionRequest, caller: Caller, status: Execution.Status) -> Execution:
    now = timezone.now()
    queued = status == Execution.Status.QUEUED
    keep_code = settings.SANDBOX_STORE_CODE != "never"
    return Execution(
        tenant=caller.tenant,
        tenant_slug=caller.tenant.slug,
        api_key=caller.api_key,
        api_key_name=caller.api_key.name if caller.api_key else "",
        api_key_prefix=caller.api_key.prefix if caller.api_key else "",
        subject=request.subject,
        request_id=caller.request_id,
        client_address=caller.client_address,
        idempotency_key=request.idempotency_key,
        request_hash=request.fingerprint() if request.idempotency_key is not None else "",
        language=request.language,
        entrypoint=request.entrypoint,
        mode=request.mode,
        code=request.code if keep_code else "",
        code_hash=request.code_hash,
        arguments=request.arguments_json,
        input_files=[file_facts(file) for file in request.files],
        replay_of=caller.replay_of,
        timeout=request.seconds,
        status=status,
        created_at=now,
        started_at=None if queued else now,
        deadline=now + QUEUE_ALLOWANCE if queued else deadline_after(request.seconds),
    )


def file_facts(file: InputFile) -> dict[str, Any]:
    digest = hashlib.sha256(file.content).hexdigest()
    return {"path": file.path, "size_bytes": len(file.content), "hash": f"sha256:{digest}"}


def deadline_after(seconds: float) -> datetime:
    """When an execution that starts now must have ended, whatever became of its process."""
    return timezone.now() + timedelta(seconds=seconds) + START_ALLOWANCE


def close_record(
    execution: Execution,
    status: Execution.Status,
    changes: Mapping[str, Any],
    artifacts: Sequence[Artifact] = (),
    *,
    only_if: str = "",
) -> bool:
    """End an open row; False when something else had ended it, whose verdict then stands.

    `only_if` is the status it must still have. `execution` afterwards shows what is recorded, and
    its `ledger_entry` is the entry made in the same transaction: without one, nothing ends.
    """
    values = {
        **changes,
        "status": status,
        "finished_at": timezone.now(),
        "pending": None,
        "artifact_count": len(artifacts),
    }
    if status == Execution.Status.SUCCEEDED and settings.SANDBOX_STORE_CODE == "on_error":
        values["code"] = ""
    still_open = Execution.objects.filter(pk=execution.pk, finished_at=None)
    if only_if:
        still_open = still_open.filter(status=only_if)
    ended = copy.copy(execution)
    for name, value in values.items():
        setattr(ended, name, value)
    content = execution_content(ended, artifacts)
    size = _stored_bytes(ended, artifacts)
    entry = None
    with transaction.atomic():
        won = still_open.update(**values) == 1
        if won:
            for artifact in artifacts:
                artifact.save(force_insert=True)
            entry = append_execution(content, ended)
            statistics.count(ended, size)
    if ended.mode == Execution.Mode.ASYNC:
        payloads.forget(ended.pk)
    if not won:
        execution.refresh_from_db()
        return False
    for name, value in values.items():
        setattr(execution, name, value)
    execution.ledger_entry = entry
    return True


def _stored_bytes(ended: Execution, artifacts: Sequence[Artifact]) -> int:
    """What the record keeps, but for what came of itself."""
    texts = (ended.code, ended.arguments, ended.stdout, ended.stderr, ended.result, ended.outputs)
    files = sum(artifact.size_bytes for artifact in artifacts)
    return files + sum(len(text.encode()) for text in texts)


def close_unrun(execution: Execution, error: SandboxError) -> Outcome:
    """End a record whose code was never handed to a provider."""
    changes = {**error_changes(error.code, error.message, error.field), "retryable": True}
    close_record(execution, Execution.Status.ERROR, changes)
    log_execution(execution)
    return Outcome(execution, error=error)


def error_changes(code: str, message: str, field: str | None = None) -> dict[str, Any]:
    return {
        "error_code": code,
        "error_message": storable(message),
        "error_field": storable(field or "")[:100],
    }


def log_execution(execution: Execution, instance_id: str = "") -> None:
    """One log record per execution, with figures and names but neither code nor output."""
    peak = execution.meta.get("memory_peak_bytes")
    entry = execution.ledger_entry
    facts = {
        "timestamp": (execution.finished_at or timezone.now()).isoformat(),
        "operation": "execute_code",
        "execution_id": str(execution.pk),
        "request_id": execution.request_id,
        "tenant_id": execution.tenant_slug,
        "api_key": execution.api_key_prefix,
        "provider": execution.provider,
        "config_version": execution.config_version,
        "runtime": execution.runtime,
        "region": execution.meta.get("region"),
        "instance_id": instance_id,
        "language": execution.language,
        "code_hash": execution.code_hash,
        "status": execution.status,
        "exit_code": execution.exit_code,
        "error_code": execution.error_code or None,
        "duration_ms": execution.total_ms,
        "queue_ms": execution.queue_ms,
        "start_ms": execution.start_ms,
        "run_ms": execution.run_ms,
        "ledger_sequence": entry.sequence if entry else None,
        "ledger_digest": entry.digest if entry else None,
        "memory_used_mb": round(peak / 2**20, 1) if isinstance(peak, (int, float)) else None,
    }
    audit_log.info("execution %s", execution.status, extra=facts)


def _recorded(tenant: Tenant, request: ExecutionRequest) -> Execution | None:
    if request.idempotency_key is None:
        return None
    recorded = (
        Execution.objects.defer("pending", "code")
        .filter(tenant=tenant, idempotency_key=request.idempotency_key, retryable=False)
        .first()
    )
    if recorded is not None and recorded.request_hash != request.fingerprint():
        raise IdempotencyConflict(
            "idempotency_key: Used before, with another request.", field="idempotency_key"
        )
    return recorded
