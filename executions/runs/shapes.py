"""The shapes of executions and of their parts, as answers have them."""

from __future__ import annotations

from typing import Annotated, Any, TypedDict, get_args

from executions.kernel.bodies import Choices, JsonObject, Time, Uri
from executions.runs.models import Execution
from providers.network import Mode, Outcome
from providers.values import KINDS, WITNESSES

Status = Annotated[str, Choices.of(Execution.Status.values)]


class ArtifactShape(TypedDict):
    name: str
    mime_type: str
    size_bytes: int
    url: Uri


class OmissionShape(TypedDict):
    """A file or an output that the answer does not contain. The last one may give their number."""

    name: Annotated[
        str,
        "For a file, its path below `artifacts/`; for an output, its number and "
        "type, or the name of the stream. A byte that is not text is written as `\\xNN`.",
    ]
    reason: str


class VerdictShape(TypedDict):
    code: Annotated[str, "The error code, SB001 to SB009."]
    message: str


class TimingsShape(TypedDict):
    """Milliseconds; null for what did not happen. The parts add up to the total."""

    received_ms: Annotated[
        float | None,
        "From the headers of the request to the record: the body, the key, the checks.",
    ]
    queue_ms: Annotated[
        float | None,
        "From the record to the provider: the queue, an approval, the turn in the session, and "
        "providers that failed before.",
    ]
    start_ms: Annotated[float | None, "Until the sandbox was there."]
    run_ms: Annotated[float | None, "Until the sandbox had answered, the transfer included."]
    closed_ms: Annotated[
        float | None,
        "Until the end of the record was written: the checks of the result, and the artifacts. "
        "The commit and the answer come after it.",
    ]
    total_ms: float | None


class PolicyRemarkShape(TypedDict):
    line: Annotated[int, "The line of the code, from 1; 0 for all of the code."]
    kind: Annotated[str, "`import`, `call`, `code`, `remark` or `note`."]
    name: str


class PolicyShape(TypedDict):
    id: int | None
    version: Annotated[int | None, "The version in the policy's history."]
    warnings: list[PolicyRemarkShape]
    approved: Annotated[JsonObject | None, "The approval: which code, by whom, and when."]


class NetworkListShape(TypedDict):
    """A list that applied to the run. An attempt must be allowed by all of them."""

    name: Annotated[str, "`installation`, `tenant`, `session` or `run`."]
    version: Annotated[int | None, "The version in the list's history; null of the request's own."]
    mode: Annotated[str, Choices.of(get_args(Mode))]
    allow: Annotated[list[str], "The first rules, only of the request's own list."]


class NetworkAttemptShape(TypedDict):
    """The result of one connection or request that a sandbox asked for."""

    at: Time
    host: str
    port: int
    outcome: Annotated[str, Choices.of(get_args(Outcome))]
    why: Annotated[str, "In a word, why it was refused or failed."]
    method: Annotated[str, "Empty for a tunnel, of which neither method nor path can be seen."]
    path: str
    layer: Annotated[str, "Whose list refused it, or would have."]
    rule: Annotated[str, "The rule that allowed it; empty where the list is open."]
    credential: Annotated[
        str, "Name and version of the credential that was put in, as name@version; or empty."
    ]
    noted: Annotated[bool, "Whether a list that only logs would have refused it."]
    sent: Annotated[int, "Bytes."]
    received: Annotated[int, "Bytes."]
    seconds: float


class NetworkShape(TypedDict):
    """The lists that applied, the number of attempts to reach a host, and the first of them."""

    lists: list[NetworkListShape]
    credentials: Annotated[list[str], "The credentials that were available, as name@version."]
    allowed: int
    refused: int
    failed: int
    sent: Annotated[int, "Bytes of all attempts."]
    received: Annotated[int, "Bytes of all attempts."]
    attempts: Annotated[list[NetworkAttemptShape], "At most 200."]


class ObservationShape(TypedDict):
    kind: Annotated[
        str, Choices.of(tuple(KINDS)), "; ".join(f"{kind}: {what}" for kind, what in KINDS.items())
    ]
    seen_by: Annotated[
        str,
        Choices.of(WITNESSES),
        "Who saw it: the host, outside the sandbox, or the supervisor, inside it.",
    ]
    count: int


class LateResultShape(TypedDict):
    """The result of a run that ended after its record was closed."""

    status: Status
    result: Any
    has_result: bool
    stdout: str
    stderr: str
    stdout_truncated: bool
    stderr_truncated: bool
    exit_code: int | None
    outputs: list[JsonObject]
    artifacts: Annotated[list[JsonObject], "Names and hashes only; the bytes were not kept."]
    error: VerdictShape | None
    finished_at: Time


