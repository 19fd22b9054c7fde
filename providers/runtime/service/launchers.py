"""Which launcher the service uses."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field, replace
from pathlib import Path

from providers.errors import ProviderUnavailable, RateLimited, SandboxError
from providers.isolation import NAMESPACES, NONE, IsolationUnmet, meets, of_runtime
from providers.launcher_names import AUTO
from providers.runtime.launchers.bubblewrap import BubblewrapLauncher
from providers.runtime.launchers.images import OLDEST_PYTHON, Image, ImageStore
from providers.runtime.launchers.oci import GvisorLauncher, RuncLauncher
from providers.runtime.launchers.unisolated import UnisolatedLauncher
from providers.runtime.pool.launcher import Launcher, Starter
from providers.runtime.pool.sandbox import Sandbox
from providers.runtime.pool.settings import Isolation, Level
from providers.runtime.pool.state_store import StateStore
from providers.runtime.pool.template import Template
from providers.runtime.service.settings import IMAGE_FIELDS, ServiceSettings

logger = logging.getLogger(__name__)

WITH_IMAGES = ("gvisor", "runc", "crun")

# The launchers that have worked in this process. One of them is not left for a weaker one because
# of one start that failed, which whoever keeps the machine busy could bring about.
_proven: set[str] = set()
# Why a launcher was not usable when it was last tried: every health check tries them all.
_complaints: dict[str, str] = {}


@dataclass(frozen=True)
class LauncherChoice:
    """`kind` is one of `launcher_names.KINDS`. `auto` takes the first of `best_first` that starts a
    sandbox here.

    `pool_id` tells the containers of this pool from those of others on the same engine, or in the
    same `namespace` of a cluster. What
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
    namespace: str = ""
    # The secret of the pool, with which what it writes elsewhere is sealed.
    key: str = field(default="", repr=False)
    # Whether that Python has packages that others than the administrator have chosen.
    has_foreign_packages: bool = False
    # What all sandboxes have in place of this machine's programs.
    image: Image | None = None
    best_first: tuple[str, ...] = AUTO
    allow_unisolated: bool = False
    # Whether a launcher without the level of sharing is passed over for the next one.
    passes_over_level: bool = True

    def for_local(self, launcher: str, gvisor_platform: str) -> LauncherChoice:
        """The choice for the provider `local`, whose own is one launcher or `auto`."""
        best_first: tuple[str, ...] = (
            ("gvisor", "bubblewrap") if launcher == "auto" else (launcher,)
        )
        if self.allow_unisolated:
            best_first += ("none",)
        return replace(
            self,
            kind="auto",
            gvisor_platform=gvisor_platform,
            # What isolates less is refused at the run, with the name of the setting.
            minimum_isolation=NONE,
            best_first=best_first,
            passes_over_level=False,
        )

    async def open(self, settings: ServiceSettings) -> tuple[str, Launcher, ChosenLevel]:
        """A launcher that is ready, its kind, and the level to have with it.

        Raises ProviderUnavailable with the remedy, and RateLimited where the machine has too little
        left now, whichever launcher is asked.
        """
        is_auto = self.kind == "auto"
        failures: list[SandboxError] = []
        for kind in self.best_first if is_auto else (self.kind,):
            try:
                launcher = self.make(kind, settings)
            except SandboxError as error:
                _log_change(kind, error.message)
                failures.append(error)
                continue
            is_ready = False
            try:
                chosen = await self._prepare(kind, launcher, settings)
                is_ready = True
                if is_auto and kind not in ("docker", "none"):
                    await try_out(launcher)
            except RateLimited:
                await _close(launcher)
                raise
            except SandboxError as error:
                await _close(launcher)
                _log_change(kind, error.message)
                if error.field == "isolation" and not self.passes_over_level:
                    raise
                failures.append(error)
                if is_ready and kind in _proven:
                    break
                continue
            except BaseException:
                # A full disk, or a caller who has left: nobody else knows of it.
                await _close(launcher)
                raise
            _proven.add(kind)
            _log_change(kind, "")
            return kind, launcher, chosen
        if len(failures) == 1 and isinstance(failures[0], ProviderUnavailable):
            raise failures[0]
        raise ProviderUnavailable(" ".join(error.message for error in failures))

    async def _prepare(
        self, kind: str, launcher: Launcher, settings: ServiceSettings
    ) -> ChosenLevel:
        """Have it ready; return the level to have with it. Raises SandboxError."""
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
        return await choose_level(launcher, settings.isolation)

    def make(self, kind: str, settings: ServiceSettings) -> Launcher:
        """A launcher of this kind, not prepared. Raises SandboxError."""
        if kind == "docker":
            # The docker package alone takes 0.1 s.
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
        if kind == "kubernetes":
            return self._make_kubernetes(settings)
        images = self._find_images(kind, settings)
        image = self.image
        if kind == "gvisor":
            return GvisorLauncher(self.data_dir, self.gvisor_platform, self.python, images, image)
        if kind in ("crun", "runc"):
            return RuncLauncher(self.data_dir, kind, self.python, images, image)
        if kind == "none":
            return UnisolatedLauncher(self.data_dir, self.python)
        return BubblewrapLauncher(
            self.data_dir, self.python, has_foreign_packages=self.has_foreign_packages
        )

    def _make_kubernetes(self, settings: ServiceSettings) -> Launcher:
        try:
            from providers.runtime.launchers.kubernetes import (
                KubernetesLauncher,
                KubernetesSettings,
            )
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] not in ("kubernetes", "aiohttp_retry"):
                raise
            raise ProviderUnavailable(
                "POOL_LAUNCHER: The Python package kubernetes is not installed. Install it with "
                "pip install -r requirements-kubernetes.txt."
            ) from error
        defaults = KubernetesSettings()
        return KubernetesLauncher(
            KubernetesSettings(
                pool=self.pool_id,
                namespace=self.namespace,
                images={**defaults.images, **settings.images},
                runtime=settings.runtime,
                require_gvisor=settings.require_gvisor,
                filter_system_calls=settings.enable_seccomp,
                pull_secret=settings.kubernetes_pull_secret,
                registry=settings.kubernetes_registry,
                registry_credential=settings.kubernetes_registry_credential,
                data_dir=self.data_dir,
                claims=settings.kubernetes_claims,
                memory=self.memory,
                key=self.key,
            )
        )

    def _find_images(self, kind: str, settings: ServiceSettings) -> dict[str, Image]:
        """The imported images by template. Raises ProviderUnavailable with field and remedy."""
        store = ImageStore(self.data_dir)
        found = {}
        for template, name in settings.images.items():
            field, language = IMAGE_FIELDS.get(template, "templates"), template
            if field == "templates":
                language, _ = settings.templates[template]
            try:
                if kind not in WITH_IMAGES:
                    raise ProviderUnavailable(
                        f"{kind} has no images, only the programs of this machine. Clear the "
                        f"field, or start the pool with POOL_LAUNCHER={', '.join(WITH_IMAGES)} "
                        "or docker."
                    )
                image = store.find(name)
                if image.interpreter("python") is None:
                    raise ProviderUnavailable(
                        f"The image {name!r} has no python3 in its PATH of version "
                        f"3.{OLDEST_PYTHON} or newer, which every sandbox needs. Add it to the "
                        "image, and import that again."
                    )
                if image.interpreter(language) is None:
                    raise ProviderUnavailable(
                        f"The image {name!r} has no interpreter of {language} in its PATH."
                    )
            except ProviderUnavailable as error:
                raise ProviderUnavailable(f"{field}: {error.message}", field=field) from None
            found[template] = image
        return found


