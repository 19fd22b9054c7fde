"""Runs code on this machine, in sandboxes of the pool service of this installation."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import CancelledError, Future
from dataclasses import replace
from pathlib import Path
from typing import Any

from django.conf import settings

from providers.base import OF_OUR_GUEST, Health, SandboxProvider
from providers.credentials import Credential
from providers.errors import (
    InvalidConfiguration,
    NotInitialized,
    ProviderUnavailable,
    SandboxError,
    before_the_code,
)
from providers.isolation import FIELD, NONE, meets, of_runtime
from providers.local import node_packages
from providers.local.packages import look
from providers.local.service import Connection, LocalService, LocalSessions
from providers.runtime.launchers.oci import find_runsc
from providers.runtime.pool.background import BackgroundLoop
from providers.runtime.pool.cgroup import machine_memory
from providers.runtime.pool.requests import check_spec
from providers.runtime.pool.settings import (
    FIELDS,
    ISOLATION,
    LAUNCHERS,
    PLATFORMS,
    POOL,
    SANDBOX,
    default_capacity,
    default_memory,
    module_names,
)
from providers.runtime.service.settings import FIELDS as SERVICE_FIELDS
from providers.sandbox import KeptSandbox, Sandbox
from providers.schema import ConfigField
from providers.templates.base import known_bases
from providers.values import (
    Emit,
    ExecutionResult,
    Job,
    Packages,
    SandboxLimits,
    SandboxSpec,
)
from providers.waiting import carried_out

# More than what asking for it may take, a start of the service included.
HEALTH_SECONDS = 60.0

MEMORY_SIZES = {"128m": 128, "256m": 256, "512m": 512, "1g": 1024, "2g": 2048}

_MOST_BY_MEMORY = 16
# One of two may be kept. It goes to sleep for the next one while it is unused.
_FEWEST = 2

# What the pool service has of our configuration.
_OF_THE_POOL = (
    *("pool_size", "max_sandboxes", "queue_timeout", "max_memory", "isolation", "preload"),
)


def by_machine(config: Mapping[str, Any], total_bytes: int) -> dict[str, Any]:
    """The configuration with the number and the memory of sandboxes that nobody has chosen, for a
    machine with so much memory."""
    memory = config["max_memory"] or f"{default_memory(total_bytes) >> 20}m"
    size, most = config["pool_size"], config["max_sandboxes"]
    if most:
        most = max(most, size)
    else:
        memory_bytes = MEMORY_SIZES[memory] << 20
        bound = max(_MOST_BY_MEMORY, size)
        most = max(_FEWEST, default_capacity(total_bytes, memory_bytes, most=bound))
    return {**config, "max_memory": memory, "max_sandboxes": most, "pool_size": min(size, most)}


class LocalProvider(SandboxProvider):
    id = "local"
    name = "Local"
    description = "Single-use sandboxes on this machine: bubblewrap, or gVisor without a daemon."
    icon = "computer"
    tags = ("self-hosted", "no daemon")
    capabilities = OF_OUR_GUEST
    workspace_bytes = SandboxLimits().workspace_bytes
    knows_at_once = True
    config_fields = {
        "launcher": ConfigField(
            "string",
            "Runtime",
            default="auto",
            options=("auto", *LAUNCHERS),
            description="auto: gVisor if runsc is installed, otherwise bubblewrap. gVisor isolates "
            "more strongly; bubblewrap starts in milliseconds.",
            group=ISOLATION,
        ),
        "gvisor_platform": ConfigField(
            "string",
            "gVisor platform",
            default="systrap",
            options=PLATFORMS,
            description="ptrace is faster on virtual machines, systrap on bare metal.",
            group=ISOLATION,
        ),
        "pool_size": ConfigField(
            "integer",
            "Idle sandboxes",
            default=4,
            min=1,
            max=32,
            description="Kept ready for each language in use.",
            group=POOL,
        ),
        "max_sandboxes": ConfigField(
            "integer",
            "Max sandboxes",
            min=1,
            max=512,
            placeholder="by memory, up to 16",
            description="Idle and busy, also those of sessions. More callers are queued.",
            group=POOL,
        ),
        "queue_timeout": SERVICE_FIELDS["queue_timeout"],
        "timeout": ConfigField(
            "integer",
            "Execution Timeout (seconds)",
            min=1,
            max=86_400,
            placeholder="SANDBOX_TIMEOUT_SEC",
            description="Default and maximum for requests. Empty: SANDBOX_TIMEOUT_SEC and "
            "SANDBOX_MAX_TIMEOUT_SEC.",
            group=SANDBOX,
        ),
        "max_memory": ConfigField(
            "string",
            "Memory per sandbox",
            options=tuple(MEMORY_SIZES),
            description="All processes and files of a sandbox together. Empty: 256m, or 128m on "
            "machines with less than 968 MiB.",
            group=SANDBOX,
        ),
        **FIELDS,
    }

    def __init__(self) -> None:
        self._loop: BackgroundLoop | None = None
        self._service: LocalService | None = None
        self._sessions: LocalSessions | None = None
        self._runtime = ""
        self._has_network = self._has_templates = False
        self._template_bases = frozenset[str]()
        self._languages: list[str] = []
        self._limits = SandboxLimits()
        self._timeout: float | None = None
        self._reason = "not initialized"

    def validate_config(self, config: Mapping[str, Any]) -> tuple[bool, str | None]:
        module_names(config["preload"])
        if config["isolation"] == "tenant-kernel":
            _check_gvisor(config["launcher"])
        return True, None

    def initialize(self, config: Mapping[str, Any]) -> bool:
        return self._open(config, is_trial=False)

    def initialize_apart(self, config: Mapping[str, Any]) -> bool:
        return self._open(config, is_trial=True)

    def initialize_to_attach(self, config: Mapping[str, Any]) -> bool:
        self._timeout = config["timeout"]
        self._sessions = LocalSessions(_pool_of(by_machine(config, machine_memory())), "")
        return True

    def _open(self, config: Mapping[str, Any], *, is_trial: bool) -> bool:
        config = by_machine(config, machine_memory())
        pool = _pool_of(config)
        loop = BackgroundLoop("local-pool")
        service = LocalService(pool, is_trial=is_trial)
        try:
            held = loop.call(service.hold())
        except BaseException as error:
            loop.call(service.close())
            loop.stop()
            if isinstance(error, ProviderUnavailable):
                _explain_unisolated(error)
            raise
        self._loop, self._service = loop, service
        self._runtime, self._languages = held["runtime"], held["languages"]
        self._has_network = held["network"] is True
        self._has_templates = held.get("templates") is True
        self._template_bases = known_bases(held.get("bases"))
        self._limits = SandboxLimits(memory_bytes=MEMORY_SIZES[config["max_memory"]] << 20)
        self._timeout = config["timeout"]
        self._sessions = LocalSessions(pool, self._runtime)
        return True

    def open(self, spec: SandboxSpec, owner: str) -> Sandbox:
        if spec.kept:
            return self._kept().keep(spec, owner)
        return self.submit_open(spec, owner).result()

    def attach(self, ref: str) -> KeptSandbox:
        return self._kept().attach(ref)

    def submit_open(self, spec: SandboxSpec, owner: str) -> Future[Sandbox]:
        loop, service = self._opened()
        if spec.kept:
            return super().submit_open(spec, owner)
        check_spec(spec, self._limits)
        return loop.submit(self._take(service, spec, owner))

    async def _take(self, service: LocalService, spec: SandboxSpec, owner: str) -> Sandbox:
        connection, told = await service.take(spec, owner)
        metadata = {
            "runtime": told["runtime"],
            "isolation": of_runtime(told["runtime"]),
            "sharing": told["sharing"],
        }
        return LocalSandbox(self, f"local-{told['sandbox']}", connection, metadata)

    @property
    def network(self) -> str:
        return "none"

    @property
    def holds_network(self) -> bool:
        return self._has_network

    @property
    def holds_templates(self) -> bool:
        return self._has_templates

    @property
    def template_bases(self) -> frozenset[str]:
        return self._template_bases

    @property
    def max_timeout(self) -> float | None:
        return self._timeout

    @property
    def isolation(self) -> str:
        return of_runtime(self._runtime) if self._runtime else ""

    def change_credentials(self, changes: Mapping[str, Credential | None]) -> None:
        loop, service = self._opened()
        loop.submit(service.change_credentials(changes)).result()

    def is_full(self) -> bool:
        return self._service is not None and self._service.is_full

    def begin(self, connection: Connection, job: Job, emit: Emit | None) -> Future[ExecutionResult]:
        """Have the connection's sandbox run it. Raises SandboxError; nothing has run then."""
        with before_the_code():
            loop, service = self._opened()
            self.check_timeout(job)
        return loop.submit(service.run(connection, job, emit))

    def end(self, connection: Connection, use: int) -> bool:
        """End the sandbox of this use, with nobody waiting for it. False when we have none."""
        if self._loop is None or self._service is None:
            return False
        self._loop.start(self._service.end(connection, use))
        return True

    def health_check(self) -> Health:
        if self._loop is None or self._service is None:
            return Health(False, self._reason)
        try:
            # Not for ever: its loop may just be ending.
            stats = self._loop.submit(self._service.stats()).result(HEALTH_SECONDS)
        except SandboxError as error:
            return Health(False, error.message)
        except (CancelledError, TimeoutError):
            return Health(False, "the pool service gave no answer in time")
        healthy = stats["idle"] + stats["busy"] > 0 or not stats["failing"]
        return Health(healthy, "" if healthy else "sandboxes cannot be started", stats)

    def pool_figures(self) -> Mapping[str, Any]:
        service = self._service
        health = self.health_check() if service is not None and service.is_held else None
        return health.details if health else {}

    def get_supported_languages(self) -> list[str]:
        return list(self._languages)

    def get_packages(self) -> Packages | None:
        python = settings.SANDBOX_LOCAL_PYTHON
        if not python:
            return None
        folder = Path(python).parent.parent
        return replace(look(folder), node=node_packages.versions(folder))

    def close(self) -> None:
        loop, service = self._loop, self._service
        sessions, self._sessions = self._sessions, None
        if sessions is not None:
            sessions.close()
        # First, because what still runs ends now, and would be told to us.
        self._loop = self._service = None
        self._reason, self._runtime, self._languages = "closed", "", []
        self._has_network = False
        if loop is not None and service is not None:
            loop.call(service.close())
            loop.stop()

    def _kept(self) -> LocalSessions:
        if self._sessions is None:
            raise NotInitialized(f"The local provider is {self._reason}.")
        return self._sessions

    def _opened(self) -> tuple[BackgroundLoop, LocalService]:
        if self._loop is None or self._service is None:
            raise NotInitialized(f"The local provider is {self._reason}.")
        return self._loop, self._service


