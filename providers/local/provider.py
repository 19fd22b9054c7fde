"""Runs code on this machine in single-use sandboxes kept warm by an in-process pool."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

from django.conf import settings

from providers.base import OF_OUR_GUEST, Health, SandboxProvider
from providers.errors import (
    InvalidConfiguration,
    NotInitialized,
    ProviderUnavailable,
    before_the_code,
)
from providers.isolation import FIELD, NONE, meets, of_runtime
from providers.languages import normalize_language, offered_names
from providers.local.packages import look
from providers.local.sessions import LocalSessions
from providers.runtime.launchers.oci import find_runsc
from providers.runtime.pool.background import BackgroundLoop
from providers.runtime.pool.cgroup import machine_memory
from providers.runtime.pool.launcher import Launcher
from providers.runtime.pool.pool import Pool, PoolSettings
from providers.runtime.pool.requests import check_job, check_spec, make_template
from providers.runtime.pool.sandbox import Sandbox as WarmSandbox
from providers.runtime.pool.settings import (
    FIELDS,
    ISOLATION,
    POOL,
    SANDBOX,
    default_capacity,
    default_memory,
    module_names,
)
from providers.runtime.pool.sharing_level import ChosenLevel, choose_level
from providers.runtime.pool.template import Template
from providers.runtime.service.launchers import LauncherChoice
from providers.runtime.service.sandbox_registry import LAUNCHERS, PLATFORMS
from providers.runtime.service.settings import FIELDS as SERVICE_FIELDS
from providers.runtime.service.settings import ServiceSettings
from providers.sandbox import KeptSandbox, Sandbox
from providers.schema import ConfigField
from providers.values import (
    Emit,
    ExecutionResult,
    Job,
    Packages,
    SandboxLimits,
    SandboxSpec,
)
from providers.waiting import carried_out

logger = logging.getLogger(__name__)

MEMORY_SIZES = {"128m": 128, "256m": 256, "512m": 512, "1g": 1024, "2g": 2048}


# Of the pools on one machine the web server's and one other are taken to be full at once.
_POOLS = 2
_MOST_BY_MEMORY = 16


# Half of which may be kept. One that is unused goes to sleep for the next one, so few are enough.
_FEWEST_WITH_SESSIONS = 4


def by_machine(config: Mapping[str, Any], total_bytes: int, *, fewest: int = 1) -> dict[str, Any]:
    """The configuration with the number, from `fewest` on, and the memory of sandboxes that nobody
    has chosen, for a machine with so much memory."""
    memory = config["max_memory"] or f"{default_memory(total_bytes) >> 20}m"
    size, most = config["pool_size"], config["max_sandboxes"]
    if most:
        most = max(most, size)
    else:
        memory_bytes = MEMORY_SIZES[memory] << 20
        bound = max(_MOST_BY_MEMORY, size)
        most = max(fewest, default_capacity(total_bytes, memory_bytes, most=bound, pools=_POOLS))
    return {**config, "max_memory": memory, "max_sandboxes": most, "pool_size": min(size, most)}


def _sessions_of(config: Mapping[str, Any]) -> dict[str, Any]:
    return by_machine(config, machine_memory(), fewest=_FEWEST_WITH_SESSIONS)


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
            description="Idle and busy, per server process. More callers are queued.",
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
        self._launcher: Launcher | None = None
        self._pool: Pool | None = None
        self._limits = SandboxLimits()
        self._lent: dict[str, WarmSandbox] = {}
        self._capacity = 0
        self._timeout: float | None = None
        self._why = ""
        self._sessions: LocalSessions | None = None
        self._reason = "not initialized"

    def validate_config(self, config: Mapping[str, Any]) -> tuple[bool, str | None]:
        module_names(config["preload"])
        if config["isolation"] == "tenant-kernel":
            _check_gvisor(config["launcher"])
        return True, None

    def initialize(self, config: Mapping[str, Any]) -> bool:
        sessions = _sessions_of(config)
        config = by_machine(config, machine_memory())
        limits = SandboxLimits(memory_bytes=MEMORY_SIZES[config["max_memory"]] << 20)
        pool_settings = PoolSettings(
            size=config["pool_size"],
            capacity=config["max_sandboxes"],
            patience=config["queue_timeout"],
        )
        modules = module_names(config["preload"])
        loop = BackgroundLoop("local-pool")
        try:
            launcher, chosen = loop.call(_choose_launcher(config))
            templates = {
                name: make_template(name, name, launcher, limits, modules)
                for name in launcher.languages()
            }
            pool_settings = replace(pool_settings, isolation=chosen.level)
            pool = loop.call(_open_pool(launcher, templates, pool_settings))
        except BaseException:
            loop.stop()
            raise
        self._loop, self._launcher, self._pool = loop, launcher, pool
        self._limits = limits
        self._timeout = config["timeout"]
        self._sessions = LocalSessions(sessions, launcher.runtime)
        self._capacity = pool_settings.capacity
        self._why = chosen.why
        return True

    def initialize_apart(self, config: Mapping[str, Any]) -> bool:
        return self.initialize({**config, "pool_size": 1})

    def initialize_to_attach(self, config: Mapping[str, Any]) -> bool:
        self._timeout = config["timeout"]
        self._sessions = LocalSessions(_sessions_of(config), "")
        return True

    def open(self, spec: SandboxSpec, owner: str) -> Sandbox:
        if spec.kept:
            return self._kept().keep(spec, owner)
        return self.submit_open(spec, owner).result()

    def attach(self, ref: str) -> KeptSandbox:
        return self._kept().attach(ref)

    def submit_open(self, spec: SandboxSpec, owner: str) -> Future[Sandbox]:
        loop, pool = self._opened()
        if spec.kept:
            return super().submit_open(spec, owner)
        check_spec(spec, self._limits)
        return loop.submit(self._take(pool, normalize_language(spec.template), owner))

    async def _take(self, pool: Pool, template: str, owner: str) -> Sandbox:
        warm = await pool.acquire(template, owner)
        metadata = {
            "runtime": warm.runtime,
            "isolation": of_runtime(warm.runtime),
            "sharing": warm.sharing,
        }
        ref = f"local-{os.getpid()}-{warm.number}"
        self._lent[ref] = warm
        return LocalSandbox(self, ref, metadata)

    @property
    def network(self) -> str:
        return "none"

    @property
    def max_timeout(self) -> float | None:
        return self._timeout

    @property
    def isolation(self) -> str:
        return of_runtime(self._launcher.runtime) if self._launcher else ""

    def is_full(self) -> bool:
        return len(self._lent) >= self._capacity

    def begin(self, ref: str, job: Job, emit: Emit | None) -> Future[ExecutionResult]:
        """Have the sandbox of this name run it. Raises SandboxError; nothing has run then."""
        with before_the_code():
            loop, _ = self._opened()
            warm = self._lent.get(ref)
            if warm is None:
                raise ProviderUnavailable(f"There is no sandbox {ref!r}.")
            self.check_timeout(job)
            check_job(job, warm.template)
        return loop.submit(warm.run(job, emit))

    def take_back(self, ref: str) -> bool:
        """End the sandbox of this name, with nobody waiting for it. False when it was not there."""
        warm = self._lent.pop(ref, None)
        if warm is None or self._loop is None or self._pool is None:
            return False
        self._loop.start(self._pool.release(warm))
        return True

    def health_check(self) -> Health:
        if self._pool is None:
            return Health(False, self._reason)
        stats = self._pool.stats()
        if self._why:
            stats["enforced_by"] = {"isolation level": self._why, **stats["enforced_by"]}
        healthy = stats["idle"] + stats["busy"] > 0 or not stats["failing"]
        return Health(healthy, "" if healthy else "sandboxes cannot be started", stats)

    def pool_figures(self) -> Mapping[str, Any]:
        pool = self._pool
        return {} if pool is None else pool.stats()

    def get_supported_languages(self) -> list[str]:
        if self._launcher is None:
            return []
        return offered_names(self._launcher.languages())

    def get_packages(self) -> Packages | None:
        python = settings.SANDBOX_LOCAL_PYTHON
        return look(Path(python).parent.parent) if python else None

    def close(self) -> None:
        loop, pool, launcher = self._loop, self._pool, self._launcher
        sessions, self._sessions = self._sessions, None
        if sessions is not None:
            sessions.close()
        if loop is None or pool is None or launcher is None:
            return
        # First, because what still runs ends now, and would hand back what is being destroyed.
        self._loop = self._pool = self._launcher = None
        self._reason = "closed"
        loop.call(_close_pool(pool, launcher))
        loop.stop()

    def _kept(self) -> LocalSessions:
        if self._sessions is None:
            raise NotInitialized(f"The local provider is {self._reason}.")
        return self._sessions

    def _opened(self) -> tuple[BackgroundLoop, Pool]:
        if self._loop is None or self._pool is None:
            raise NotInitialized(f"The local provider is {self._reason}.")
        return self._loop, self._pool


class LocalSandbox(Sandbox):
    """A sandbox of the pool, lent for one run."""

    def __init__(self, provider: LocalProvider, ref: str, metadata: dict[str, Any]) -> None:
        self.ref, self.metadata = ref, metadata
        self._provider = provider

    def run(self, job: Job, emit: Emit | None = None) -> ExecutionResult:
        return self.submit_run(job, emit).result()

    def submit_run(self, job: Job, emit: Emit | None = None) -> Future[ExecutionResult]:
        return self._provider.begin(self.ref, job, emit)

    def close(self) -> bool:
        return self._provider.take_back(self.ref)

    def submit_close(self) -> Future[bool]:
        return carried_out(self.close)


async def _choose_launcher(config: Mapping[str, Any]) -> tuple[Launcher, ChosenLevel]:
    """Return the first launcher that starts a sandbox here, and its level.

    Raises ProviderUnavailable with the remedy: where that one does not have the level, too.
    """
    wanted = config["launcher"]
    best_first: tuple[str, ...] = ("gvisor", "bubblewrap") if wanted == "auto" else (wanted,)
    may_be_none = meets(NONE, settings.MINIMUM_ISOLATION)
    if settings.SANDBOX_LOCAL_UNISOLATED and may_be_none:
        best_first += ("none",)
    choice = LauncherChoice(
        "auto",
        settings.DATA_DIR,
        "local",
        config["gvisor_platform"],
        # What isolates less is refused at the run, with the name of the setting.
        NONE,
        settings.SANDBOX_LOCAL_PYTHON,
        best_first=best_first,
    )
    try:
        kind, launcher, _ = await choice.open(ServiceSettings())
    except ProviderUnavailable as failure:
        if not settings.SANDBOX_LOCAL_UNISOLATED or may_be_none:
            raise
        raise ProviderUnavailable(
            f"{failure.message} SANDBOX_LOCAL_UNISOLATED takes effect only with "
            f"MINIMUM_ISOLATION=none; it is {settings.MINIMUM_ISOLATION}.",
            field=FIELD,
        ) from failure
    if kind == "none":
        logger.warning("SANDBOX_LOCAL_UNISOLATED is set: code runs without any isolation")
    try:
        return launcher, await choose_level(launcher, config["isolation"])
    except BaseException:
        launcher.close()
        raise


async def _close_pool(pool: Pool, launcher: Launcher) -> None:
    """In their own loop, where tenants' kernels live too."""
    await pool.close()
    launcher.close()


async def _open_pool(
    launcher: Launcher, templates: Mapping[str, Template], pool_settings: PoolSettings
) -> Pool:
    pool = Pool(launcher, templates, pool_settings)
    pool.open()
    return pool


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
