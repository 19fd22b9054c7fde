"""What a provider is: the interface every execution backend implements, and what it returns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from providers.errors import InvalidConfiguration
from providers.schema import ConfigField, describe, validate

Entrypoint = Literal["auto", "main", "script", "repl"]

ARGUMENTS = "arguments"
ARTIFACTS = "artifacts"
FILES = "files"
CONTEXTS = "contexts"
STREAMING = "streaming"
INTERRUPT = "interrupt"


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
    """One sandbox that can run code. `status` is running, stopped or error."""

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
    (the isolation in force), `limits`, `memory_peak_bytes`, `cpu_seconds`, `image_digest`.
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
    """Whether a provider can serve now, why not, and figures worth showing. Truthy when healthy."""

    healthy: bool
    message: str = ""
    details: dict[str, Any] = field(default_factory=dict)

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

    @abstractmethod
    def health_check(self) -> Health:
        """Look at the backend now. Never raises."""

    @abstractmethod
    def get_supported_languages(self) -> list[str]:
        """The languages that really run here now."""

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
        return cleaned
