"""What a provider is: the interface every execution backend implements, and what it returns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from providers import waiting
from providers.addresses import check_fields
from providers.errors import InvalidConfiguration, SandboxError
from providers.schema import ConfigField, describe, validate

Entrypoint = Literal["auto", "main", "script", "repl"]
Stream = Literal["stdout", "stderr"]
OnOutput = Callable[[Stream, str], None]

ARGUMENTS = "arguments"
ARTIFACTS = "artifacts"
FILES = "files"
CONTEXTS = "contexts"
STREAMING = "streaming"
WORKSPACE = "workspace"
INTERRUPT = "interrupt"

# The key of a result's metadata under which it says what was seen of a sandbox that ended during
# the run, where neither time nor memory is known to be the reason.
SANDBOX_ENDED = "sandbox_ended"


@dataclass(frozen=True)
class InputFile:
    """A file put into the workspace before the code runs. `path` is relative and has no `..`."""

    path: str
    content: bytes


@dataclass(frozen=True)
class ArtifactFile:
    """A regular file the code left under `artifacts/`. `name` is relative to that folder."""

    name: str
    mime_type: str
    content: bytes


@dataclass(frozen=True)
class Limits:
    """Bounds of one execution. Sizes are bytes, times seconds.

    A provider may be stricter, never laxer. `output_bytes` holds for stdout and stderr each;
    what is beyond it is read and dropped, and flagged. `rich_output_bytes` holds for all rich
    outputs together.
    """

    memory_bytes: int = 256 * 1024 * 1024
    output_bytes: int = 200_000
    result_bytes: int = 1024 * 1024
    workspace_bytes: int = 100 * 1024 * 1024
    file_bytes: int = 64 * 1024 * 1024
    processes: int = 64
    open_files: int = 256
    artifact_count: int = 20
    artifact_bytes: int = 10 * 1024 * 1024
    artifacts_total_bytes: int = 20 * 1024 * 1024
    rich_output_count: int = 20
    rich_output_bytes: int = 8 * 1024 * 1024


@dataclass
class SandboxInstance:
    """One sandbox that can run code. `status` is running, stopped or error.

    `metadata` may hold `runtime` (the tool that isolates), `isolation` and `sharing` (see
    `providers.isolation`).
    """

    instance_id: str
    provider: str
    status: str
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass
class ExecutionResult:
    """What came of running code, whether it succeeded or not.

    `execution_time` is seconds. `exit_code` is 128 + n for a signal n and None when the code was
    ended by us. `timed_out` and `out_of_memory` rest on what the supervisor or the kernel saw,
    never on what the code printed or returned. `result` is the JSON value `main()` returned and
    counts only with `has_result`. `metadata` holds what is known of the sandbox: `runtime`
    (the isolation in force), `enforced_by` (who bounds what), `limits`, `memory_peak_bytes`,
    `cpu_seconds`, `image_digest`.
    `outputs` are rich values, each a map from MIME type to text, JSON value (JSON types), or
    base64 (all other types). They come from the program: whoever renders one must not trust it.
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

    @property
    def truncated(self) -> bool:
        return self.stdout_truncated or self.stderr_truncated


@dataclass
class Health:
    """Whether a provider can serve now, why not, and figures worth showing. Truthy when healthy.

    `answered` is as in `SandboxError`: it decides whether the message may be told.
    """

    healthy: bool
    message: str = ""
    details: dict[str, Any] = field(default_factory=dict)
    answered: Literal["", "status", "proof"] = ""

    def __bool__(self) -> bool:
        return self.healthy


