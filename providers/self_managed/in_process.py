"""The service's pool without the service: in this process, over Docker."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from django.conf import settings as django_settings

from providers.credentials import Credential
from providers.runtime.pool.background import BackgroundLoop
from providers.runtime.service.launchers import LauncherChoice
from providers.runtime.service.pool_manager import PoolManager
from providers.runtime.service.settings import ServiceSettings
from providers.self_managed.client import Handle
from providers.values import Emit, ExecutionResult, Job, SandboxSpec


class InProcessPool:
    """Has the methods of PoolClient, and the same answers."""

    def __init__(self, config: Mapping[str, Any], data_dir: Path, *, apart: bool = False) -> None:
        settings = ServiceSettings.from_config(config)
        self._apart = apart
        self._settings = settings.for_one() if apart else settings
        choice = LauncherChoice(
            "docker",
            data_dir,
            pool_id="in-process",
            minimum_isolation=django_settings.MINIMUM_ISOLATION,
        )
        self._loop = BackgroundLoop("docker-pool")
        self._manager = PoolManager(
            choice,
            self._settings,
            tuple(django_settings.NETWORK_ALLOWED_ADDRESSES),
            django_settings.NETWORK_CA_FILE,
        )

    def push(self) -> dict[str, Any]:
        """Open the pool; its figures. Raises ProviderUnavailable without a Docker engine."""
        self._loop.call(self._manager.apply(self._settings))
        if self._apart:
            # Nothing is kept warm, so that only this tells whether anything starts.
            self.destroy(self.create(SandboxSpec(), ""))
        return self.stats()

    def create(self, spec: SandboxSpec, owner: str) -> Handle:
        create = self._manager.create(spec.template, owner, spec.network, spec.digest)
        instance = self._loop.call(create)
        return Handle(instance.instance_id, instance.runtime, instance.sharing)

    def run(self, handle: Handle, job: Job, emit: Emit | None = None) -> ExecutionResult:
        return self._loop.call(self._manager.run(handle.instance_id, job, emit))

    def destroy(self, handle: Handle) -> bool:
        return self._loop.call(_destroy(self._manager, handle.instance_id))

    def stats(self) -> dict[str, Any]:
        return self._loop.call(_stats(self._manager))

    @property
    def is_full(self) -> bool:
        """Whether a caller would have to wait."""
        stats = self.stats()
        return "capacity" in stats and stats["busy"] + stats["waiting"] >= stats["capacity"]

    def change_credentials(self, changes: Mapping[str, Credential | None]) -> None:
        self._loop.call(self._manager.network.change_credentials(changes))

    def close(self) -> None:
        self._loop.call(self._manager.close())
        self._loop.stop()


async def _destroy(manager: PoolManager, instance_id: str) -> bool:
    return manager.destroy(instance_id)


async def _stats(manager: PoolManager) -> dict[str, Any]:
    return manager.stats()
