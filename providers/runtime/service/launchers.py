"""Which launcher the service uses, and when a change of the settings needs another one.

Whether this machine has a Docker engine that the pool can use. Asked at start, not per run.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Hashable
from dataclasses import dataclass
from enum import Enum
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

    def key(self, settings: ServiceSettings) -> Hashable:
        """Settings with the same key can share a launcher."""
        images = tuple(sorted(settings.images.items()))
        kernels = settings.isolation in ("tenant-kernel", "auto") and settings.isolation
        return settings.runtime, settings.require_gvisor, settings.enable_seccomp, images, kernels

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


DEFAULT_SOCKET = Path("/var/run/docker.sock")
ANSWER_SECONDS = 2


class Docker(Enum):
    """What there is. Each value tells an operator what to do about it."""

    READY = ""
    ABSENT = "No Docker engine answers."
    FORBIDDEN = "A Docker engine is running, but this user has no permission to use it."
    WITHOUT_IMAGES = (
        "Docker answers, but the images for sandboxes are missing. Build them with "
        "`python manage.py build_images`, then start again. Until then code runs in the sandboxes "
        "of the local provider."
    )


def find_docker() -> Docker:
    """Ask the engine that DOCKER_HOST names, or the usual socket, for the Python image."""
    named = os.environ.get("DOCKER_HOST", "")
    path = Path(named.removeprefix("unix://")) if named.startswith("unix://") else DEFAULT_SOCKET
    if not named or named.startswith("unix://"):
        # Without a socket the client, which is large, is not loaded.
        if not path.exists():
            return Docker.ABSENT
        if _is_forbidden(path):
            return Docker.FORBIDDEN
    import docker
    import requests
    from docker.errors import DockerException, ImageNotFound

    from providers.runtime.launchers.docker import DEFAULT_IMAGES

    try:
        client = docker.from_env(timeout=ANSWER_SECONDS)
        try:
            client.images.get(DEFAULT_IMAGES["python"])
        finally:
            client.close()
    except ImageNotFound:
        return Docker.WITHOUT_IMAGES
    except (DockerException, requests.RequestException, OSError):
        return Docker.ABSENT
    return Docker.READY


def engine_runtimes() -> frozenset[str]:
    """The names of the runtimes that the engine has, none where no engine answers."""
    if find_docker() not in (Docker.READY, Docker.WITHOUT_IMAGES):
        return frozenset()
    import docker
    import requests
    from docker.errors import DockerException

    try:
        client = docker.from_env(timeout=ANSWER_SECONDS)
        try:
            return frozenset(client.info()["Runtimes"])
        finally:
            client.close()
    except (DockerException, requests.RequestException, OSError):
        return frozenset()


def _is_forbidden(path: Path) -> bool:
    return os.path.exists(path) and not os.access(path, os.R_OK | os.W_OK)
