"""Which launcher the service uses."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from providers.errors import ProviderUnavailable, SandboxError
from providers.isolation import NAMESPACES, IsolationUnmet, meets, of_runtime
from providers.launcher_names import KINDS
from providers.runtime.pool.launcher import Launcher
from providers.runtime.pool.sharing_level import ChosenLevel, choose_level, try_out
from providers.runtime.pool.state_store import StateStore
from providers.runtime.service.settings import ServiceSettings

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LauncherChoice:
    """`kind` is one of KINDS. `auto` takes the first that works here.

    `pool_id` tells the containers of this pool from those of others on the same engine. What
    isolates less than `minimum_isolation` is never used, whoever asks. With a `memory` what is kept
    in containers outlives this process.
    """

    kind: str
    data_dir: Path
    pool_id: str
    gvisor_platform: str = "systrap"
    minimum_isolation: str = NAMESPACES
    python: str = ""
    memory: StateStore | None = None

    async def open(self, settings: ServiceSettings) -> tuple[str, Launcher, ChosenLevel]:
        """A launcher that is ready, its kind, and the level to have with it.

        Raises ProviderUnavailable with the remedy.
        """
        failures = []
        kinds = KINDS[1:] if self.kind == "auto" else (self.kind,)
        for kind in kinds:
            launcher = self._make(kind, settings)
            try:
                await launcher.prepare()
                if not meets(of_runtime(launcher.runtime), self.minimum_isolation):
                    raise IsolationUnmet(
                        f"{kind} would run under {launcher.runtime}, and MINIMUM_ISOLATION is "
                        f"{self.minimum_isolation}."
                    )
                if settings.require_gvisor and launcher.runtime != "gvisor":
                    raise ProviderUnavailable(
                        f"require_gvisor is set, but {kind} would run under {launcher.runtime}. "
                        "Install gVisor (runsc), or clear require_gvisor."
                    )
                chosen = await choose_level(launcher, settings.isolation)
                if self.kind == "auto" and kind != "docker":
                    await try_out(launcher)
            except SandboxError as error:
                launcher.close()
                failures.append(error.message)
                continue
            except BaseException:
                # A full disk, or a caller who has left: nobody else knows of it.
                launcher.close()
                raise
            if failures:
                logger.info(
                    "using launcher %s; better ones are unavailable: %s", kind, " ".join(failures)
                )
            return kind, launcher, chosen
        raise ProviderUnavailable(" ".join(failures))

    def _make(self, kind: str, settings: ServiceSettings) -> Launcher:
        # Each is imported where it is used: the docker package alone takes 0.1 s.
        if kind == "docker":
            from providers.runtime.launchers.docker import (
                DEFAULT_IMAGES,
                DockerLauncher,
                DockerSettings,
            )

            return DockerLauncher(
                DockerSettings(
                    images={**DEFAULT_IMAGES, **settings.images},
                    runtime=settings.runtime,
                    require_gvisor=settings.require_gvisor,
                    filter_system_calls=settings.enable_seccomp,
                    pool_id=self.pool_id,
                    memory=self.memory,
                )
            )
        if kind == "gvisor":
            from providers.runtime.launchers.gvisor import GvisorLauncher

            return GvisorLauncher(self.data_dir, self.gvisor_platform, self.python)
        if kind in ("crun", "runc"):
            from providers.runtime.launchers.runc import RuncLauncher

            return RuncLauncher(self.data_dir, kind, self.python)
        from providers.runtime.launchers.bubblewrap import BubblewrapLauncher

        return BubblewrapLauncher(self.data_dir, self.python)
