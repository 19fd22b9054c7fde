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
    # The working folder, relative to the workspace.
    cwd: str


@dataclass(frozen=True, kw_only=True)
class Execution(Shape):
    """The execution, with its session and its caller."""

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
    # The session that it ran in; null for a run outside of sessions.
    session: str | None
    context: str | None
    # Whether the context still has its state, such as variables. If false, it was restarted.
    context_kept: bool | None
    # The process id of a command in a session.
    pid: int | None
    # The agent, as claimed by the caller.
    agent: str | None
    model: str | None
    conversation: str | None
    # The person, as claimed by the caller. Null also after it was erased with the code.
    on_behalf_of: str | None
    traceparent: str | None
    language: str
    provider: str
    # The tool that isolated the sandbox.
    runtime: str
    # The isolation level: microvm, gvisor, namespaces or none; empty if nothing ran.
    isolation: str
    # Who shared the sandbox: execution, only this run; tenant, also its other runs.
    sharing: str
    # The return value of `main`.
    result: Any
    # Whether there is a result: it distinguishes the result null from no result.
    has_result: bool
    stdout: str
    stderr: str
    stdout_truncated: bool
    stderr_truncated: bool
    exit_code: int | None
    # Rich outputs. Each is an object with the data for each MIME type.
    outputs: list[dict[str, Any]]
    artifacts: list[Artifact]
    # Files in `artifacts/` that were not kept, with the reason.
    artifacts_skipped: list[Omission]
    # Rich outputs and ends of streams that were not kept, with the reason.
    outputs_skipped: list[Omission]
    # What helps after a missing package, a failed installation or a refused host: which
    # packages are there, and which network rule lets pip or npm through. Usually empty.
    advice: list[str]
    error: Verdict | None
    # The exception that ended the program; null if it did not fail or reported none.
    exception: ProgramException | None
    # The providers that were tried or skipped, in order, each with the outcome and the reason.
    hops: list[dict[str, Any]]
    # The estimated cost; null if the provider has no price.
    cost: str | None
    timings: Timings
    created_at: datetime
    # The execution does not start before this time.
    run_at: datetime | None
    schedule: str | None
    # The signed entry of the ledger, after the end. See examples/receipts.
    receipt: dict[str, Any] | None
    # A result that arrived after the execution was recorded as lost. It changes no other field.
    late_result: LateResult | None
    # Whether the files of its session were saved to storage as they were after the run; null
    # outside of sessions.
    files_saved: bool | None
    # Whether it is the first run after its session was resumed from storage. Files were
    # restored, variables were lost.
    restored: bool
    # The policy that applied, with its findings.
    policy: Policy | None
    # Security events that were seen during the run.
    observations: list[Observation]
    # What the run could reach and tried to; null for a run without network.
    network: Network | None
    template: TemplateUse | None


@dataclass(frozen=True, kw_only=True)
class ExecutionSummary(Shape):
    """The execution, with its session and its caller."""

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
    # The session that it ran in; null for a run outside of sessions.
    session: str | None
    context: str | None
    # Whether the context still has its state, such as variables. If false, it was restarted.
    context_kept: bool | None
    # The process id of a command in a session.
    pid: int | None
    # The agent, as claimed by the caller.
    agent: str | None
    model: str | None
    conversation: str | None
    # The person, as claimed by the caller. Null also after it was erased with the code.
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
    # The execution does not start before this time.
    run_at: datetime | None
    schedule: str | None


@dataclass(frozen=True, kw_only=True)
class File(Shape):
    path: str
    type: Literal["file", "directory", "symlink", "other"]
    size_bytes: int
    mode: int
    modified_at: datetime | None
    # The target of a symbolic link.
    target: str | None = None


@dataclass(frozen=True, kw_only=True)
class LateResult(Shape):
    """The result of a run that ended after its record was closed."""

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
    # Names and hashes only; the bytes were not kept.
    artifacts: list[dict[str, Any]]
    error: Verdict | None
    finished_at: datetime


@dataclass(frozen=True, kw_only=True)
class Network(Shape):
    """The lists that applied, the number of attempts to reach a host, and the first of them."""

    lists: list[NetworkList]
    # The credentials that were available, as name@version.
    credentials: list[str]
    allowed: int
    refused: int
    failed: int
    # Bytes of all attempts.
    sent: int
    # Bytes of all attempts.
    received: int
    # At most 200.
    attempts: list[NetworkAttempt]