class ProgramExceptionShape(TypedDict):
    """The exception that ended the program, as the program reported it."""

    type: Annotated[str, "For example ValueError; Error in a language without exception types."]
    message: str
    traceback: Annotated[
        str, "With notes, causes and the members of exception groups; empty if there is none."
    ]


class TemplateUseShape(TypedDict):
    """The template that gave the sandbox its packages."""

    name: str
    version: Annotated[int | None, "Null for `data`, the default packages."]
    digest: Annotated[str, "The SHA-256 of all its files; of `data`, that of its lock."]


class PlaceShape(TypedDict):
    """The execution, with its session and its caller."""

    id: str
    status: Status
    session: Annotated[
        str | None, "The session that it ran in; null for a run outside of sessions."
    ]
    context: str | None
    context_kept: Annotated[
        bool | None,
        "Whether the context still has its state, such as variables. If false, it was restarted.",
    ]
    pid: Annotated[int | None, "The process id of a command in a session."]
    agent: Annotated[str | None, "The agent, as claimed by the caller."]
    model: str | None
    conversation: str | None
    on_behalf_of: Annotated[
        str | None,
        "The person, as claimed by the caller. Null also after it was erased with the code.",
    ]
    traceparent: str | None


class ExecutionShape(PlaceShape):
    """The execution, with its session and its caller."""

    language: str
    provider: str
    runtime: Annotated[str, "The tool that isolated the sandbox."]
    isolation: Annotated[
        str, "The isolation level: microvm, gvisor, namespaces or none; empty if nothing ran."
    ]
    sharing: Annotated[
        str, "Who shared the sandbox: execution, only this run; tenant, also its other runs."
    ]
    result: Annotated[Any, "The return value of `main`."]
    has_result: Annotated[
        bool, "Whether there is a result: it distinguishes the result null from no result."
    ]
    stdout: str
    stderr: str
    stdout_truncated: bool
    stderr_truncated: bool
    exit_code: int | None
    outputs: Annotated[
        list[JsonObject], "Rich outputs. Each is an object with the data for each MIME type."
    ]
    artifacts: list[ArtifactShape]
    artifacts_skipped: Annotated[
        list[OmissionShape], "Files in `artifacts/` that were not kept, with the reason."
    ]
    outputs_skipped: Annotated[
        list[OmissionShape], "Rich outputs and ends of streams that were not kept, with the reason."
    ]
    advice: Annotated[
        list[str],
        "What helps after a missing package, a failed installation or a refused host: which "
        "packages are there, and which network rule lets pip or npm through. Usually empty.",
    ]
    error: VerdictShape | None
    exception: Annotated[
        ProgramExceptionShape | None,
        "The exception that ended the program; null if it did not fail or reported none.",
    ]
    hops: Annotated[
        list[JsonObject],
        "The providers that were tried or skipped, in order, each with the outcome and the reason.",
    ]
    cost: Annotated[str | None, "The estimated cost; null if the provider has no price."]
    timings: TimingsShape
    created_at: Time
    run_at: Annotated[Time | None, "The execution does not start before this time."]
    schedule: str | None
    receipt: Annotated[
        JsonObject | None, "The signed entry of the ledger, after the end. See examples/receipts."
    ]
    late_result: Annotated[
        LateResultShape | None,
        "A result that arrived after the execution was recorded as lost. It "
        "changes no other field.",
    ]
    files_saved: Annotated[
        bool | None,
        "Whether the files of its session were saved to storage as they were after "
        "the run; null outside of sessions.",
    ]
    restored: Annotated[
        bool,
        "Whether it is the first run after its session was resumed from storage. "
        "Files were restored, variables were lost.",
    ]
    policy: Annotated[PolicyShape | None, "The policy that applied, with its findings."]
    observations: Annotated[
        list[ObservationShape], "Security events that were seen during the run."
    ]
    network: Annotated[
        NetworkShape | None,
        "What the run could reach and tried to; null for a run without network.",
    ]
    template: TemplateUseShape | None


class ExecutionSummaryShape(PlaceShape):
    """The execution, with its session and its caller."""

    mode: Annotated[str, Choices.of(Execution.Mode.values)]
    priority: Annotated[str, Choices.of(Execution.Priority.labels)]
    language: str
    provider: str
    runtime: str
    isolation: str
    sharing: str
    exit_code: int | None
    error: VerdictShape | None
    timings: TimingsShape
    created_at: Time
    run_at: Annotated[Time | None, "The execution does not start before this time."]
    schedule: str | None


class ExecutionPageShape(TypedDict):
    results: list[ExecutionSummaryShape]
    next: Uri | None
