"""What goes into a sandbox and comes out of it, one shape per thing, and what was seen of a run.

Two can see something. The `host` is the kernel's or the engine's count outside of the sandbox,
which no program in it can change. The `supervisor` is our process in the sandbox: programs cannot
reach it, but a sandbox that was broken says in its stead what it likes. So that is a claim on the
run it speaks of, and on nothing else: no provider and nobody's breaker is judged by it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from providers.network import Network
from providers.runtime.guest.names import Omissions
from providers.runtime.guest.program import (
    MESSAGE_CHARACTERS,
    TRACEBACK_CHARACTERS,
    TYPE_CHARACTERS,
)

Entrypoint = Literal["auto", "main", "script", "repl"]
Stream = Literal["stdout", "stderr"]

# What is told of an exception, and how many characters of each.
EXCEPTION_FIELDS = {
    "type": TYPE_CHARACTERS,
    "message": MESSAGE_CHARACTERS,
    "traceback": TRACEBACK_CHARACTERS,
}

# The key of a result's metadata under which it says what was seen of a sandbox that ended during
# the run, where neither time nor memory is known to be the reason.
SANDBOX_ENDED = "sandbox_ended"
# The keys under which it says what was left out of files and of outputs, as [name, reason].
ARTIFACTS_SKIPPED, OUTPUTS_SKIPPED = "artifacts_skipped", "outputs_skipped"


@dataclass(frozen=True)
class InputFile:
    """A file put into the workspace before the code runs. `path` is relative and has no `..`."""

    path: str
    content: bytes


@dataclass(frozen=True)
class Packages:
    """What Python programs can import beyond the standard library: versions by name, whether
    they are all there (`ready`, `preparing`, `failed`), and why not. `digest` is of the lock that
    was installed, empty where none was, and `installed_at` when that was, in seconds since 1970.
    `node` are versions of npm packages by name, for programs in JavaScript."""

    state: Literal["ready", "preparing", "failed"]
    reason: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    digest: str = ""
    installed_at: float = 0.0
    node: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ArtifactFile:
    """A regular file the code left under `artifacts/`. `name` is relative to that folder."""

    name: str
    mime_type: str
    content: bytes


@dataclass(frozen=True)
class RunLimits:
    """Bounds of one run. Sizes are bytes. A provider may be stricter, never laxer.

    `output_bytes` holds for stdout and stderr each; what is beyond it is read and dropped, and
    flagged. `rich_output_bytes` holds for all rich outputs together. What is left out is named in
    the result's metadata (`note_omissions`).
    """

    output_bytes: int = 200_000
    result_bytes: int = 1024 * 1024
    artifact_count: int = 20
    artifact_bytes: int = 10 * 1024 * 1024
    artifacts_total_bytes: int = 20 * 1024 * 1024
    rich_output_count: int = 20
    rich_output_bytes: int = 8 * 1024 * 1024


@dataclass(frozen=True)
class SandboxLimits:
    """Bounds of a sandbox, whatever runs in it. Sizes are bytes.

    A provider may be stricter, never laxer.
    """

    memory_bytes: int = 256 * 1024 * 1024
    workspace_bytes: int = 100 * 1024 * 1024
    file_bytes: int = 64 * 1024 * 1024
    processes: int = 64
    open_files: int = 256


@dataclass(frozen=True)
class SandboxSpec:
    """The sandbox that is asked for. `template` is a language or a named template.

    With `kept` it stays until it is closed and runs many jobs; without, it is closed after one.
    `limits` are obeyed or refused, never dropped; None takes those the provider is configured
    with. `environment` is set for all that runs in it. `seconds` is how long one that is kept lasts
    until it is renewed for the first time, None as long as its provider likes. `network` is what
    it may reach, None nothing; a provider without `holds_network` refuses one. `digest` is of the
    template whose files it has (`providers.templates`), empty for none; a provider without
    `holds_templates` refuses one, unless it has a template of its own for the `template_name`.
    """

    template: str = "python"
    kept: bool = False
    limits: SandboxLimits | None = None
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    seconds: float | None = None
    network: Network | None = None
    digest: str = ""
    template_name: str = ""


@dataclass(frozen=True)
class Job:
    """Code to be run. `timeout` is seconds.

    `context` names the interpreter of a kept sandbox in which it runs, the default one where it is
    empty. There `main` is called only where `arguments` are given, and `entrypoint` is not asked.
    `environment` is set for this job and what it starts, and may hold secrets. `run` is a name that
    no other run has, by which an interrupt can mean this one. `tools` are names of what code in a
    kept sandbox may call (see `ToolCall`).
    """

    code: str
    language: str = "python"
    timeout: float = 10
    arguments: Mapping[str, Any] | None = None
    entrypoint: Entrypoint = "auto"
    files: Sequence[InputFile] = ()
    limits: RunLimits = field(default_factory=RunLimits)
    context: str = ""
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    run: str = ""
    tools: Sequence[str] = ()


@dataclass(frozen=True)
class Command:
    """A process to be started: `argv`, or `shell` which bash is given to run.

    `cwd` is below the workspace. `pty` is columns and rows of a terminal, None for pipes. `timeout`
    is seconds, None for a process that runs until it ends or its sandbox does.
    """

    argv: Sequence[str] = ()
    shell: str = ""
    cwd: str = ""
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    user: str = ""
    stdin: bool = False
    pty: tuple[int, int] | None = None
    timeout: float | None = None


@dataclass(frozen=True)
class ToolCall:
    """Code wants a tool of its caller's called, and waits for the answer (`KeptSandbox.answer`).

    `number` is what the answer is for, and `arguments` the bytes of a JSON object: both as the code
    claims them.
    """

    number: int
    name: str
    arguments: bytes


@dataclass(frozen=True)
class Event:
    """Something a run or a process has put out, as it came: the order is that of the events.

    `data` is the bytes of stdout or stderr, which may end within a character. `output` is a rich
    value, a map from MIME type to text, JSON value or base64, and comes without `data`. `call` is
    of a `tool_call`, which only a job with tools has. `attempt` is of a `network`, as
    `providers.network.Attempt.to_json` has it: one that has ended in the sandbox meanwhile.
    """

    type: Literal["stdout", "stderr", "output", "tool_call", "network"]
    data: bytes = b""
    output: Mapping[str, Any] | None = None
    call: ToolCall | None = None
    attempt: Mapping[str, Any] | None = None


# Called from any thread, one event after the other, and before the result is there. It must not
# wait and must not raise.
Emit = Callable[[Event], None]


@dataclass
class ExecutionResult:
    """What came of running code, whether it succeeded or not.

    `execution_time` is seconds. `exit_code` is 128 + n for a signal n and None when the code was
    ended by us. `timed_out` and `out_of_memory` rest on what the supervisor or the kernel saw,
    never on what the code printed or returned. `result` is the JSON value `main()` returned and
    counts only with `has_result`. `metadata` holds what is known of the sandbox: `runtime`
    (the isolation in force), `enforced_by` (who bounds what), `limits`, `memory_peak_bytes`,
    `cpu_seconds`, `image_digest`, `interpreter` (such as `python 3.11.2`), `artifacts_skipped` and
    `outputs_skipped` (see `note_omissions`), `network` (`Attempts.to_json`).
    `outputs` are rich values, each a map from MIME type to text, JSON value (JSON types), or
    base64 (all other types). They come from the program: whoever renders one must not trust it.
    `exception` is what ended the program, by its own account: `type`, `message` and `traceback` as
    text; None where nothing is known of it.
    `output_order` is in which order the bytes of stdout (1) and stderr (2) came, as [which, how
    many]; None where that is not known.
    """

    stdout: str
    stderr: str
    exit_code: int | None
    execution_time: float
    metadata: dict[str, Any] = field(default_factory=dict)
    stdout_truncated: bool = False
    stderr_truncated: bool = False
    timed_out: bool = False
    out_of_memory: bool = False
    has_result: bool = False
    result: Any = None
    outputs: list[dict[str, Any]] = field(default_factory=list)
    artifacts: list[ArtifactFile] = field(default_factory=list)
    output_order: list[list[int]] | None = None
    exception: dict[str, str] | None = None

    @property
    def truncated(self) -> bool:
        return self.stdout_truncated or self.stderr_truncated


def note_omissions(metadata: dict[str, Any], key: str, skipped: Omissions) -> None:
    """Say in a result's metadata what was left out, if anything.

    `key` is ARTIFACTS_SKIPPED or OUTPUTS_SKIPPED.
    """
    if entries := skipped.entries:
        metadata[key] = entries


def exception_of(told: object) -> dict[str, str] | None:
    """What is claimed of an exception as its three texts within their bounds, NUL replaced.

    None for what is none.
    """
    if not isinstance(told, Mapping):
        return None
    found = {name: told.get(name) for name in EXCEPTION_FIELDS}
    if not found["type"] or not all(isinstance(text, str) for text in found.values()):
        return None
    return {
        name: str(found[name])[:most].replace("\0", "\ufffd")
        for name, most in EXCEPTION_FIELDS.items()
    }


# The key of a result's metadata that has the list, which is not there where nothing was seen.
OBSERVATIONS = "observations"

SIGSYS, PROCESS_LIMIT, PROCESS_BURST = "sigsys", "process_limit", "process_burst"
# What each means, for those who read records; `count` is of what is counted in it.
KINDS = {
    SIGSYS: "processes ended by SIGSYS, which the system call filter sends",
    PROCESS_LIMIT: "processes refused at the process limit, or present at the end of the run",
    PROCESS_BURST: "processes and threads started, or refused at the limit of a container",
}
HOST, SUPERVISOR = "host", "supervisor"
WITNESSES = (HOST, SUPERVISOR)

# From how many processes and threads on, started in one run, it is a burst.
BURST = 1000
_LARGEST = 2**31


def observation(kind: str, seen_by: str, count: int) -> dict[str, Any]:
    """One entry of the list."""
    return {"kind": kind, "seen_by": seen_by, "count": min(count, _LARGEST)}


def note(metadata: dict[str, Any], found: list[dict[str, Any]]) -> None:
    """Into the metadata of a result, where there is something."""
    if found:
        metadata[OBSERVATIONS] = found


def checked(claimed: Any) -> list[dict[str, Any]]:
    """The entries that are what they should be: each kind once, and nothing else said of it."""
    found: dict[str, dict[str, Any]] = {}
    for entry in claimed[:50] if isinstance(claimed, list) else ():
        if not isinstance(entry, dict):
            continue
        kind, seen_by, count = (entry.get(name) for name in ("kind", "seen_by", "count"))
        if not (isinstance(kind, str) and kind in KINDS and seen_by in WITNESSES):
            continue
        if type(count) is int and 0 < count <= _LARGEST:
            found.setdefault(kind, observation(kind, seen_by, count))
    return [found[kind] for kind in KINDS if kind in found]
