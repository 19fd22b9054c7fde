"""Sandboxes in Pods of a cluster, one each, under a RuntimeClass of gVisor's where there is one.

A Pod is reached by `attach` alone: the guest comes over its standard input, as with containers of
Docker's, and nothing of it listens. A run touches nothing but that stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from providers.errors import (
    CreationFailed,
    ProviderUnavailable,
    RateLimited,
    SandboxError,
)
from providers.languages import OURS, version_in
from providers.runtime.launchers.container_guest import (
    Image,
    environment_with,
    image_of,
    node_runner,
    probe_command,
    probe_request,
    read_probe,
    sources,
)
from providers.runtime.launchers.kubernetes.api import (
    MERGE,
    Api,
    ApiFailure,
    AttachedStream,
    Object,
    error_of,
)
from providers.runtime.launchers.kubernetes.cache import ClaimCache, PodCache
from providers.runtime.launchers.kubernetes.checks import (
    GVISOR_REMEDY,
    find_runtime_class,
    require_closed_network,
    require_rights,
)
from providers.runtime.launchers.kubernetes.claims import ClaimedPods, require_warm_pools
from providers.runtime.launchers.kubernetes.guest import (
    End,
    KubernetesGuest,
    end_of,
    terminated_state,
)
from providers.runtime.launchers.kubernetes.manifest import (
    APP,
    APP_LABEL,
    CONTAINER,
    LEASE_LABEL,
    POOL_LABEL,
    TENANT_LABEL,
    command_of,
    pod_manifest,
    shape_of,
)
from providers.runtime.launchers.kubernetes.notes import Notes, container_of
from providers.runtime.launchers.kubernetes.owner import Owner, bound_sandbox, sandbox_of
from providers.runtime.launchers.kubernetes.pods import PlainPods, PodSource
from providers.runtime.launchers.kubernetes.settings import KubernetesSettings
from providers.runtime.launchers.kubernetes.templates import PodTemplates
from providers.runtime.launchers.seccomp import build_filter
from providers.runtime.pool.hardening import GVISOR, RUNC, Hardening
from providers.runtime.pool.launcher import Guest, Launcher
from providers.runtime.pool.state_store import SandboxRecord
from providers.runtime.pool.template import Template
from providers.values import SandboxLimits

logger = logging.getLogger(__name__)

# How long the probe of an image may take, which a node may have to pull first.
PROBE_SECONDS = 180.0
# How long the end of a Pod may take to be known.
END_SECONDS = 3.0
# How long the removals that are under way are waited for at the launcher's end.
REMOVAL_SECONDS = 1.0
# Of labels that are being written, where the API server is slow: further ones are left out.
MOST_TASKS = 200
_CLAIM_ATTEMPTS = 3
_CONFLICT, _MISSING, _FORBIDDEN = 409, 404, 403


class KubernetesLauncher(Launcher):
    """Starts each sandbox as a Pod of its own. Everything happens in one event loop."""

    def __init__(self, settings: KubernetesSettings) -> None:
        self.runtime = RUNC
        self.rest_seconds = 0.06
        self.enforced_by: dict[str, str] = {}
        self._settings = settings
        self._api = Api(settings.namespace, settings.kubeconfig)
        self._cache = PodCache(self._api, f"{APP_LABEL}={APP}")
        self._claims = ClaimCache(self._api, f"{APP_LABEL}={APP}")
        self._notes = Notes(settings.key)
        self._owner = Owner(
            *(self._api, settings.pool, self._cache, self._claims, settings.memory, self._notes)
        )
        self._owner.at_loss = self._let_go
        # Each with the task that looks for the end of its Pod.
        self._streams: dict[AttachedStream, asyncio.Task[None]] = {}
        self._pods = PlainPods(self._api, self._cache, self._owner)
        self._hardening = Hardening.of(RUNC)
        self._runtime_class = ""
        self._seccomp = b""
        self._images: dict[str, Image] = {}
        self._templates = PodTemplates(settings, self._probe)
        # When the leases end that are noted at the Pods, by container.
        self._copied: dict[str, float] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def is_holder(self) -> bool:
        """Whether this process has the pool's name."""
        return self._owner.is_holder

    @property
    def counts(self) -> Mapping[str, int]:
        """How often the Pods were listed, and how many there are."""
        return {"pod_lists": self._cache.lists, "pods": sum(1 for _ in self._cache)}

    async def prepare(self) -> None:
        """Check rights, network policy, RuntimeClass and images, and take the pool's name.

        Raises SandboxError that says what is missing.
        """
        await self._api.open()
        try:
            await require_rights(self._api, claims=bool(self._settings.claims))
            await require_warm_pools(self._api, self._settings.claims.values())
            await require_closed_network(self._api, self._owner.labels)
            self._runtime_class = await find_runtime_class(
                self._api, self._settings.runtime, require_gvisor=self._settings.require_gvisor
            )
            await self._cache.open()
            await self._open_claims()
        except ApiFailure as error:
            raise error_of(error, "read the namespace") from error
        await self._owner.take()
        with contextlib.suppress(ApiFailure):
            await self._owner.reap()
        await self._find_images()
        if self._settings.memory is not None:
            self._settings.memory.listeners.add(self._copy)

    async def _open_claims(self) -> None:
        """Know the claims, those of a pool that had other settings too. Raises ApiFailure."""
        try:
            await self._claims.open()
        except ApiFailure as error:
            if self._settings.claims or error.status not in (_FORBIDDEN, _MISSING):
                raise

    def languages(self) -> list[str]:
        return [name for name in OURS if self.interpreter(name)]

    def interpreter(self, language: str, template: str = "") -> str | None:
        image = self._image(template or language, template or language)
        return image.interpreters.get(language) if image else None

    def version(self, language: str, template: str) -> str:
        image = self._image(template, language)
        return version_in(language, image.versions.get(language, "")) if image else ""

    def node_runner(self) -> list[str]:
        return node_runner()

    async def hold_template(self, name: str, digest: str, folder: Path) -> bool:
        if name not in self._images:
            language, _, _ = name.partition("@")
            usual = self._image(language, language)
            self._images[name] = await self._templates.make(usual, digest, folder)
        return True

    async def drop_template(self, name: str) -> None:
        image = self._images.pop(name, None)
        if image and all(other.id != image.id for other in self._images.values()):
            await self._templates.drop(image)

    def close(self) -> None:
        self._owner.close()
        self._cache.close()
        self._claims.close()
        if self._settings.memory is not None:
            self._settings.memory.listeners.discard(self._copy)

    async def disconnect(self) -> None:
        # The removals of sandboxes are to reach the API server.
        if under_way := set(self._tasks):
            await asyncio.wait(under_way, timeout=REMOVAL_SECONDS)
        await self._templates.close()
        if self._api.is_open:
            await self._owner.release()
            await self._api.close()

    async def start(self, template: Template) -> Guest:
        image = self._image(template.name, template.language)
        if image is None:
            raise CreationFailed(f"Kubernetes: there is no image for {template.name!r}.")
        source = self._source_of(template.name)
        command = command_of(image, template, self._hardening)
        manifest = self._manifest(image, command, template.limits)
        name = manifest["metadata"]["name"]
        pod: Object | None = None
        try:
            pod = await source.make(manifest)
            stream = await self._attach(pod)
            try:
                await _send(stream, image.modules, self._seccomp)
            except BaseException:
                await stream.close()
                raise
        except BaseException:
            self._later(self._remove(source, name, pod))
            raise
        return self._guest(source, name, pod, stream, image)

    async def adopt(
        self, container: str, runtime: str, found: Mapping[str, Any], echo: bytes
    ) -> Guest:
        if failure := self._cache.failure or self._claims.failure:
            raise ProviderUnavailable(f"Kubernetes: {failure}")
        self._owner.require_name()
        pod = self._cache.get(str(found["pod"]))
        if pod is None or container_of(pod) != container or terminated_state(pod):
            raise CreationFailed("It has ended.")
        if not self._is_ours(pod):
            raise CreationFailed("It is another pool's.")
        source, name = self._made_by(pod)
        self._owner.know(name)
        try:
            if shape_of(pod) != found["shape"]:
                raise CreationFailed("Its Pod is not as it was made.")
            stream = await self._attach(pod, ProviderUnavailable)
        except BaseException:
            self._owner.forget(name)
            raise
        # Its copy is of a lease that another process has renewed.
        self._copied[container] = 0.0
        return self._guest(source, name, pod, stream, None, dict(found["facts"]), echo)

    async def copies(self) -> list[SandboxRecord]:
        found = (self._notes.read(pod) for pod in self._cache if self._is_ours(pod))
        return [remembered for remembered in found if remembered is not None]

    async def end(self, container: str) -> None:
        for pod in self._cache:
            if container_of(pod) == container and self._is_ours(pod):
                await self._remove(*self._made_by(pod), pod)

    def _is_ours(self, pod: Object) -> bool:
        labels = pod["metadata"].get("labels") or {}
        return bool(labels.get(POOL_LABEL) == self._settings.pool)

    def _let_go(self) -> None:
        """Leave what is attached: another process has the pool's name."""
        for stream in list(self._streams):
            self._later(stream.close())

    def _source_of(self, template: str) -> PodSource:
        """Return where sandboxes of a template come from."""
        if "@" in template:
            # Of an image that no warm pool has.
            return self._pods
        warm_pool = self._settings.claims.get(template) or self._settings.claims.get("")
        return self._claimed(warm_pool) if warm_pool else self._pods

    def _claimed(self, warm_pool: str = "") -> ClaimedPods:
        return ClaimedPods(self._api, self._cache, self._claims, self._owner, warm_pool)

    def _made_by(self, pod: Object) -> tuple[PodSource, str]:
        """Return where a Pod has come from, and the name to remove it by. Raises CreationFailed."""
        sandbox = sandbox_of(pod)
        if not sandbox:
            return self._pods, pod["metadata"]["name"]
        for claim in self._claims:
            if bound_sandbox(claim) == sandbox:
                return self._claimed(), claim["metadata"]["name"]
        raise CreationFailed("Its SandboxClaim has ended.")

    def _guest(
        self,
        source: PodSource,
        name: str,
        pod: Object,
        stream: AttachedStream,
        image: Image | None,
        facts: dict[str, Any] | None = None,
        echo: bytes = b"",
    ) -> KubernetesGuest:
        pod_name = pod["metadata"]["name"]
        digest = _digest_of(pod) or (image.digest if image else "")
        facts = facts or {"image_digest": digest}

        async def destroy() -> None:
            await stream.close()
            await self._remove(source, name, pod)

        return KubernetesGuest(
            stream,
            container=container_of(pod),
            found={"pod": pod_name, "shape": shape_of(pod), "facts": facts},
            facts=facts,
            destroy=destroy,
            end_of=partial(self._end_of, pod_name, pod),
            stay=partial(self._stay, pod_name, pod),
            claim=partial(self._claim, pod_name, pod),
            echo=echo,
        )

    def _manifest(
        self, image: Image, command: list[str], limits: SandboxLimits, *, stays_open: bool = True
    ) -> Object:
        """Return the manifest of a Pod with a new name."""
        user = self._hardening.choose_user(maps_users=False)
        environment = self._hardening.container(user)["environment"]
        return pod_manifest(
            self._owner.new_name(),
            image=image.id,
            command=command,
            environment=environment_with(image, environment),
            limits=limits,
            hardening=self._hardening,
            user=user,
            runtime_class=self._runtime_class,
            pull_secret=self._settings.pull_secret,
            labels=self._owner.labels,
            owner=self._owner.reference,
            stays_open=stays_open,
        )

    async def _attach(
        self, pod: Object, kind: type[SandboxError] = CreationFailed
    ) -> AttachedStream:
        try:
            stream = await self._api.attach(pod["metadata"]["name"], CONTAINER)
        except ApiFailure as error:
            failure = error_of(error, "attach to Pods")
            if isinstance(failure, ProviderUnavailable | RateLimited):
                raise failure from error
            raise kind(failure.message) from error
        watch = asyncio.ensure_future(self._close_after_end(stream, pod))
        self._streams[stream] = watch
        stream.at_end = lambda: self._forget_stream(stream)
        return stream

    async def _close_after_end(self, stream: AttachedStream, pod: Object) -> None:
        """Close a stream that outlives its Pod: not every connection learns of the end."""
        await self._cache.wait(pod["metadata"]["name"], _is_over(pod))
        await asyncio.sleep(END_SECONDS)
        self._later(stream.close())

    def _forget_stream(self, stream: AttachedStream) -> None:
        if watch := self._streams.pop(stream, None):
            watch.cancel()

    async def _remove(self, source: PodSource, name: str, pod: Object | None) -> None:
        """Remove a Pod. One that cannot be removed now is left to the search for orphans."""
        await source.remove(name, pod)
        if pod is not None:
            self._copied.pop(container_of(pod), None)

    async def _end_of(self, name: str, pod: Object) -> End:
        """Return how a Pod ended whose stream has ended, as far as it is known in time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_SECONDS):
                return end_of(await self._cache.wait(name, _is_over(pod)))
        return End()

    async def _stay(self, name: str, pod: Object) -> None:
        """Write at the Pod what the next process of the pool has to know. Raises SandboxError."""
        memory = self._settings.memory
        remembered = memory.of_container(container_of(pod)) if memory else None
        if remembered is None:
            raise ProviderUnavailable("Kubernetes: the sandbox is not remembered.")
        self._owner.require_name()
        metadata = {
            "annotations": self._notes.write(remembered),
            "labels": {LEASE_LABEL: _label(remembered.ref)},
        }
        try:
            await self._patch(name, {"uid": pod["metadata"]["uid"], **metadata})
        except ApiFailure as error:
            raise error_of(error, "patch Pods") from error
        self._copied[remembered.container] = time.monotonic() + remembered.left

    def _copy(self, remembered: SandboxRecord) -> None:
        """Have the Pod's copy of a record know of a renewed lease, before a third of it is over."""
        container = remembered.container
        ends_at = time.monotonic() + remembered.left
        known = self._copied.get(container)
        if known is None or abs(ends_at - known) < remembered.seconds / 3:
            return
        for pod in self._cache:
            if container_of(pod) == container and self._owner.is_holder:
                self._copied[container] = ends_at
                self._later(self._write_copy(pod["metadata"]["name"], remembered, known))

    async def _write_copy(self, name: str, remembered: SandboxRecord, former: float) -> None:
        try:
            await self._patch(name, {"annotations": self._notes.write(remembered)})
        except ApiFailure as error:
            # The next renewal is noted.
            if remembered.container in self._copied:
                self._copied[remembered.container] = former
            if error.status != _MISSING:
                logger.warning("a lease was not noted at its Pod: %s", error)

    def _claim(self, name: str, pod: Object, owner: str) -> None:
        if owner and len(self._tasks) < MOST_TASKS:
            self._later(self._label_with_owner(name, pod, _label(owner)))

    async def _label_with_owner(self, name: str, pod: Object, tenant: str) -> None:
        """Note the tenant at a Pod that is as we know it, and at no other."""
        uid = pod["metadata"]["uid"]
        seen = self._cache.get(name) or pod
        try:
            for _ in range(_CLAIM_ATTEMPTS):
                if seen["metadata"]["uid"] != uid:
                    return
                version = seen["metadata"]["resourceVersion"]
                changed = {"resourceVersion": version, "labels": {TENANT_LABEL: tenant}}
                try:
                    await self._patch(name, changed)
                    return
                except ApiFailure as error:
                    if error.status != _CONFLICT:
                        raise
                seen = await self._api.call("GET", f"{self._api.pods}/{name}")
        except ApiFailure as error:
            # The Pod of a short run may be gone.
            if error.status != _MISSING:
                logger.warning("the tenant was not noted at a Pod: %s", error)

    async def _patch(self, name: str, metadata: Mapping[str, Any]) -> Object:
        path = f"{self._api.pods}/{name}"
        return await self._api.call("PATCH", path, {"metadata": metadata}, content_type=MERGE)

    def _later(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _image(self, name: str, language: str) -> Image | None:
        """Shells run in the Python image when they have none of their own."""
        if "@" in name:
            return self._images.get(name)
        for key in (name, language):
            if key in self._settings.images:
                return self._images.get(key)
        return self._images.get("python")

    async def _find_images(self) -> None:
        """Look into the images, and settle what isolates. Raises SandboxError."""
        names = list(dict.fromkeys(self._settings.images.values()))
        # The stricter of the two declarations will do for what only looks around.
        answers = await asyncio.gather(*map(self._probe, names), return_exceptions=True)
        found, complaints = {}, []
        for name, answer in zip(names, answers, strict=True):
            if isinstance(answer, SandboxError):
                complaints.append(f"{name}: {answer.message}")
                logger.warning("an image cannot be used", extra={"reason": answer.message})
            elif isinstance(answer, BaseException):
                raise answer
            else:
                found[name] = answer
        if not found:
            failure = next(each for each in answers if isinstance(each, SandboxError))
            if isinstance(failure, CreationFailed):
                raise ProviderUnavailable(
                    f"No image can be used. {' '.join(complaints)} Name images that the cluster's "
                    "nodes can pull in the provider's configuration."
                )
            raise failure
        is_gvisor = all(answer["gvisor"] for answer, _ in found.values())
        if self._settings.require_gvisor and not is_gvisor:
            raise ProviderUnavailable(
                f"require_gvisor is set, but Pods of the RuntimeClass "
                f"{self._runtime_class or '(none)'} are not in gVisor. {GVISOR_REMEDY}"
            )
        self.runtime = GVISOR if is_gvisor else RUNC
        self._hardening = Hardening.of(self.runtime)
        first, _ = next(iter(found.values()))
        self._templates.know_machine(first["machine"])
        program = build_filter(
            first["machine"],
            shared_kernel=not is_gvisor,
            supervisor_only=not self._settings.filter_system_calls,
        )
        self._seccomp = program or b""
        calls = "gVisor" if is_gvisor else "seccomp" if program else "RuntimeDefault alone"
        self.enforced_by = {
            "memory": "supervisor, then the Pod's limit",
            "cpu_seconds": "supervisor",
            "processes": "supervisor",
            "users": self._separation_of_users(is_gvisor),
            "system_calls": calls,
        }
        probed = {name: image_of(name, digest, answer) for name, (answer, digest) in found.items()}
        self._images = {
            key: probed[name] for key, name in self._settings.images.items() if name in probed
        }

    def _separation_of_users(self, is_gvisor: bool) -> str:
        if is_gvisor:
            return "gVisor's kernel"
        # All Pods of a warm pool are made of one template.
        return "uid per warm pool" if self._settings.claims else "uid per Pod"

    async def _probe(self, name: str) -> tuple[dict[str, Any], str]:
        """Return what a Pod of an image says of it, and the image's digest. Raises SandboxError."""
        nothing = Image(name, "", {}, {}, b"", -1)
        manifest = self._manifest(nothing, probe_command(), SandboxLimits(), stays_open=False)
        pod = None
        try:
            pod = await self._pods.make(manifest, PROBE_SECONDS)
            stream = await self._attach(pod)
            try:
                output = await _ask(stream, probe_request(sources()))
            finally:
                await stream.close()
            if not output:
                raise CreationFailed(stream.complaint or "the probe printed nothing")
            return read_probe(output), _digest_of(pod)
        finally:
            await self._remove(self._pods, manifest["metadata"]["name"], pod)


def _is_over(pod: Object) -> Callable[[Object | None], bool]:
    """Return the condition that a Pod has ended, and how is known."""
    uid = pod["metadata"]["uid"]

    def is_known(seen: Object | None) -> bool:
        end = end_of(seen if seen and seen["metadata"]["uid"] == uid else None)
        return bool(end.lost) or end.exit_code is not None

    return is_known


async def _send(stream: AttachedStream, *parts: bytes) -> None:
    """Give the guest its modules and its filter of system calls. Raises CreationFailed."""
    loop = asyncio.get_running_loop()
    try:
        for part in parts:
            await loop.sock_sendall(stream.end, len(part).to_bytes(4, "big") + part)
    except OSError as error:
        raise CreationFailed(f"Kubernetes: the container ended at once: {error}") from error


async def _ask(stream: AttachedStream, request: bytes) -> bytes:
    """Return all that a program prints that is given a request."""
    loop = asyncio.get_running_loop()
    output = b""
    try:
        async with asyncio.timeout(PROBE_SECONDS):
            await loop.sock_sendall(stream.end, request)
            while data := await loop.sock_recv(stream.end, 1 << 16):
                output += data
    except (OSError, TimeoutError) as error:
        raise CreationFailed(f"Kubernetes: the probe did not answer: {error}") from error
    return output


def _digest_of(pod: Object) -> str:
    """Return the digest of a Pod's image as its node says it, empty where it does not."""
    for each in pod["status"].get("containerStatuses") or ():
        if each["name"] == CONTAINER:
            return str(each.get("imageID") or "").rpartition("@")[2]
    return ""


def _label(text: str) -> str:
    """Return what stands for a name in a label, which has few characters and is read by many."""
    return hashlib.sha256(text.encode()).hexdigest()[:32]
