"""Runs code on this machine in single-use sandboxes kept warm by an in-process pool."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from django.conf import settings

from providers.base import (
    ARGUMENTS,
    ARTIFACTS,
    FILES,
    Entrypoint,
    ExecutionResult,
    Health,
    InputFile,
    Limits,
    SandboxInstance,
    SandboxProvider,
)
from providers.errors import NotInitialized, ProviderUnavailable, SandboxError
from providers.isolation import FIELD, NONE, meets, of_runtime
from providers.pool.background import BackgroundLoop
from providers.pool.launcher import Launcher
from providers.pool.launchers.bubblewrap import BubblewrapLauncher
from providers.pool.launchers.gvisor import GvisorLauncher
from providers.pool.launchers.unisolated import UnisolatedLauncher
from providers.pool.pool import Pool, PoolSettings
from providers.pool.requests import Job, make_template, run_request
from providers.pool.sandbox import Sandbox
from providers.pool.settings import FIELDS, module_names
from providers.pool.template import Template, normalize_language
from providers.schema import ConfigField
from providers.waiting import carried_out

logger = logging.getLogger(__name__)

MEMORY_SIZES = {"128m": 128, "256m": 256, "512m": 512, "1g": 1024, "2g": 2048}


class LocalProvider(SandboxProvider):
    id = "local"
    name = "Local"
    description = "Single-use sandboxes on this machine: bubblewrap, or gVisor without a daemon."
    icon = "computer"
    tags = ("self-hosted", "no daemon")
    capabilities = frozenset({ARGUMENTS, ARTIFACTS, FILES})
    config_fields = {
        "launcher": ConfigField(
            "string",
            "Isolation",
            default="auto",
            options=("auto", "bubblewrap", "gvisor"),
            description="auto: gVisor where runsc is installed, else bubblewrap. gVisor isolates "
            "more strongly, bubblewrap starts in milliseconds.",
        ),
        "gvisor_platform": ConfigField(
            "string",
            "gVisor platform",
            default="systrap",
            options=("systrap", "ptrace", "kvm"),
            description="ptrace is faster on virtual machines, systrap on bare metal.",
        ),
        "pool_size": ConfigField(
            "integer",
            "Warm sandboxes",
            default=4,
            min=1,
            max=32,
            description="Kept ready per language once the language was asked for.",
        ),
        "max_sandboxes": ConfigField(
            "integer",
            "Most sandboxes at once",
            default=16,
            min=1,
            max=256,
            description="Warm and busy together, in each server process. Callers beyond it wait.",
        ),
        "queue_timeout": ConfigField(
            "integer",
            "Longest wait (seconds)",
            default=10,
            min=1,
            max=300,
            description="A caller who got no sandbox in this time is refused with SB008.",
        ),
        "max_memory": ConfigField(
            "string",
            "Memory per sandbox",
            default="256m",
            options=tuple(MEMORY_SIZES),
            description="All processes of a sandbox together, its files included.",
        ),
        **FIELDS,
    }

    def __init__(self) -> None:
        self._loop: BackgroundLoop | None = None
        self._launcher: Launcher | None = None
        self._pool: Pool | None = None
        self._sandboxes: dict[str, Sandbox] = {}
        self._lock = threading.Lock()
        self._capacity = 0
        self._sharing = ""
        self._reason = "not initialized"

    def validate_config(self, config: Mapping[str, Any]) -> tuple[bool, str | None]:
        module_names(config["preload"])
        return True, None

    def initialize(self, config: Mapping[str, Any]) -> bool:
        limits = replace(Limits(), memory_bytes=MEMORY_SIZES[config["max_memory"]] * 1024 * 1024)
        pool_settings = PoolSettings(
            size=config["pool_size"],
            capacity=max(config["max_sandboxes"], config["pool_size"]),
            patience=config["queue_timeout"],
            isolation=config["isolation"],
        )
        modules = module_names(config["preload"])
        loop = BackgroundLoop("local-pool")
        try:
            launcher = loop.call(_choose_launcher(config["launcher"], config["gvisor_platform"]))
            templates = {
                name: make_template(name, name, launcher, limits, modules)
                for name in launcher.languages()
            }
            pool = loop.call(_open_pool(launcher, templates, pool_settings))
        except BaseException:
            loop.stop()
            raise
        self._loop, self._launcher, self._pool = loop, launcher, pool
        self._capacity = pool_settings.capacity
        self._sharing = pool_settings.isolation
        return True

    def initialize_apart(self, config: Mapping[str, Any]) -> bool:
        return self.initialize({**config, "pool_size": 1})

    def create_instance(self, template: str = "python", *, owner: str = "") -> SandboxInstance:
        return self.submit_create_instance(template, owner=owner).result()

    def submit_create_instance(
        self, template: str = "python", *, owner: str = ""
    ) -> Future[SandboxInstance]:
        loop, pool = self._opened()
        return loop.submit(self._take(pool, normalize_language(template), owner))

    async def _take(self, pool: Pool, language: str, owner: str) -> SandboxInstance:
        sandbox = await pool.acquire(language, owner)
        instance_id = f"local-{os.getpid()}-{sandbox.number}"
        with self._lock:
            self._sandboxes[instance_id] = sandbox
        metadata = {
            "runtime": sandbox.runtime,
            "isolation": of_runtime(sandbox.runtime),
            "sharing": self._sharing,
        }
        return SandboxInstance(instance_id, self.id, "running", metadata)

    @property
    def isolation(self) -> str:
        return of_runtime(self._launcher.runtime) if self._launcher else ""

    def is_full(self) -> bool:
        return len(self._sandboxes) >= self._capacity

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
        return self.submit_execute_code(
            instance_id,
            code,
            language,
            timeout,
            arguments,
            entrypoint=entrypoint,
            files=files,
            limits=limits,
        ).result()

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
        loop, _ = self._opened()
        with self._lock:
            sandbox = self._sandboxes.get(instance_id)
        if sandbox is None:
            raise ProviderUnavailable(f"There is no instance {instance_id!r}.")
        job = Job(code, language, timeout, arguments, entrypoint, files, limits or Limits())
        return loop.submit(sandbox.run(run_request(job, sandbox.template)))

    def destroy_instance(self, instance_id: str) -> bool:
        with self._lock:
            sandbox = self._sandboxes.pop(instance_id, None)
        if sandbox is None or self._loop is None or self._pool is None:
            return False
        self._loop.start(self._pool.release(sandbox))
        return True

    def submit_destroy_instance(self, instance_id: str) -> Future[bool]:
        return carried_out(lambda: self.destroy_instance(instance_id))

    def health_check(self) -> Health:
        if self._pool is None:
            return Health(False, self._reason)
        stats = self._pool.stats()
        healthy = stats["idle"] + stats["busy"] > 0 or not stats["failing"]
        return Health(healthy, "" if healthy else "sandboxes cannot be started", stats)

    def get_supported_languages(self) -> list[str]:
        if self._launcher is None:
            return []
        languages = self._launcher.languages()
        return languages + (["javascript"] if "nodejs" in languages else [])

    def close(self) -> None:
        loop, pool, launcher = self._loop, self._pool, self._launcher
        if loop is None or pool is None or launcher is None:
            return
        # First, because what still runs ends now, and would hand back what is being destroyed.
        self._loop = self._pool = self._launcher = None
        self._reason = "closed"
        loop.call(pool.close())
        launcher.close()
        loop.stop()

    def _opened(self) -> tuple[BackgroundLoop, Pool]:
        if self._loop is None or self._pool is None:
            raise NotInitialized(f"The local provider is {self._reason}.")
        return self._loop, self._pool


# The launchers that have worked in this process. One of them is not left for a weaker one because
# of one start that failed, which whoever keeps the machine busy could bring about.
_proven: set[str] = set()


async def _choose_launcher(wanted: str, platform: str) -> Launcher:
    """The first launcher that starts a sandbox here. Raises ProviderUnavailable with the remedy."""
    candidates: list[Launcher] = []
    if wanted in ("auto", "gvisor"):
        candidates.append(GvisorLauncher(settings.DATA_DIR, platform))
    if wanted in ("auto", "bubblewrap"):
        candidates.append(BubblewrapLauncher(settings.DATA_DIR))
    failure = ProviderUnavailable("The local provider has no isolation tool.")
    for launcher in candidates:
        is_there = False
        try:
            await launcher.prepare()
            is_there = True
            await (await Sandbox.start(launcher, Template("python", "python"))).destroy()
            _proven.add(launcher.runtime)
            return launcher
        except SandboxError as error:
            launcher.close()
            failure = ProviderUnavailable(error.message)
            logger.info("launcher not usable", extra={"reason": error.message})
            if is_there and launcher.runtime in _proven:
                raise failure from error
    if settings.SANDBOX_LOCAL_UNISOLATED and not meets(NONE, settings.MINIMUM_ISOLATION):
        raise ProviderUnavailable(
            f"{failure.message} SANDBOX_LOCAL_UNISOLATED takes effect only with "
            f"MINIMUM_ISOLATION=none; it is {settings.MINIMUM_ISOLATION}.",
            field=FIELD,
        )
    if settings.SANDBOX_LOCAL_UNISOLATED:
        logger.warning("SANDBOX_LOCAL_UNISOLATED is set: code runs without any isolation")
        unisolated = UnisolatedLauncher(settings.DATA_DIR)
        await unisolated.prepare()
        return unisolated
    raise failure


async def _open_pool(
    launcher: Launcher, templates: Mapping[str, Template], pool_settings: PoolSettings
) -> Pool:
    pool = Pool(launcher, templates, pool_settings)
    pool.open()
    return pool