@dataclass(frozen=True, kw_only=True)
class NetworkAttempt(Shape):
    """The result of one connection or request that a sandbox asked for."""

    at: datetime
    host: str
    port: int
    outcome: Literal["allowed", "refused", "failed"]
    # In a word, why it was refused or failed.
    why: str
    # Empty for a tunnel, of which neither method nor path can be seen.
    method: str
    path: str
    # Whose list refused it, or would have.
    layer: str
    # The rule that allowed it; empty where the list is open.
    rule: str
    # Name and version of the credential that was put in, as name@version; or empty.
    credential: str
    # Whether a list that only logs would have refused it.
    noted: bool
    # Bytes.
    sent: int
    # Bytes.
    received: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class NetworkList(Shape):
    """A list that applied to the run. An attempt must be allowed by all of them."""

    # `installation`, `tenant`, `session` or `run`.
    name: str
    # The version in the list's history; null of the request's own.
    version: int | None
    mode: Literal["none", "allowlist", "open"]
    # The first rules, only of the request's own list.
    allow: list[str]


@dataclass(frozen=True, kw_only=True)
class Observation(Shape):
    # sigsys: processes ended by SIGSYS, which the system call filter sends; process_limit:
    # processes refused at the process limit, or present at the end of the run; process_burst:
    # processes and threads started, or refused at the limit of a container
    kind: Literal["sigsys", "process_limit", "process_burst"]
    # Who saw it: the host, outside the sandbox, or the supervisor, inside it.
    seen_by: Literal["host", "supervisor"]
    count: int


@dataclass(frozen=True, kw_only=True)
class Omission(Shape):
    """A file or an output that the answer does not contain. The last one may give their number."""

    # For a file, its path below `artifacts/`; for an output, its number and type, or the name
    # of the stream. A byte that is not text is written as `\xNN`.
    name: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Policy(Shape):
    id: int | None
    # The version in the policy's history.
    version: int | None
    warnings: list[PolicyRemark]
    # The approval: which code, by whom, and when.
    approved: dict[str, Any] | None


@dataclass(frozen=True, kw_only=True)
class PolicyRemark(Shape):
    # The line of the code, from 1; 0 for all of the code.
    line: int
    # `import`, `call`, `code`, `remark` or `note`.
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
    """The exception that ended the program, as the program reported it."""

    # For example ValueError; Error in a language without exception types.
    type: str
    message: str
    # With notes, causes and the members of exception groups; empty if there is none.
    traceback: str


@dataclass(frozen=True, kw_only=True)
class Quota(Shape):
    # Null if no budget is set.
    limit: float | None
    # Includes the amounts that are reserved for work that has not ended.
    used: float
    # Null if the use decreases by itself, for example when executions end.
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
    """The files of a session in storage."""

    # The number of files, folders and links.
    count: int
    bytes: int
    saved_at: datetime | None
    # Since when changes are unsaved; null if everything is saved.
    unsaved_since: datetime | None
    # Why the changes are not saved.
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
    # When its idle time or its total time ends, whichever is earlier.
    expires_at: datetime
    closed_at: datetime | None
    # Why it was closed or lost; null while it is not.
    closed_because: str | None
    contexts: list[Context]
    # When its files are saved to storage: before the answer, after it, or never.
    saves: Literal["answer", "background", "never"]
    files: SavedFiles
    # When it was last resumed from storage. Its files were restored, its variables were lost.
    woken_at: datetime | None


@dataclass(frozen=True, kw_only=True)
class Snapshot(Shape):
    """The files of a session at one time, without its variables and processes."""

    id: str
    name: str | None
    # The session that the files are from.
    session: str
    # The number of files, folders and links.
    files: int
    bytes: int
    created_at: datetime


@dataclass(frozen=True, kw_only=True)
class TemplateUse(Shape):
    """The template that gave the sandbox its packages."""

    name: str
    # Null for `data`, the default packages.
    version: int | None
    # The SHA-256 of all its files; of `data`, that of its lock.
    digest: str


@dataclass(frozen=True, kw_only=True)
class Timings(Shape):
    """Milliseconds; null for what did not happen. The parts add up to the total."""

    # From the headers of the request to the record: the body, the key, the checks.
    received_ms: float | None
    # From the record to the provider: the queue, an approval, the turn in the session, and
    # providers that failed before.
    queue_ms: float | None
    # Until the sandbox was there.
    start_ms: float | None
    # Until the sandbox had answered, the transfer included.
    run_ms: float | None
    # Until the end of the record was written: the checks of the result, and the artifacts. The
    # commit and the answer come after it.
    closed_ms: float | None
    total_ms: float | None


@dataclass(frozen=True, kw_only=True)
class Usage(Shape):
    tenant: str
    quotas: Quotas


@dataclass(frozen=True, kw_only=True)
class Verdict(Shape):
    # The error code, SB001 to SB009.
    code: str
    message: str