class LocalSandbox(Sandbox):
    """A sandbox of the service's pool, lent for one run."""

    def __init__(
        self, provider: LocalProvider, ref: str, connection: Connection, metadata: dict[str, Any]
    ) -> None:
        self.ref, self.metadata = ref, metadata
        self._provider = provider
        self._connection, self._use = connection, connection.uses
        self._lock = threading.Lock()
        self._is_used = self._has_ended = self._is_closed = False

    def run(self, job: Job, emit: Emit | None = None) -> ExecutionResult:
        return self.submit_run(job, emit).result()

    def submit_run(self, job: Job, emit: Emit | None = None) -> Future[ExecutionResult]:
        with before_the_code(), self._lock:
            if self._is_closed:
                raise ProviderUnavailable(f"There is no sandbox {self.ref!r}.")
            if self._is_used:
                raise ProviderUnavailable(f"The sandbox {self.ref!r} has had its one run.")
            result = self._provider.begin(self._connection, job, emit)
            self._is_used = True
        result.add_done_callback(self._end_run)
        return result

    def _end_run(self, result: Future[ExecutionResult]) -> None:
        error = None if result.cancelled() else result.exception()
        with self._lock:
            if isinstance(error, SandboxError) and error.nothing_ran:
                self._is_used = False
            else:
                # It ended with its run.
                self._has_ended = True

    def close(self) -> bool:
        with self._lock:
            if self._is_closed:
                return False
            self._is_closed = True
            # The caller may know of the run's end before we do.
            return self._has_ended or self._provider.end(self._connection, self._use)

    def submit_close(self) -> Future[bool]:
        return carried_out(self.close)


def _pool_of(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "launcher": config["launcher"],
        "gvisor_platform": config["gvisor_platform"],
        "settings": {name: config[name] for name in _OF_THE_POOL},
    }


def _explain_unisolated(error: ProviderUnavailable) -> None:
    """Say why a setting that would let code run here has no effect."""
    if settings.SANDBOX_LOCAL_UNISOLATED and not meets(NONE, settings.MINIMUM_ISOLATION):
        raise ProviderUnavailable(
            f"{error.message} SANDBOX_LOCAL_UNISOLATED takes effect only with "
            f"MINIMUM_ISOLATION=none; it is {settings.MINIMUM_ISOLATION}.",
            field=FIELD,
        ) from error


def _check_gvisor(launcher: str) -> None:
    """Refuse a gVisor kernel per tenant where there can be none on this machine. Raises
    InvalidConfiguration."""
    remedy = ""
    if launcher == "bubblewrap":
        remedy = "Choose gvisor or auto in place of bubblewrap, or another isolation level."
    else:
        try:
            find_runsc()
        except ProviderUnavailable as error:
            remedy = error.message
    if remedy:
        raise InvalidConfiguration(
            f"isolation: tenant-kernel needs gVisor. {remedy}", field="isolation"
        )