class SandboxProvider(ABC):
    """One way of running code. Instances are used from many threads at once.

    The manager calls `initialize` once with a validated configuration, then any number of
    create, execute, destroy; `close` when the configuration was replaced and nothing runs in
    it any more. Every method raises `SandboxError` (see `providers.errors`) and no other
    exception for what can go wrong outside our own code.
    """

    id: ClassVar[str]
    name: ClassVar[str]
    description: ClassVar[str] = ""
    icon: ClassVar[str] = "terminal"
    tags: ClassVar[tuple[str, ...]] = ()
    capabilities: ClassVar[frozenset[str]] = frozenset()
    config_fields: ClassVar[Mapping[str, ConfigField]] = {}

    @abstractmethod
    def initialize(self, config: Mapping[str, Any]) -> bool:
        """Take a configuration that `check_config` has passed. True, or raises SandboxError."""

    def initialize_apart(self, config: Mapping[str, Any]) -> bool:
        """As `initialize`, to try a configuration out or to see how the backend is.

        One sandbox will do, and nothing that others use may change by it.
        """
        return self.initialize(config)

    @abstractmethod
    def create_instance(self, template: str = "python", *, owner: str = "") -> SandboxInstance:
        """A sandbox ready to run `template` (a language or a named template).

        `owner` is an opaque name of whoever it is for; no instance ever serves two of them.
        """

    @abstractmethod
    def execute_code(
        self,
        instance_id: str,
        code: str,
        language: str,
        timeout: float = 10,
        arguments: Mapping[str, Any] | None = None,
        *,
        entrypoint: Entrypoint = "auto",
        files: Sequence[InputFile] = (),
        limits: Limits | None = None,
    ) -> ExecutionResult:
        """Run code and wait for its end, at most `timeout` seconds and one more."""

    @abstractmethod
    def destroy_instance(self, instance_id: str) -> bool:
        """End a sandbox and all in it. False when it was not there, which is no error."""

    # The same three for callers who have something else to do meanwhile. What is awaited may go on
    # in any thread, and must not use the database. A provider that can wait without a thread
    # overrides them; for the others threads wait.

    def submit_create_instance(
        self, template: str = "python", *, owner: str = ""
    ) -> Future[SandboxInstance]:
        """`create_instance`, begun. Raises RateLimited when too much is waited for already."""
        return waiting.submit(lambda: self.create_instance(template, owner=owner), may_refuse=True)

    def submit_execute_code(
        self,
        instance_id: str,
        code: str,
        language: str,
        timeout: float = 10,
        arguments: Mapping[str, Any] | None = None,
        *,
        entrypoint: Entrypoint = "auto",
        files: Sequence[InputFile] = (),
        limits: Limits | None = None,
    ) -> Future[ExecutionResult]:
        """`execute_code`, begun."""
        return waiting.submit(
            lambda: self.execute_code(
                instance_id,
                code,
                language,
                timeout,
                arguments,
                entrypoint=entrypoint,
                files=files,
                limits=limits,
            )
        )

    def submit_destroy_instance(self, instance_id: str) -> Future[bool]:
        """`destroy_instance`, begun."""
        return waiting.submit(lambda: self.destroy_instance(instance_id))

    @abstractmethod
    def health_check(self) -> Health:
        """Look at the backend now. Never raises."""

    @abstractmethod
    def get_supported_languages(self) -> list[str]:
        """The languages that really run here now."""

    @property
    def isolation(self) -> str:
        """How strongly every sandbox of this provider is isolated: see `providers.isolation`.

        Empty: each instance says so itself, as `isolation` in its metadata. One that says nothing
        either counts as `none`, and nothing runs in it unless MINIMUM_ISOLATION allows that.
        """
        return ""

    @property
    def sharing(self) -> str:
        """Whom a sandbox serves: `execution` is one run alone. See `providers.isolation`."""
        return "execution"

    @property
    def max_timeout(self) -> float | None:
        """The longest run this provider carries out, in seconds. None: as long as is asked for."""
        return None

    def is_full(self) -> bool:
        """Whether a caller would have to wait for a sandbox now.

        Asked before every run that could go to another provider instead, so it costs no more
        than a look at this process or next door.
        """
        return False

    def stream_code(
        self,
        instance_id: str,
        code: str,
        language: str,
        timeout: float = 10,
        arguments: Mapping[str, Any] | None = None,
        *,
        on_output: OnOutput,
        entrypoint: Entrypoint = "auto",
        files: Sequence[InputFile] = (),
        limits: Limits | None = None,
    ) -> ExecutionResult:
        """`execute_code`, with the output handed over as it comes. Needs STREAMING."""
        raise self.lacks(STREAMING)

    def create_context(self, instance_id: str, language: str = "python") -> str:
        """The id of a new interpreter that keeps its state between runs. Needs CONTEXTS."""
        raise self.lacks(CONTEXTS)

    def execute_in_context(
        self,
        instance_id: str,
        context_id: str,
        code: str,
        timeout: float = 10,
        *,
        limits: Limits | None = None,
    ) -> ExecutionResult:
        """Run code where earlier code of the context has left its state. Needs CONTEXTS."""
        raise self.lacks(CONTEXTS)

    def destroy_context(self, instance_id: str, context_id: str) -> bool:
        """End an interpreter. False when it was not there. Needs CONTEXTS."""
        raise self.lacks(CONTEXTS)

    def write_file(self, instance_id: str, file: InputFile) -> None:
        """Put a file into the workspace of a running instance. Needs WORKSPACE."""
        raise self.lacks(WORKSPACE)

    def read_file(self, instance_id: str, path: str, limit: int) -> bytes | None:
        """A file of the workspace, None where there is none. Needs WORKSPACE.

        Raises InvalidConfiguration for one of more than `limit` bytes.
        """
        raise self.lacks(WORKSPACE)

    def sweep(self) -> int:
        """Destroy instances that a process of ours has left behind by ending. How many."""
        return 0

    @classmethod
    def lacks(cls, capability: str) -> SandboxError:
        """The error for a caller who asks for what is not among `capabilities`."""
        return InvalidConfiguration(f"Provider {cls.id!r} does not offer {capability}.")

    def close(self) -> None:
        """Release what `initialize` took. Nothing runs in the provider any more."""

    @classmethod
    def get_config_schema(cls) -> dict[str, dict[str, Any]]:
        """The configuration's fields as JSON, for API clients that build their own form."""
        return describe(cls.config_fields)

    def validate_config(self, config: Mapping[str, Any]) -> tuple[bool, str | None]:
        """Rules beyond the schema (one field against another, formats). (ok, message)."""
        return True, None

    @classmethod
    def check_config(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """The configuration with its defaults. Raises InvalidConfiguration naming each field."""
        cleaned = validate(cls.config_fields, config)
        ok, message = cls().validate_config(cleaned)
        if not ok:
            raise InvalidConfiguration(message or "The configuration is refused.")
        check_fields(cls.config_fields, cleaned)
        return cleaned
