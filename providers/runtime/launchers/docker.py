"""Sandboxes in Docker containers, under runc or gVisor, reached over their attach streams."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from providers.errors import (
    CreationFailed,
    InvalidConfiguration,
    ProviderUnavailable,
    RateLimited,
    SandboxError,
)
from providers.languages import OURS, version_in
from providers.runtime.launchers.container_guest import (
    ALONE_SECONDS,
    BUILD_COMMAND,
    DEFAULT_IMAGES,
    Image,
    environment_with,
    guest_command,
    image_of,
    node_runner,
    probe_command,
    probe_request,
    read_probe,
    sources,
)
from providers.runtime.launchers.docker_engine import (
    GVISOR_REMEDY,
    PARALLEL_CALLS,
    DockerSettings,
    End,
    Engine,
    Recipe,
    Started,
)
from providers.runtime.launchers.docker_guest import (
    DockerGuest,
    DockerKernelHost,
    kernel_argument,
    kernel_recipe,
)
from providers.runtime.launchers.docker_owner import Owner, Reaper, attach_again
from providers.runtime.launchers.docker_packages import Packages
from providers.runtime.launchers.seccomp import build_filter
from providers.runtime.launchers.tenant_kernel import TenantKernels
from providers.runtime.pool.hardening import GVISOR, RUNC, Hardening
from providers.runtime.pool.launcher import Guest, Launcher, Starter
from providers.runtime.pool.template import WORKSPACE, Template
from providers.templates import base as bases
from providers.templates.base import Base
from providers.templates.files import image_archive
from providers.values import SandboxLimits

__all__ = ["BUILD_COMMAND", "DEFAULT_IMAGES", "DockerLauncher", "DockerSettings"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

# The repository of images that have a template's files.
_TEMPLATES = "cofferdam-template"
# How long a caller waits for one that is made. Shorter than callers wait for a sandbox.
MAKING_SECONDS = 8.0


class DockerLauncher(Launcher):
    """Starts each sandbox as a container of its own. The guest's code travels over its stdin.

    Every call to the engine happens in a thread when a container is started or destroyed; a run
    touches nothing but the attach stream.
    """

    def __init__(self, settings: DockerSettings) -> None:
        self.runtime = RUNC
        self.rest_seconds = 0.06
        self.enforced_by: dict[str, str] = {}
        self._settings = settings
        self._engine = Engine(settings.base_url)
        self._engine_runtime = "runc"
        self._hardening = Hardening.of(RUNC)
        self._seccomp = self._filter_of_runs = b""
        self._images: dict[str, Image] = {}
        # Those that templates are based on, by id.
        self._bases: dict[str, Image] = {}
        # Images of templates, by digest and usual image.
        self._making: dict[tuple[str, str], asyncio.Future[Image]] = {}
        self._owner = Owner(settings.pool_id, settings.memory)
        self._threads = ThreadPoolExecutor(PARALLEL_CALLS, "docker")
        self._reaper = Reaper(self._engine, self._owner, self._threads)
        self._packages = Packages(self._engine, self._owner, self._reaper, self._template_images)
        self._watch_memory = False
        self._maps_users = False
        self._processors = 1
        self._kernels: TenantKernels | None = None

    async def prepare(self) -> None:
        """Find runtime and images, remove what predecessors left, and keep doing so.

        Raises ProviderUnavailable when the engine does not answer, has none of the images, or
        lacks the runtime that is demanded.
        """
        await self._in_thread(self._prepare)
        if self.runtime == GVISOR:
            self._kernels = TenantKernels(self._start_kernel, self.enforced_by, self._image_of)
        await self.reap_orphans()
        # Of a predecessor that was killed.
        await self._in_thread(self._engine.remove_images, self._template_images)
        self._reaper.go_on()

    def languages(self) -> list[str]:
        return [name for name in OURS if self.interpreter(name)]

    def interpreter(self, language: str, template: str = "") -> str | None:
        image = self._images.get(self._image_key(template or language, template or language))
        return image.interpreters.get(language) if image else None

    def version(self, language: str, template: str) -> str:
        image = self._images.get(self._image_key(template, language))
        return version_in(language, image.versions.get(language, "")) if image else ""

    def node_runner(self) -> list[str]:
        return node_runner()

    async def hold_template(self, name: str, digest: str, folder: Path) -> bool:
        if name not in self._images:
            language, _, _ = name.partition("@")
            usual = self._images.get(self._image_key(language, language))
            self._images[name] = await self._made(usual, digest, folder)
        return True

    async def _made(self, usual: Image | None, digest: str, folder: Path) -> Image:
        """The image of a template. One that takes long is made meanwhile: raises RateLimited."""
        key = digest, usual.id if usual else ""
        if key not in self._making:
            made = self._in_thread(self._make_image, usual, digest, folder)
            self._making[key] = asyncio.ensure_future(made)
        making = self._making[key]
        try:
            # It goes on where its caller has left.
            return await asyncio.wait_for(asyncio.shield(making), MAKING_SECONDS)
        except TimeoutError:
            raise RateLimited(
                "template: Its packages are being installed. Try again in a few seconds.",
                field="template",
                retry_after=MAKING_SECONDS / 2,
            ) from None
        finally:
            # The first who asks after that learns how it ended.
            if making.done():
                self._making.pop(key, None)

    def _make_image(self, usual: Image | None, digest: str, folder: Path) -> Image:
        """Return the image of a template: its base and its files. Raises SandboxError."""
        base = bases.read(folder)
        if base.kind == "image":
            image = self._packages.add(self._find_base(base), digest, folder)
            if base.look:
                return image
            return self._add_template(image, digest, folder, interpreter=base.interpreter)
        if usual is None:
            raise CreationFailed("Docker: there is no image for the language.")
        releases = [path.name.removeprefix("python") for path in folder.glob("lib/python*")]
        has = version_in("python", usual.versions.get("python", ""))
        if releases and not has.startswith(f"python {releases[0]}."):
            raise InvalidConfiguration(
                f"template: It is for Python {releases[0]}, and the image has {has or 'none'}.",
                field="template",
            )
        return self._add_template(usual, digest, folder, releases[0] if releases else "")

    def _find_base(self, base: Base) -> Image:
        """Return the image of the engine that a template is based on. Raises
        InvalidConfiguration."""
        described = self._engine.image(base.image_name)
        if described is None:
            raise InvalidConfiguration(
                f"template: The engine has no image {base.image_name}, and pulls none. Have an "
                "administrator pull it.",
                field="template",
            )
        bases.check_unchanged(base, described["Id"], _digest_of(described))
        found = self._bases.get(described["Id"])
        if found is None:
            try:
                found = self._bases[described["Id"]] = self._inspect(described)
            except (CreationFailed, ProviderUnavailable) as error:
                raise InvalidConfiguration(
                    f"template: The image {base.image_name} cannot be used. It needs a python3 of "
                    f"3.9 or newer in its PATH. {error.message}",
                    field="template",
                ) from None
        return found

    def _add_template(
        self, base: Image, digest: str, folder: Path, release: str = "", interpreter: str = ""
    ) -> Image:
        place = f"opt/cofferdam/{digest}"
        tag = f"{self._template_images}{digest[:24]}-{base.id.rpartition(':')[2][:12]}"
        known = self._engine.image(tag)
        if known is None:
            name = self._reaper.new_name()
            archive = image_archive(folder, place, release, interpreter)
            try:
                identifier = self._engine.add_files(base.id, archive, name, self._owner.labels, tag)
            finally:
                self._reaper.forget(name)
        else:
            identifier = known["Id"]
        programs = dict(base.interpreters)
        if interpreter:
            programs["python"] = f"/{place}/bin/python"
        return replace(base, id=identifier, interpreters=programs, folder=f"/{place}")

    @property
    def _template_images(self) -> str:
        """The beginning of the names of this pool's images: no other pool removes them."""
        pool = hashlib.sha256(self._settings.pool_id.encode()).hexdigest()[:12]
        return f"{_TEMPLATES}:{pool}-"

    async def drop_template(self, name: str) -> None:
        image = self._images.pop(name, None)
        used = {each for other in self._images.values() for each in other.made}
        for each in image.made if image else ():
            if each not in used:
                await self._in_thread(self._engine.remove_image, each)

    def for_owner(self, owner: str) -> Starter:
        if self._kernels is None:
            raise ProviderUnavailable(
                f"isolation: tenant-kernel needs gVisor, and the engine's containers are under "
                f"{self.runtime}. {GVISOR_REMEDY}",
                field="isolation",
            )
        return self._kernels.of(owner)

    def close(self) -> None:
        if self._kernels:
            self._kernels.close()
        self._reaper.close()
        self._owner.release()
        self._threads.shutdown(wait=False)
        self._engine.close()

    async def start(self, template: Template) -> Guest:
        image = self._find_image(template)
        name = self._reaper.new_name()
        making = asyncio.ensure_future(self._in_thread(self._start, name, image, template))
        try:
            started = await asyncio.shield(making)
        except asyncio.CancelledError:
            # The engine makes it all the same.
            with contextlib.suppress(SandboxError):
                made = await making
                made.stream.close()
                await self.destroy(name, made.id)
            self._reaper.forget(name)
            raise
        except BaseException:
            # If the engine makes it after all, it is an orphan.
            self._reaper.forget(name)
            raise
        return self._guest(name, started, {"image_digest": image.digest})

    def _start_kernel(self, template: Template, _: int) -> DockerKernelHost:
        """A container that has runs made in it later. Raises CreationFailed."""
        image = self._find_image(template)
        name = self._reaper.new_name()
        return DockerKernelHost(
            make=partial(self._in_thread, self._make_kernel, name, image, template),
            remove=partial(self.destroy, name, name),
            remove_now=partial(self._threads.submit, self._remove_now, name),
            template=template,
            facts={"image_digest": image.digest},
        )

    def _make_kernel(self, name: str, image: Image, template: Template) -> Started:
        command = guest_command(image, kernel_argument(self._filter_of_runs))
        recipe = self._recipe_of(image, command, template.limits)
        try:
            return self._start_guest(name, image, kernel_recipe(recipe, template, self._processors))
        except BaseException:
            self._reaper.forget(name)
            raise

    def _remove_now(self, name: str) -> None:
        with contextlib.suppress(SandboxError):
            self._engine.remove(name)
        self._reaper.forget(name)

    async def adopt(
        self, container: str, runtime: str, found: Mapping[str, Any], echo: bytes
    ) -> Guest:
        name = self._reaper.new_kept_name()
        try:
            started = await self._in_thread(
                attach_again, self._engine, self._owner, name, container, runtime, found["shape"]
            )
        except BaseException:
            self._reaper.forget(name)
            raise
        return self._guest(name, started, dict(found["facts"]), echo)

    async def end(self, container: str) -> None:
        await self.destroy("", container)

    def _guest(
        self, name: str, started: Started, facts: dict[str, Any], echo: bytes = b""
    ) -> DockerGuest:
        return DockerGuest(
            started,
            facts,
            destroy=partial(self.destroy, name, started.id),
            end_of=partial(self.end_of, started.id),
            stay=partial(self._stay, name, started.id),
            echo=echo,
        )

    async def _stay(self, name: str, identifier: str) -> None:
        """Give a container the name by which other pools know that it may outlive this process."""
        kept = self._reaper.new_kept_name(name)
        await self._in_thread(self._engine.rename, identifier, kept)

    async def reap_orphans(self) -> int:
        """Remove the containers that nobody owns any more. Returns how many."""
        return await self._in_thread(self._reaper.reap)

    async def destroy(self, name: str, identifier: str) -> None:
        """Remove a container. One that cannot be removed now is left to the reaper."""
        try:
            await self._in_thread(self._engine.remove, identifier)
        except SandboxError as error:
            logger.warning("container not removed", extra={"reason": error.message})
        finally:
            self._reaper.forget(name)

    async def end_of(self, identifier: str) -> End:
        """The engine's own record, empty when it cannot be asked."""
        try:
            return await self._in_thread(self._engine.end_of, identifier)
        except SandboxError:
            return End()

    async def _in_thread(self, function: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)

    def _find_image(self, template: Template) -> Image:
        image = self._images.get(self._image_key(template.name, template.language))
        if image is None:
            raise CreationFailed(
                f"Docker: there is no image for {template.name!r}. Build it: {BUILD_COMMAND}"
            )
        return image

    def _image_of(self, template: Template) -> str:
        """What tells the kernels of one owner apart."""
        return self._find_image(template).id

    def _image_key(self, name: str, language: str) -> str:
        """Shells run in the Python image when they have none of their own."""
        if "@" in name:
            return name
        for key in (name, language):
            if key in self._settings.images:
                return key
        return "python"

    def _prepare(self) -> None:
        info = self._engine.info()
        self._maps_users = any(
            option.startswith(("name=userns", "name=rootless"))
            for option in info.get("SecurityOptions") or ()
        )
        described = {key: self._engine.image(name) for key, name in self._settings.images.items()}
        missing = [self._settings.images[key] for key, found in described.items() if not found]
        present = {key: found for key, found in described.items() if found}
        if not present:
            raise ProviderUnavailable(
                f"The engine has no image {', '.join(missing)}. Build it: {BUILD_COMMAND}"
            )
        if missing:
            logger.warning("images are missing", extra={"images": missing})
        self._processors = max(1, int(info.get("NCPU") or 1))
        first = next(iter(present.values()))
        self._choose_runtime(info, first)
        # Without a filter of ours the program, which may be the supervisor's user, still cannot
        # take that one's limits away.
        program = build_filter(
            info.get("Architecture"),
            shared_kernel=self.runtime != GVISOR,
            supervisor_only=not self._settings.filter_system_calls,
        )
        self._seccomp = program or b""
        # Whatever the settings: to the runs in it a tenant's kernel is a shared one.
        self._filter_of_runs = build_filter(info.get("Architecture")) or b""
        version = info.get("CgroupVersion") or "1"
        calls = "seccomp" if self._seccomp else "the engine's seccomp alone"
        if self.runtime == GVISOR:
            calls = "gVisor"
        self.enforced_by = {
            "memory": f"cgroup v{version} of the engine",
            "cpu_seconds": "cgroup where the engine is on this machine, else supervisor",
            "processes": f"cgroup v{version} of the engine",
            "users": "gVisor's kernel" if self.runtime == GVISOR else "uid per container",
            "system_calls": calls,
        }
        probed: dict[str, Image] = {}
        for key, found in present.items():
            if found["Id"] not in probed:
                probed[found["Id"]] = self._inspect(found)
            self._images[key] = probed[found["Id"]]

    def _choose_runtime(self, info: Mapping[str, Any], image: Mapping[str, Any]) -> None:
        """Settle on the first wanted runtime in which a container of `image` runs."""
        wanted = self._settings.runtime
        present = info.get("Runtimes") or {}
        candidates = [name for name in ("runsc", "runc") if name in present]
        if wanted != "auto":
            candidates = [name for name in (wanted,) if name in present]
        reason = f"the engine has no runtime {'runsc' if wanted == 'auto' else wanted}"
        for name in candidates:
            try:
                is_gvisor = self._try_runtime(name, image)
            except CreationFailed as error:
                reason = f"the runtime {name} does not work: {error.message}"
                logger.warning("runtime unavailable", extra={"reason": reason})
                continue
            if is_gvisor or not self._settings.require_gvisor:
                self._engine_runtime = name
                self.runtime = GVISOR if is_gvisor else RUNC
                self._hardening = Hardening.of(self.runtime)
                self._packages.runtime = name
                self._packages.is_gvisor = is_gvisor
                return
        remedy = "" if wanted not in ("auto", "runsc") else f" {GVISOR_REMEDY}"
        demand = "gVisor is required, but " if self._settings.require_gvisor else ""
        raise ProviderUnavailable(f"{demand}{reason}.{remedy}")

    def _try_runtime(self, name: str, image: Mapping[str, Any]) -> bool:
        """Whether a container under this runtime sees gVisor's kernel."""
        answer = self._probe(name, image, {})
        return bool(answer["gvisor"])

    def _inspect(self, image: Mapping[str, Any]) -> Image:
        name = (image.get("RepoTags") or [image["Id"]])[0]
        if (image.get("Config") or {}).get("Volumes"):
            raise ProviderUnavailable(
                f"The image {name} declares volumes, which could be written to. "
                "Build it without VOLUME."
            )
        answer = self._probe(self._engine_runtime, image, sources())
        return image_of(image["Id"], _digest_of(image), answer)

    def _probe(
        self, runtime: str, image: Mapping[str, Any], sources: Mapping[str, Any]
    ) -> dict[str, Any]:
        # The stricter of the two declarations will do for what only looks around.
        recipe = replace(
            self._recipe(image["Id"], probe_command(), SandboxLimits(), runtime),
            ends_with_stream=True,
        )
        name = self._reaper.new_name()
        try:
            return read_probe(self._engine.run_once(name, recipe, probe_request(sources)))
        finally:
            self._reaper.forget(name)

    def _recipe(
        self, image: str, command: list[str], limits: SandboxLimits, runtime: str
    ) -> Recipe:
        user = self._hardening.choose_user(maps_users=self._maps_users)
        return Recipe(
            image,
            command,
            self._hardening.container(user),
            {**self._hardening.host(limits, user), "Runtime": runtime},
            self._owner.labels,
        )

    def _start(self, name: str, image: Image, template: Template) -> Started:
        hardening = self._hardening
        argument = replace(
            template,
            limits=replace(template.limits, processes=self._user_processes(image, template)),
        ).guest_argument(
            workspace=WORKSPACE,
            watch_memory=self._watch_memory,
            uid=hardening.program_uid,
            alone_seconds=ALONE_SECONDS,
        )
        command = guest_command(image, argument)
        recipe = self._recipe_of(image, command, template.limits)
        return self._start_guest(name, image, recipe, self._seccomp)

    def _recipe_of(self, image: Image, command: list[str], limits: SandboxLimits) -> Recipe:
        recipe = self._recipe(image.id, command, limits, self._engine_runtime)
        environment = environment_with(image, recipe.settings["environment"])
        return replace(recipe, settings={**recipe.settings, "environment": environment})

    def _start_guest(
        self, name: str, image: Image, recipe: Recipe, program: bytes = b""
    ) -> Started:
        """Start a container, and give it its modules and this filter of system calls."""
        started = self._engine.start(name, recipe)
        try:
            for part in (image.modules, program):
                started.stream.sendall(len(part).to_bytes(4, "big") + part)
        except OSError as error:
            started.stream.close()
            self._engine.remove(started.id)
            raise CreationFailed(f"Docker: the container ended at once: {error}") from error
        return started

    def _user_processes(self, image: Image, template: Template) -> int:
        """How many processes the program's user may have.

        gVisor's kernel counts those of its own container. What is too many there must fail inside:
        the engine's limit ends the whole container. The host's kernel counts over all containers of
        the same user, so that one could starve another, and the engine's limit is the only one.
        """
        if self.runtime == GVISOR:
            # gVisor lets a user have one more than it is told.
            most = template.limits.processes - 1
            # Less than nothing is no bound at all.
            return most if image.user_processes < 0 else min(image.user_processes, most)
        return image.user_processes


def _digest_of(image: Mapping[str, Any]) -> str:
    """Return the registry's digest of an image, or its own id."""
    digests: list[str] = image.get("RepoDigests") or []
    found: str = digests[0].rpartition("@")[2] if digests else image["Id"]
    return found
