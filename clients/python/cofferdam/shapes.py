"""Answers of the service. Generated from its OpenAPI description by make_shapes.py: do not edit."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from cofferdam.decoding import Shape


@dataclass(frozen=True, kw_only=True)
class Artifact(Shape):
    name: str
    mime_type: str
    size_bytes: int
    url: str


@dataclass(frozen=True, kw_only=True)
class Context(Shape):
    id: str
    language: str
    # Below the workspace.
    cwd: str


@dataclass(frozen=True, kw_only=True)
class Execution(Shape):
    """Which execution it is, and where it ran."""

    id: str
    status: Literal[
        "queued",
        "running",
        "succeeded",
        "failed",
        "timed_out",
        "out_of_memory",
        "blocked",
        "cancelled",
        "error",
    ]
    # Where it ran; null: by itself.
    session: str | None
    context: str | None
    # Whether the context still has its state.
    context_kept: bool | None
    # Of a command in a session.
    pid: int | None
    # Who asked, by the caller's word.
    agent: str | None
    model: str | None
    conversation: str | None
    # Null also where it was erased with the code.
    on_behalf_of: str | None
    traceparent: str | None
    language: str
    provider: str
    # The tool that isolated.
    runtime: str
    # How strongly: microvm, gvisor, namespaces or none; empty when nothing ran.
    isolation: str
    # Whom the sandbox served: execution, this run alone; tenant, its others too.
    sharing: str
    # What `main` returned.
    result: Any
    has_result: bool
    stdout: str
    stderr: str
    stdout_truncated: bool
    stderr_truncated: bool
    exit_code: int | None
    # Rich outputs, each a map from MIME type to data.
    outputs: list[dict[str, Any]]
    artifacts: list[Artifact]
    # Files that the code left and that were not kept, and why.
    artifacts_skipped: list[Omission]
    # Rich outputs and ends of streams that were not kept, and why.
    outputs_skipped: list[Omission]
    error: Verdict | None
    # What ended a program that failed; null where it has not, or said nothing.
    exception: ProgramException | None
    # The providers that were tried or passed over, and why.
    hops: list[dict[str, Any]]
    # Estimated; null where the provider has no price.
    cost: str | None
    timings: Timings
    created_at: datetime
    # Nobody takes it before.
    run_at: datetime | None
    schedule: str | None
    # The signed entry of the ledger, once ended. See examples/receipts.
    receipt: dict[str, Any] | None
    # What came of it after the record had been closed as lost; changes nothing else.
    late_result: LateResult | None
    # Whether the files of its session are in storage as it left them.
    files_saved: bool | None
    # The first since its session was woken: files are there, variables are not.
    restored: bool
    # Which held, and what was found by it.
    policy: Policy | None
    # What was seen of it.
    observations: list[Observation]


@dataclass(frozen=True, kw_only=True)
class ExecutionSummary(Shape):
    """Which execution it is, and where it ran."""

    id: str
    status: Literal[
        "queued",
        "running",
        "succeeded",
        "failed",
        "timed_out",
        "out_of_memory",
        "blocked",
        "cancelled",
        "error",
    ]
    # Where it ran; null: by itself.
    session: str | None
    context: str | None
    # Whether the context still has its state.
    context_kept: bool | None
    # Of a command in a session.
    pid: int | None
    # Who asked, by the caller's word.
    agent: str | None
    model: str | None
    conversation: str | None
    # Null also where it was erased with the code.
    on_behalf_of: str | None
    traceparent: str | None
    mode: Literal["sync", "async"]
    priority: Literal["low", "normal", "high"]
    language: str
    provider: str
    runtime: str
    isolation: str
    sharing: str
    exit_code: int | None
    error: Verdict | None
    timings: Timings
    created_at: datetime
    # Nobody takes it before.
    run_at: datetime | None
    schedule: str | None


@dataclass(frozen=True, kw_only=True)
class File(Shape):
    path: str
    type: Literal["file", "directory", "symlink", "other"]
    size_bytes: int
    mode: int
    modified_at: datetime | None
    # What a symbolic link says.
    target: str | None = None


@dataclass(frozen=True, kw_only=True)
class LateResult(Shape):
    """What came of a run after its record had been closed."""

    status: Literal[
        "queued",
        "running",
        "succeeded",
        "failed",
        "timed_out",
        "out_of_memory",
        "blocked",
        "cancelled",
        "error",
    ]
    result: Any
    has_result: bool
    stdout: str
    stderr: str
    stdout_truncated: bool
    stderr_truncated: bool
    exit_code: int | None
    outputs: list[dict[str, Any]]
    # Names and hashes; the bytes were not kept.
    artifacts: list[dict[str, Any]]
    error: Verdict | None
    finished_at: datetime


@dataclass(frozen=True, kw_only=True)
class Observation(Shape):
    # sigsys: processes ended by SIGSYS, with which the filter of system calls ends them;
    # process_limit: processes refused, or there at its end, as many as it may have;
    # process_burst: processes and threads started, or tried where a container may have no more
    kind: Literal["sigsys", "process_limit", "process_burst"]
    # The host, from outside of the sandbox, or the supervisor within it.
    seen_by: Literal["host", "supervisor"]
    count: int


@dataclass(frozen=True, kw_only=True)
class Omission(Shape):
    """What code has left or shown, and the answer has not. The last one may say how many more."""

    # Of a file, its path below `artifacts/`; of an output, its number and type, or the stream.
    # A byte that is no text is told as `\xNN`.
    name: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Policy(Shape):
    id: int | None
    # In the policy's history.
    version: int | None
    warnings: list[PolicyRemark]
    # Who has approved which code, and when.
    approved: dict[str, Any] | None


@dataclass(frozen=True, kw_only=True)
class PolicyRemark(Shape):
    # Of the code, from 1; 0 is all of it.
    line: int
    # import, call, code, remark or note.
    kind: str
    name: str


@dataclass(frozen=True, kw_only=True)
class Process(Shape):
    pid: int
    execution: str | None
    state: Literal["running", "exited"]
    exit_code: int | None


@dataclass(frozen=True, kw_only=True)
class ProgramException(Shape):
    """What ended the program, by its own account."""

    # Such as ValueError; Error where there are no types.
    type: str
    message: str
    # With notes, causes and members of groups; empty where there is none.
    traceback: str


@dataclass(frozen=True, kw_only=True)
class Quota(Shape):
    # Null: a budget that nobody has set.
    limit: float | None
    # With what is reserved for what has not ended.
    used: float
    # Null where it is given back by itself, as by what ends.
    resets_at: datetime | None


@dataclass(frozen=True, kw_only=True)
class Quotas(Shape):
    running: Quota
    queued: Quota
    requests_per_minute: Quota
    executions_per_day: Quota
    seconds_per_day: Quota
    stored_bytes_per_day: Quota
    sessions: Quota
    schedules: Quota
    tenant_storage_bytes: Quota
    tenant_storage_files: Quota
    budget_per_day: Quota
    budget_per_month: Quota


@dataclass(frozen=True, kw_only=True)
class SavedFiles(Shape):
    """What is in storage of a session's files."""

    # Files, folders and links.
    count: int
    bytes: int
    saved_at: datetime | None
    # Null where all that is in its sandbox is saved.
    unsaved_since: datetime | None
    # Why it is not.
    problem: str | None