async def _close(launcher: Launcher) -> None:
    launcher.close()
    await launcher.disconnect()


def _log_change(kind: str, complaint: str) -> None:
    """Log whether a launcher is usable where that is news."""
    if complaint == _complaints.get(kind, ""):
        return
    _complaints[kind] = complaint
    if complaint:
        logger.info("runtime unavailable", extra={"runtime": kind, "reason": complaint})
    else:
        logger.info("runtime available again", extra={"runtime": kind})


# Whose kernel shows that there can be one. No caller's name has a space.
_NOBODY = "no tenant"


@dataclass(frozen=True)
class ChosenLevel:
    """`why` is for the provider's page, empty where somebody has named the level."""

    level: Level
    why: str = ""


async def choose_level(launcher: Launcher, wanted: Isolation) -> ChosenLevel:
    """The level to have with this launcher, which is prepared.

    `auto` takes a gVisor kernel for each tenant where there can be one: that is gVisor's isolation
    from the machine and from other tenants, without a fresh kernel's start for every run. Raises
    SandboxError where the level that is named cannot be had.
    """
    if wanted == "tenant-kernel":
        await _require_tenant_kernels(launcher)
    if wanted != "auto":
        return ChosenLevel(wanted)
    if launcher.runtime != "gvisor":
        return ChosenLevel("execution", "execution: a new sandbox starts fast with this launcher")
    try:
        await _require_tenant_kernels(launcher)
    except SandboxError as error:
        return ChosenLevel("execution", f"execution: {error.message}"[:200])
    return ChosenLevel("tenant-kernel", "tenant-kernel: a new gVisor for every run starts slowly")


async def _require_tenant_kernels(launcher: Launcher) -> None:
    """Have one make a run. Raises SandboxError where that cannot be, or its kernel is not gVisor's:
    what it takes to make runs in a container is too much for one on this machine's kernel."""
    await try_out(launcher.for_owner(_NOBODY))


async def try_out(starter: Starter) -> None:
    """Start a sandbox and end it. Raises SandboxError where that cannot be."""
    sandbox = await Sandbox.start(starter, Template("python", "python"))
    try:
        await sandbox.destroy()
    except asyncio.CancelledError:
        # Whoever gives it up closes the launcher, of which nothing may be left then.
        await sandbox.destroy()
        raise
