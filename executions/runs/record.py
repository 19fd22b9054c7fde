"""The audited row of one execution, what the ledger says of it, and its line in the log.

The row is written before anything runs, and completed exactly once. The ledger has hashes of what
may be erased, and of all the rest. A result that comes after the end is attached.

INSERT and UPDATE are written out because they are on the path of every run. The ORM compiles each
anew: they took 0.29 and 0.33 ms, and take 0.18 and 0.10 (500 records, SQLite).
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import lru_cache, partial
from time import perf_counter
from typing import Any

from django.conf import settings
from django.db import IntegrityError, OperationalError, connection, transaction
from django.utils import timezone

from executions.kernel.audit import SUCCESS, log_operation
from executions.kernel.database import Columns, DatabaseUnavailable, is_refusal, problem_of
from executions.kernel.text import storable
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
from executions.runs import extensions, heartbeat, payloads, queue_wake
from executions.runs.admission import (
    ensure_disk_space,
    ensure_ready,
    ensure_within_bounds,
    look_again_at_disk,
    was_refused,
)
from executions.runs.models import Artifact, Execution, LateResult
from executions.runs.requests import (
    CLAIMS,
    Caller,
    Conflict,
    ExecutionRequest,
    ensure_run_at,
    trace_id_of,
)
from executions.runs.results import policy_of
from executions.runs.statistics import add, tenant_use
from executions.tenants.models import Scope, Tenant
from executions.tenants.quotas import tenant_lock
from providers.errors import (
    BLOCKED,
    UNAVAILABLE,
    InvalidConfiguration,
    ProviderUnavailable,
    RateLimited,
    SandboxError,
)
from providers.values import ExecutionResult, InputFile


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
        "timings": {name: getattr(execution, name) for name in TIMINGS},
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


_TABLE = Execution._meta.db_table
_ROW = Columns(Execution)

_INSERT = (
    f"INSERT INTO {_TABLE} ({', '.join(_ROW.names)})"  # noqa: S608
    f" VALUES ({', '.join(['%s'] * len(_ROW.names))})"
)

# Columns of an open row that are written, and with which of them others are that stay.
_CHANGES = ("deadline", "process_id", "pid")


def insert(execution: Execution) -> None:
    """Save a new row. Raises what `save(force_insert=True)` does."""
    row = [_ROW.write(name, getattr(execution, name)) for name in _ROW.names]
    with connection.cursor() as cursor:
        cursor.execute(_INSERT, row)
    execution._state.adding = False
    execution._state.db = connection.alias


def end(execution: Execution, values: Mapping[str, Any], *, only_if: str = "") -> bool:
    """Set `values` in the row if it is still open, and then by this call: whether it was.

    `only_if` is the status it must still have. What changes while it is open has to be as
    `execution` has it, or the ledger's entry would say something else than the row: it may have
    been claimed, approved or put back meanwhile, and then has another deadline.
    """
    row = [_ROW.write(name, value) for name, value in values.items()]
    row.append(_ROW.write("id", execution.pk))
    if only_if:
        row.append(only_if)
    as_read = {name: getattr(execution, name) for name in _CHANGES}
    known = tuple(name for name, value in as_read.items() if value is not None)
    row += [_ROW.write(name, as_read[name]) for name in known]
    with connection.cursor() as cursor:
        cursor.execute(_update(tuple(values), bool(only_if), known), row)
        return bool(cursor.rowcount == 1)


@lru_cache(maxsize=64)
def _update(names: tuple[str, ...], with_status: bool, known: tuple[str, ...]) -> str:
    """Which columns a run sets depends on how it ended: there are a few kinds. `known` are those
    of _CHANGES that have a value."""
    columns = ", ".join(f"{name} = %s" for name in names)
    more = " AND status = %s" if with_status else ""
    more += "".join(f" AND {name} = %s" for name in known)
    more += "".join(f" AND {name} IS NULL" for name in _CHANGES if name not in known)
    return f"UPDATE {_TABLE} SET {columns} WHERE id = %s AND finished_at IS NULL{more}"  # noqa: S608


QUEUE_ALLOWANCE = timedelta(hours=1)
# It ends with its session, whatever the time.
BACKGROUND_ALLOWANCE = timedelta(days=3650)
START_ALLOWANCE = timedelta(minutes=2)
# Each is lost to somebody else with the same idempotency key who then did not run it.
_KEY_ATTEMPTS = 5
TIMINGS = ("received_ms", "queue_ms", "start_ms", "run_ms", "closed_ms", "total_ms")
# The columns that say where it runs. The row of what was queued has them as soon as it does.
PLACE = ("provider", "config_version", "runtime", "isolation", "sharing")


class IdempotencyConflict(InvalidConfiguration):
    """The key was used before, with another request."""

    @property
    def http_status(self) -> int:
        return 409


@dataclass
class Outcome:
    """A record, and the result it was completed with or the error that prevented one.

    Both are None when this attempt did not run anything: it is queued, or its idempotency key
    stands for an earlier one.
    """

    execution: Execution
    result: ExecutionResult | None = None
    error: SandboxError | None = None


Beside = Callable[[Execution], None]


def open_record(
    request: ExecutionRequest, caller: Caller, beside: Beside | None = None
) -> tuple[Execution, bool]:
    """The row of a new attempt and True, or the one its idempotency key stands for and False.

    Raises RateLimited beyond the tenant's bounds or a budget and ProviderUnavailable when the disk
    is nearly full or the service stops, each before anything is recorded, and IdempotencyConflict
    when the key came with another request before. Conflict for a session that has ended.
    DatabaseUnavailable with an id says that there may be a row of that id all the same, of which
    nothing was run. `beside` writes what belongs to the new row, in its transaction.
    """
    for _ in range(_KEY_ATTEMPTS):
        try:
            return _insert(request, caller, beside), True
        except DatabaseUnavailable:
            raise
        except (
            IntegrityError,
            RateLimited,
            ProviderUnavailable,
            Conflict,
            InvalidConfiguration,
        ) as problem:
            # What a known key stands for is told, whatever there is room for, and also once its
            # session has ended, or its time has come.
            recorded = _find_by_idempotency_key(caller, request)
            if recorded is not None:
                return recorded, False
            if not isinstance(problem, IntegrityError) or request.idempotency_key is None:
                raise
            # Who held the key has ended meanwhile without having run anything: it is free.
    raise ProviderUnavailable(
        "Other requests with the same idempotency key were received meanwhile. Send the request "
        "again.",
        retry_after=1.0,
    )


def _insert(request: ExecutionRequest, caller: Caller, beside: Beside | None) -> Execution:
    queued = request.mode == Execution.Mode.ASYNC
    status = Execution.Status.QUEUED if queued else Execution.Status.RUNNING
    size = payloads.size_of(request) if queued else 0
    ensure_ready(caller.tenant.slug)
    if size > payloads.LARGE_BYTES or was_refused(caller.tenant):
        # Before anything is hashed or written for it.
        ensure_within_bounds(caller.tenant, request, queued=queued, payload_bytes=size)
    extensions.ensure_served(request)
    for each in extensions.installed():
        each.ensure_accepted(request, caller.tenant)
    if request.run_at is not None:
        ensure_run_at(request.run_at, caller.api_key)
    execution = _new_row(request, caller, status)
    try:
        if queued:
            payloads.keep(execution, request)
        _save_within_bounds(execution, caller.tenant, size, request, beside)
    except BaseException:
        if queued:
            payloads.forget(execution.pk)
        raise
    return execution


def _save_within_bounds(
    execution: Execution,
    tenant: Tenant,
    payload_bytes: int,
    request: ExecutionRequest,
    beside: Beside | None,
) -> None:
    is_committing = False
    try:
        with tenant_lock(tenant.slug, at_once=False):
            is_queued = execution.status == Execution.Status.QUEUED
            ensure_within_bounds(tenant, request, queued=is_queued, payload_bytes=payload_bytes)
            for each in extensions.installed():
                each.before_insert(execution)
            insert(execution)
            if is_queued:
                queue_wake.notify_on_commit()
            for each in extensions.installed():
                each.on_insert(execution, request)
            if beside is not None:
                beside(execution)
            if payload_bytes:
                # Behind `beside`, which may enter something in the ledger.
                add(tenant_use(tenant.slug, execution.created_at, stored_bytes=payload_bytes))
            is_committing = True
    except OperationalError as error:
        look_again_at_disk()
        if is_committing and not is_refusal(error) and (problem := problem_of(error)):
            raise _unsure(execution, problem) from error
        ensure_disk_space()
        raise


def _unsure(execution: Execution, problem: str) -> DatabaseUnavailable:
    """Of a commit that was not answered nobody knows whether it was carried out."""
    if execution.mode == Execution.Mode.ASYNC:
        text = f"{problem} The request may have been queued. Request the execution by its id."
        return DatabaseUnavailable(text, ran=None, record_id=execution.pk)
    text = f"{problem} Nothing was run. Send the request again."
    return DatabaseUnavailable(text, ran=False, record_id=execution.pk)


def _new_row(request: ExecutionRequest, caller: Caller, status: Execution.Status) -> Execution:
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
        **{name: getattr(request, name) or None for name in (*CLAIMS, "traceparent")},
        trace_id=trace_id_of(request.traceparent) or None,
        request_id=caller.request_id,
        client_address=caller.client_address,
        idempotency_key=request.idempotency_key,
        request_hash=request.fingerprint() if request.idempotency_key is not None else "",
        language=request.language,
        entrypoint=request.entrypoint,
        mode=request.mode,
        priority=Execution.Priority[request.priority.upper()].value,
        code=request.code if keep_code else "",
        code_hash=request.code_hash,
        arguments=request.arguments_json,
        input_files=[file_facts(file) for file in request.files],
        replay_of=caller.replay_of,
        schedule_id=caller.schedule_id,
        meta=_first_metadata(caller),
        timeout=request.longest,
        session_id=request.session,
        context=request.context,
        background=request.background,
        status=status,
        # What runs in the background outlives whoever starts it, and is his until it runs.
        process_id=None if queued else heartbeat.current_process_id(),
        received_ms=None if caller.received is None else ms_since(caller.received),
        created_at=now,
        run_at=request.run_at,
        started_at=None if queued else now,
        deadline=_deadline(request, queued, now),
    )


def ms_since(moment: float) -> float:
    """Return the milliseconds since a moment of `perf_counter`."""
    return ms_between(moment, perf_counter())


def ms_between(start: float, end: float) -> float:
    return round((end - start) * 1000, 3)


def _first_metadata(caller: Caller) -> dict[str, Any]:
    owner = caller.replay_of or caller.tenant
    slug = owner.tenant_slug if isinstance(owner, Execution) else owner.slug
    found = (each.first_metadata(slug) for each in extensions.installed())
    return {name: value for said in found for name, value in said.items()}


def _deadline(request: ExecutionRequest, queued: bool, now: datetime) -> datetime:
    if request.background and not queued:
        return now + BACKGROUND_ALLOWANCE
    if queued:
        return max(now, request.run_at or now) + QUEUE_ALLOWANCE
    return deadline_after(request.longest)


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
    # The row of what was queued says where it runs, maybe since it was read here. It is left as the
    # entry will have it.
    values = {name: getattr(execution, name) for name in PLACE} | {
        **changes,
        "status": status,
        # What is recorded late says when it ended, and the ledger's entry when it was entered.
        "finished_at": changes.get("finished_at") or timezone.now(),
        "pending": None,
        "process_id": None,
        "artifact_count": len(artifacts),
    }
    if status == Execution.Status.SUCCEEDED and settings.SANDBOX_STORE_CODE == "on_error":
        values["code"] = ""
    ended = copy.copy(execution)
    for name, value in values.items():
        setattr(ended, name, value)
    content = execution_content(ended, artifacts)
    increments = tenant_use(
        ended.tenant_slug,
        values["finished_at"],
        ended=1,
        cost=float(ended.cost or 0),
        stored_bytes=_stored_bytes(ended, artifacts),
        used_ms=used_ms(ended, execution.timeout),
    )
    for each in extensions.installed():
        increments += each.statistics(ended)
    entry = None
    with transaction.atomic():
        won = end(execution, values, only_if=only_if)
        if won:
            for artifact in artifacts:
                artifact.save(force_insert=True)
            for each in extensions.installed():
                each.before_seal(ended, had_code=bool(execution.code))
            entry = append_execution(content, ended)
            for each in extensions.installed():
                each.on_end(ended)
            add(increments)
    if won and ended.mode == Execution.Mode.ASYNC and payloads.may_have_file(execution):
        # Behind the transaction that this is in: where it is taken back, the run is still to come.
        transaction.on_commit(partial(payloads.forget, execution.pk))
    if not won:
        execution.refresh_from_db()
        return False
    for name, value in values.items():
        setattr(execution, name, value)
    execution.ledger_entry = entry
    return True


def _stored_bytes(ended: Execution, artifacts: Sequence[Artifact]) -> int:
    """What the record keeps, but for what came of itself."""
    texts = (
        *(ended.code, ended.arguments, ended.stdout, ended.stderr, ended.result, ended.outputs),
        ended.exception,
    )
    files = sum(artifact.size_bytes for artifact in artifacts)
    return files + sum(len(text.encode()) for text in texts)


def used_ms(ended: Execution, reserved: float) -> int:
    """How long it ran, in milliseconds: of what was reserved for it, what does not come back.

    Who ran it has measured that, and tells the total with it. Where somebody else closes what had
    begun, it counts until then. What is longer than its timeout is our doing and not the tenant's.
    """
    if ended.retryable or ended.started_at is None or ended.finished_at is None:
        return 0
    if ended.total_ms is not None and not ended.background:
        ms = ended.run_ms or 0.0
    else:
        ms = (ended.finished_at - ended.started_at).total_seconds() * 1000
    most = math.inf if ended.background else reserved * 1000
    return max(0, round(min(ms, most)))


def reject(execution: Execution, error: SandboxError) -> Outcome:
    """End a record whose code was never handed to a provider."""
    blocked = error.entry is BLOCKED
    status = Execution.Status.BLOCKED if blocked else Execution.Status.ERROR
    changes = error_changes(error.code, error.message, error.field)
    close_record(execution, status, {**changes, "retryable": not blocked})
    log_execution(execution)
    return Outcome(execution, error=error)


def error_changes(code: str, message: str, field: str | None = None) -> dict[str, Any]:
    return {
        "error_code": code,
        "error_message": storable(message),
        "error_field": storable(field or "")[:100],
    }


def _find_by_idempotency_key(caller: Caller, request: ExecutionRequest) -> Execution | None:
    if request.idempotency_key is None:
        return None
    recorded = (
        Execution.objects.defer("pending", "code")
        .filter(tenant=caller.tenant, idempotency_key=request.idempotency_key, retryable=False)
        .first()
    )
    if recorded is None:
        return None
    key = caller.api_key
    if key is not None and recorded.api_key_id != key.pk and not key.has_scope(Scope.READ):
        raise IdempotencyConflict(
            "idempotency_key: Used before, with another API key, and this key may not read the "
            "result.",
            field="idempotency_key",
        )
    if recorded.request_hash != request.fingerprint():
        raise IdempotencyConflict(
            "idempotency_key: Used before, with a different request.", field="idempotency_key"
        )
    return recorded


def complete_externally(
    execution: Execution, status: Execution.Status, changes: Mapping[str, Any], *, only_if: str = ""
) -> bool:
    """Close what no run of ours closes. As `close_record`.

    What runs in the background costs its time until now: nobody measures it but who closes its
    record. What the rest cost is told, and spent, by who runs it.
    """
    values = {**changes, **_until_now(execution)}
    return close_record(execution, status, values, only_if=only_if)


def _until_now(execution: Execution) -> dict[str, Any]:
    # One without a number was not started, or is being ended by who has just started it.
    if not execution.background or execution.pid is None:
        return {}
    # It may have waited for an approval before.
    ran = timezone.now() - (execution.started_at or execution.created_at)
    milliseconds = round(ran.total_seconds() * 1000, 3)
    timings = {"start_ms": 0.0, "run_ms": milliseconds}
    more = extensions.end_values(execution.provider, timings)
    return {"run_ms": milliseconds, "total_ms": milliseconds, **more}


_LATE_COLUMNS = (
    *("exit_code", "error_code", "error_message", "has_result", "result", "outputs", "stdout"),
    *("stderr", "stdout_truncated", "stderr_truncated", "finished_at", "cost"),
)


def record_late(
    execution: Execution,
    status: Execution.Status,
    values: Mapping[str, Any],
    artifacts: Sequence[Artifact] = (),
) -> bool:
    """Keep what came of a run beside its closed record, and count its cost. False when there is
    one already."""
    late = LateResult(
        execution=execution,
        status=status,
        artifacts=[artifact_content(artifact) for artifact in artifacts],
        **{name: values[name] for name in _LATE_COLUMNS if name in values},
    )
    try:
        with transaction.atomic():
            # The receiver of its signal enters it in the ledger (`executions.receivers`).
            late.save(force_insert=True)
            for each in extensions.installed():
                each.on_late(execution, late)
            if more_ms := _ran_on(execution, values):
                add(tenant_use(execution.tenant_slug, timezone.now(), used_ms=more_ms))
    except IntegrityError:
        return False
    return True


def _ran_on(execution: Execution, values: Mapping[str, Any]) -> int:
    """Milliseconds that it ran beyond what was counted when its record was closed."""
    ms = min(values.get("run_ms") or 0.0, execution.timeout * 1000)
    return max(0, round(ms) - used_ms(execution, execution.timeout))


def late_result_of(execution: Execution) -> LateResult | None:
    """Asks the database only for what may have one: what was closed as lost or cancelled."""
    is_lost = execution.error_code == UNAVAILABLE.code and not execution.retryable
    if not is_lost and execution.status != Execution.Status.CANCELLED:
        return None
    return LateResult.objects.filter(execution=execution.pk).first()


def log_execution(execution: Execution, instance_id: str = "") -> None:
    """Of one that has ended. `instance_id` is what its provider calls the sandbox."""
    for each in extensions.installed():
        each.after_end(execution)
    peak = execution.meta.get("memory_peak_bytes")
    entry = execution.ledger_entry
    has_succeeded = execution.status == Execution.Status.SUCCEEDED
    behalf = execution.on_behalf_of
    log_operation(
        "execute_code",
        SUCCESS if has_succeeded else str(execution.status),
        at=execution.finished_at,
        execution_id=str(execution.pk),
        execution_status=str(execution.status),
        request_id=execution.request_id,
        tenant_id=execution.tenant_slug,
        api_key=execution.api_key_prefix,
        session_id=str(execution.session_id) if execution.session_id else None,
        provider=execution.provider,
        config_version=execution.config_version,
        runtime=execution.runtime,
        region=execution.meta.get("region"),
        instance_id=_scope_name(execution, instance_id),
        language=execution.language,
        code_hash=execution.code_hash,
        agent=execution.agent,
        model=execution.model,
        conversation=execution.conversation,
        # A log does not forget what the record will.
        on_behalf_of_hash=text_hash(behalf) if behalf else None,
        trace_id=execution.trace_id,
        exit_code=execution.exit_code,
        error_code=execution.error_code or None,
        duration_ms=execution.total_ms,
        received_ms=execution.received_ms,
        queue_ms=execution.queue_ms,
        start_ms=execution.start_ms,
        run_ms=execution.run_ms,
        closed_ms=execution.closed_ms,
        memory_used_mb=round(peak / 2**20, 1) if isinstance(peak, (int, float)) else None,
        ledger_sequence=entry.sequence if entry else None,
        ledger_digest=entry.digest if entry else None,
    )


def _scope_name(execution: Execution, instance_id: str) -> str:
    """`{tenant}:{session}:{instance}`, so that one name stands for no sandbox of anybody else. A
    run outside of sessions is one of its own."""
    if not instance_id:
        return ""
    return f"{execution.tenant_slug}:{execution.session_id or execution.pk}:{instance_id}"