@dataclass(frozen=True, kw_only=True)
class Session(Shape):
    id: str
    name: str | None
    state: Literal["open", "asleep", "closed", "lost"]
    provider: str
    runtime: str
    isolation: str
    sharing: str
    language: str
    template: str | None
    metadata: dict[str, Any]
    idle_seconds: int
    max_seconds: int
    created_at: datetime
    used_at: datetime
    # The earlier of both ages.
    expires_at: datetime
    closed_at: datetime | None
    closed_because: str | None
    contexts: list[Context]
    saves: Literal["answer", "background", "never"]
    files: SavedFiles
    # Its files were restored then; variables were not.
    woken_at: datetime | None


@dataclass(frozen=True, kw_only=True)
class Snapshot(Shape):
    """The files of a session as they were once. Variables and processes are no part of it."""

    id: str
    name: str | None
    # Whose files these were.
    session: str
    # Files, folders and links.
    files: int
    bytes: int
    created_at: datetime


@dataclass(frozen=True, kw_only=True)
class Timings(Shape):
    queue_ms: float | None
    start_ms: float | None
    run_ms: float | None
    total_ms: float | None


@dataclass(frozen=True, kw_only=True)
class Usage(Shape):
    tenant: str
    quotas: Quotas


@dataclass(frozen=True, kw_only=True)
class Verdict(Shape):
    # SB001 to SB009.
    code: str
    message: str
