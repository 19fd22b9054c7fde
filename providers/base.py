"""What a provider is: the interface every execution backend implements, and what it returns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from providers import waiting
from providers.addresses import check_fields
from providers.credentials import Credential
from providers.errors import (
    InvalidConfiguration,
    ProviderUnavailable,
    SandboxError,
    before_the_code,
)
from providers.sandbox import KeptSandbox, Sandbox, tell_afterwards
from providers.schema import ConfigField, describe, validate
from providers.values import (
    Emit,
    Entrypoint,
    ExecutionResult,
    InputFile,
    Job,
    Packages,
    RunLimits,
    SandboxSpec,
)

ARGUMENTS = "arguments"
ARTIFACTS = "artifacts"
FILES = "files"
STREAMING = "streaming"
WORKSPACE = "workspace"
KEPT = "kept sandboxes"
PROCESSES = "processes"
# Some of them: those that are waited for, without an input and a terminal.
COMMANDS = "commands"
# Variables: those of a single run, and of a kept sandbox those for all that runs in it.
ENVIRONMENT = "environment"
# Of a kept sandbox: a cell that any holder of it interrupts and whose state stays, files with modes
# and no way outside, what changes told to whoever listens, and the memory that it uses.
INTERRUPTS = "interrupts"
GUARDED = "guarded files"
WATCHING = "watching files"
MEMORY = "memory in use"
# Code that calls tools of its caller's.
TOOLS = "tools"
# What our own guest has, wherever it runs.
OF_OUR_GUEST = frozenset(
    {ARGUMENTS, ARTIFACTS, ENVIRONMENT, FILES, GUARDED, INTERRUPTS, KEPT, MEMORY}
    | {COMMANDS, PROCESSES, TOOLS, WATCHING, WORKSPACE}
)


@dataclass
class SandboxInstance:
    """What `create_instance` says of a sandbox. `status` is running, stopped or error.

    `metadata` is as in `Sandbox`.
    """

    instance_id: str
    provider: str
    status: str
    metadata: dict[str, Any] = field(default_factory=dict)


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
    """One way of running code. Providers are used from many threads at once.

    The manager calls `initialize` once with a validated configuration, then `open` any number of
    times; `close` when the configuration was replaced and nothing runs in it any more. Every method
    raises `SandboxError` (see `providers.errors`) and no other exception for what can go wrong
    outside our own code.
    """

    id: ClassVar[str]
    name: ClassVar[str]
    description: ClassVar[str] = ""
    icon: ClassVar[str] = "terminal"
    tags: ClassVar[tuple[str, ...]] = ()
    capabilities: ClassVar[frozenset[str]] = frozenset()

    # Whether `get_supported_languages` and `is_full` answer from memory. What others said is kept,
    # and asked for anew in the background: `providers.provider_status`.
    knows_at_once: ClassVar[bool] = False

    # What the files of a kept sandbox may take, in bytes; None where that is not known.
    workspace_bytes: ClassVar[int | None] = None

    config_fields: ClassVar[Mapping[str, ConfigField]] = {}

    # The field that names what takes its settings from a configuration: no two of them may name the
    # same, each of which would undo the other's. Empty: none does.
    alone_at: ClassVar[str] = ""

    # Whether a sandbox in place of a kept one is opened by the configuration in force, and not by
    # the version that had opened that.
    wakes_in_force: ClassVar[bool] = False

    @abstractmethod
    def initialize(self, config: Mapping[str, Any]) -> bool:
        """Take a configuration that `check_config` has passed. True, or raises SandboxError."""

    def initialize_apart(self, config: Mapping[str, Any]) -> bool:
        """As `initialize`, to try a configuration out or to see how the backend is.

        One sandbox will do, and nothing that others use may change by it.
        """
        return self.initialize(config)

    def initialize_to_attach(self, config: Mapping[str, Any]) -> bool:
        """As `initialize`, with a configuration that is no longer in force, for `attach` alone.

        Nothing is kept warm for it, and nothing that others use may change by it.
        """
        return self.initialize(config)

    def open(self, spec: SandboxSpec, owner: str) -> Sandbox:
        """A sandbox ready to run code.

        `owner` is an opaque name of whoever it is for; no sandbox ever serves two of them. Raises
        InvalidConfiguration naming what of `spec` cannot be had. Nothing has run when this raises.
        """
        if type(self).create_instance is SandboxProvider.create_instance:
            raise NotImplementedError(f"{type(self).__name__} has no open().")
        return _ByName(self, spec, owner)

    def submit_open(self, spec: SandboxSpec, owner: str) -> Future[Sandbox]:
        """`open`, begun. Raises RateLimited when too much is waited for already.

        What is awaited may go on in any thread, and must not use the database. A provider that can
        wait without a thread overrides this; for the others threads wait.
        """
        return waiting.submit(lambda: self.open(spec, owner), may_refuse=True)

    def attach(self, ref: str) -> KeptSandbox:
        """The kept sandbox of this `ref`, whichever process has opened it. Needs KEPT.

        Raises ProviderUnavailable when it is no longer there.
        """
        raise self.lacks(KEPT)

    def standing_of(self, ref: str) -> Literal["stays", "moves", "gone"]:
        """Whether a kept sandbox can stay, whichever version of the configuration has opened it.

        `moves`: its host takes no new ones and is to be emptied; `gone`: its host is no longer in
        the configuration. Answered from memory.
        """
        return "stays"

    # Sandboxes by name, for callers who cannot hold on to an object.

    def create_instance(self, template: str = "python", *, owner: str = "") -> SandboxInstance:
        """`open`, for one run under the returned name."""
        sandbox = self.open(SandboxSpec(template), owner)
        self._by_name[sandbox.ref] = sandbox
        return SandboxInstance(sandbox.ref, self.id, "running", sandbox.metadata)

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
        limits: RunLimits | None = None,
    ) -> ExecutionResult:
        """`Sandbox.run` in the sandbox of this name."""
        with before_the_code():
            sandbox = self._by_name.get(instance_id)
            if sandbox is None:
                raise ProviderUnavailable(f"There is no instance {instance_id!r}.")
            job = Job(code, language, timeout, arguments, entrypoint, files, limits or RunLimits())
        return sandbox.run(job)

    def destroy_instance(self, instance_id: str) -> bool:
        """`Sandbox.close` of the sandbox of this name. False when it was not there."""
        sandbox = self._by_name.pop(instance_id, None)
        return sandbox is not None and sandbox.close()

    @property
    def _by_name(self) -> dict[str, Sandbox]:
        known: dict[str, Sandbox] = self.__dict__.setdefault("_sandboxes_by_name", {})
        return known

    @abstractmethod
    def health_check(self) -> Health:
        """Look at the backend now. Never raises."""

    @abstractmethod
    def get_supported_languages(self) -> list[str]:
        """The languages that really run here now."""

    def get_packages(self) -> Packages | None:
        """Return what Python programs can import here, None where that is not known."""
        return None

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
    def network(self) -> str:
        """`none` where no isolated sandbox of this provider reaches any network.

        Empty: nothing is promised, and a policy that allows no network allows no run here.
        """
        return ""

    @property
    def holds_network(self) -> bool:
        """Whether its sandboxes reach the hosts of a `SandboxSpec.network`, and no others.

        Where False, one that is asked for with a network is refused.
        """
        return False

    @property
    def holds_templates(self) -> bool:
        """Whether its sandboxes can have the files of a template, by `SandboxSpec.digest`.

        Where False, one that is asked for with a digest is refused.
        """
        return False

    @property
    def template_bases(self) -> frozenset[str]:
        """What templates can have in its sandboxes besides packages: `interpreter` for another one
        of the machine, `image`, and `apt` for packages in one."""
        return frozenset()

    def has_own_template(self, name: str) -> bool:
        """Whether it has a template of its own that stands for the installation's of this name."""
        return False

    def change_credentials(self, changes: Mapping[str, Credential | None]) -> None:
        """Put in other versions of credentials from now on, by id; None takes one away.

        Raises SandboxError.
        """

    @property
    def max_timeout(self) -> float | None:
        """The longest run this provider carries out, in seconds, which one that names no time has.

        None: as long as is asked for.
        """
        return None

    def check_timeout(self, job: Job) -> None:
        """Raise InvalidConfiguration for a job that may take longer than `max_timeout`."""
        if self.max_timeout is not None and job.timeout > self.max_timeout:
            raise InvalidConfiguration(
                f"timeout: {self.name} runs code for {self.max_timeout:g} s at most. Set a shorter "
                "timeout, or raise the timeout of its configuration.",
                field="timeout",
            )

    def pool_figures(self) -> Mapping[str, Any]:
        """What its pool on this host has now, where it has one here.

        As `health_check` has it in its details; empty where the pool, if any, is a service's that
        other hosts share. Asked behind every beat of a process, so it must not take long.
        """
        return {}

    def is_full(self) -> bool:
        """Whether a caller would have to wait for a sandbox now.

        Known before every run that could go to another provider instead.
        """
        return False

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


class _ByName(Sandbox):
    """A sandbox of a provider that has the three methods by name of its own, and no `open`."""

    def __init__(self, provider: SandboxProvider, spec: SandboxSpec, owner: str) -> None:
        for name, value in (
            ("kept", spec.kept),
            ("limits", spec.limits),
            ("environment", spec.environment),
            ("digest", spec.digest),
        ):
            if value:
                raise InvalidConfiguration(f"{name}: {provider.id!r} cannot do this.", field=name)
        instance = provider.create_instance(spec.template, owner=owner)
        self.ref, self.metadata = instance.instance_id, instance.metadata
        self._provider = provider

    def run(self, job: Job, emit: Emit | None = None) -> ExecutionResult:
        if job.environment:
            with before_the_code():
                raise InvalidConfiguration(
                    f"environment: {self._provider.id!r} cannot do this.", field="environment"
                )
        result = self._provider.execute_code(
            self.ref,
            job.code,
            job.language,
            job.timeout,
            job.arguments,
            entrypoint=job.entrypoint,
            files=job.files,
            limits=job.limits,
        )
        return tell_afterwards(result, emit)

    def close(self) -> bool:
        return self._provider.destroy_instance(self.ref)
