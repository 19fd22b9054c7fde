"""Pods of agent-sandbox's warm pools (agents.x-k8s.io, v1beta1), each got by a SandboxClaim.

A cluster's administrator names a SandboxWarmPool. Its Pods start the guest and wait, as those that
the launcher creates. A claim gets one of them, or a new one where none is warm. The launcher takes
a Pod only if it could have made it itself, and has a claim in place of the Pod from then on: what
removes the claim removes the Pod.

agent-sandbox allows claims few domains of labels (`sandbox.users.io` by default), so that the pool
labels the Pod itself, and not by the claim's additionalPodMetadata.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from providers.errors import CreationFailed, ProviderUnavailable, RateLimited
from providers.runtime.launchers.container_guest import Image, environment_with, node_runner
from providers.runtime.launchers.kubernetes.api import (
    EXTENSIONS,
    MERGE,
    Api,
    ApiFailure,
    Object,
    error_of,
)
from providers.runtime.launchers.kubernetes.cache import ClaimCache, PodCache
from providers.runtime.launchers.kubernetes.manifest import (
    APP,
    APP_LABEL,
    GUARD_SECONDS,
    LEASE_LABEL,
    POOL_LABEL,
    TENANT_LABEL,
    command_of,
    differences,
    pod_manifest,
)
from providers.runtime.launchers.kubernetes.owner import Owner, bound_sandbox, sandbox_of
from providers.runtime.launchers.kubernetes.pods import (
    PENDING_SECONDS,
    PodSource,
    image_problem,
    require_running,
    wait_until_gone,
)
from providers.runtime.pool.hardening import Hardening
from providers.runtime.pool.requests import interpreter_command
from providers.runtime.pool.template import Template
from providers.values import SandboxLimits

logger = logging.getLogger(__name__)

FIELD = "kubernetes_claims"
TEMPLATE_REMEDY = (
    "Create the SandboxTemplate and the SandboxWarmPool anew as `manage.py kubernetes_template` "
    "prints them."
)
# Reasons of a claim that is not ready, with which it will not become so. The first are the
# administrator's to mend.
_MISCONFIGURED = frozenset({"InvalidMetadata", "TemplateNotFound", "WarmPoolNotFound"})
_OVER = frozenset(
    {"ClaimExpired", "MultiplePods", "PodFailed", "PodSucceeded", "SandboxExpired"},
)
_QUOTA = "exceeded quota"
_MISSING = 404


class ClaimedPods(PodSource):
    """The Pods of one warm pool. Any claim can be removed, whichever pool it is of."""

    def __init__(
        self, api: Api, pods: PodCache, claims: ClaimCache, owner: Owner, warm_pool: str = ""
    ) -> None:
        self._api, self._pods, self._claims, self._owner = api, pods, claims, owner
        self._warm_pool = warm_pool

    async def make(self, manifest: Object) -> Object:
        self._owner.require_name()
        name = manifest["metadata"]["name"]
        try:
            claim = await self._api.call("POST", self._api.claims, self._claim(manifest))
        except ApiFailure as error:
            raise error_of(error, "create SandboxClaims") from error
        self._claims.put(claim)
        sandbox = await self._wait_until_ready(name)
        try:
            pod = await self._api.call("GET", f"{self._api.pods}/{sandbox}")
            self._require_same(pod, manifest, sandbox)
            require_running(pod)
            # From now on it is found by the pool, and not used a second time.
            changed = {"uid": pod["metadata"]["uid"], "labels": {POOL_LABEL: self._owner.pool}}
            pod = await self._api.call(
                "PATCH", f"{self._api.pods}/{sandbox}", {"metadata": changed}, content_type=MERGE
            )
        except ApiFailure as error:
            if error.status == _MISSING:
                raise CreationFailed("Kubernetes: the claimed Pod was deleted.") from error
            raise error_of(error, "read and patch Pods") from error
        self._pods.put(pod)
        return pod

    async def remove(self, name: str, pod: Object | None) -> None:
        try:
            claim = self._claims.get(name)
            if claim is None:
                # The server may have made it, and the answer was lost.
                claim = await self._api.call("GET", f"{self._api.claims}/{name}")
            if await self._owner.remove(self._api.claims, claim) and pod is not None:
                await wait_until_gone(self._pods, pod)
        except ApiFailure as error:
            if error.status != _MISSING:
                logger.warning("SandboxClaim not removed", extra={"reason": str(error)})
        finally:
            self._owner.forget(name)

    def _claim(self, manifest: Object) -> Object:
        """Return the claim that stands for the Pod of a manifest."""
        metadata = manifest["metadata"]
        end = datetime.now(UTC) + timedelta(seconds=GUARD_SECONDS)
        return {
            "apiVersion": EXTENSIONS,
            "kind": "SandboxClaim",
            "metadata": {key: metadata[key] for key in ("name", "labels", "ownerReferences")},
            "spec": {
                "warmPoolRef": {"name": self._warm_pool},
                "lifecycle": {
                    "shutdownTime": end.strftime("%Y-%m-%dT%H:%M:%SZ"),
                    "shutdownPolicy": "Delete",
                },
            },
        }

    async def _wait_until_ready(self, name: str) -> str:
        """Return the name of a claim's Sandbox, which is ready. Raises SandboxError."""
        try:
            async with asyncio.timeout(PENDING_SECONDS):
                claim = await self._claims.wait(
                    name, lambda seen: _is_decided(seen) or bool(seen and bound_sandbox(seen))
                )
                if claim is not None and not _is_decided(claim):
                    claim = await self._wait_for_pod(name, bound_sandbox(claim))
        except TimeoutError:
            _, message = _readiness(self._claims.get(name) or {})
            raise RateLimited(
                f"Kubernetes: the SandboxClaim got no Pod of {self._warm_pool!r} in time: "
                f"{message or 'agent-sandbox has not answered it'}. Try again later, or give the "
                "cluster more nodes or the SandboxWarmPool more replicas."
            ) from None
        return self._require_sandbox(claim)

    async def _wait_for_pod(self, name: str, sandbox: str) -> Object | None:
        """Return a claim that is decided. Raises CreationFailed where its Pod has no image."""
        decided = asyncio.ensure_future(self._claims.wait(name, _is_decided))
        broken = asyncio.ensure_future(
            self._pods.wait(sandbox, lambda pod: pod is not None and bool(image_problem(pod)))
        )
        try:
            await asyncio.wait((decided, broken), return_when=asyncio.FIRST_COMPLETED)
            if not decided.done():
                require_running(broken.result() or {})
            return decided.result()
        finally:
            decided.cancel()
            broken.cancel()

    def _require_sandbox(self, claim: Object | None) -> str:
        """Return the name of the Sandbox of a claim that is decided. Raises SandboxError."""
        if claim is None or claim["metadata"].get("deletionTimestamp"):
            raise CreationFailed("Kubernetes: the SandboxClaim was deleted before its Pod ran.")
        reason, message = _readiness(claim)
        if _QUOTA in message:
            raise error_of(ApiFailure(403, "Forbidden", message), "create Pods")
        if reason in _MISCONFIGURED:
            raise ProviderUnavailable(
                f"{FIELD}: agent-sandbox refuses the SandboxClaim: {reason}: {message}. "
                f"{TEMPLATE_REMEDY}",
                field=FIELD,
            )
        if reason in _OVER:
            raise CreationFailed(f"Kubernetes: the claimed Pod did not start: {reason}: {message}")
        return bound_sandbox(claim)

    def _require_same(self, pod: Object, manifest: Object, sandbox: str) -> None:
        """Raise ProviderUnavailable, naming the fields, for a Pod that is not as a manifest."""
        labels = pod["metadata"].get("labels") or {}
        found = [] if sandbox_of(pod) == sandbox else ["metadata.ownerReferences"]
        if labels.get(APP_LABEL) != APP:
            found.append(f"metadata.labels.{APP_LABEL}")
        # One that has these has been in use.
        used = (POOL_LABEL, TENANT_LABEL, LEASE_LABEL)
        found += [f"metadata.labels.{label}" for label in used if label in labels]
        found += differences(pod, manifest)
        if found:
            raise ProviderUnavailable(
                f"{FIELD}: The Pods of the SandboxWarmPool {self._warm_pool!r} are not as this "
                f"pool needs them. These fields differ: {', '.join(found)}. {TEMPLATE_REMEDY}",
                field=FIELD,
            )


def _is_decided(claim: Object | None) -> bool:
    """Whether it is known if a claim gets a Pod that runs."""
    if claim is None or claim["metadata"].get("deletionTimestamp"):
        return True
    reason, message = _readiness(claim)
    if not reason:
        return bool(bound_sandbox(claim))
    return reason in _MISCONFIGURED or reason in _OVER or _QUOTA in message


def _readiness(claim: Mapping[str, Any]) -> tuple[str, str]:
    """Return why a claim is not ready, a reason and a message. The reason of a ready one is ""."""
    for condition in (claim.get("status") or {}).get("conditions") or ():
        if condition["type"] == "Ready":
            reason = "" if condition["status"] == "True" else str(condition["reason"])
            return reason, str(condition.get("message") or "")
    return "Pending", ""


async def require_warm_pools(api: Api, names: Iterable[str]) -> None:
    """Raise ProviderUnavailable unless these SandboxWarmPools are there, and give their sandboxes
    no network. Raises ApiFailure."""
    for name in sorted(set(names)):
        pool = await _find(api, "sandboxwarmpools", name)
        template = pool["spec"]["sandboxTemplateRef"]["name"]
        spec = (await _find(api, "sandboxtemplates", template))["spec"]
        if spec.get("networkPolicyManagement") == "Unmanaged":
            continue
        # agent-sandbox's own policy, where none is given, lets sandboxes reach the Internet.
        policy = spec.get("networkPolicy")
        if policy is None or policy.get("ingress") or policy.get("egress"):
            raise ProviderUnavailable(
                f"{FIELD}: The SandboxTemplate {template!r} lets its sandboxes use the network. "
                "Set its networkPolicy to {}, which allows nothing.",
                field=FIELD,
            )


async def _find(api: Api, kind: str, name: str) -> Object:
    try:
        return await api.call("GET", f"{api.extension(kind)}/{name}")
    except ApiFailure as error:
        if error.status != _MISSING:
            raise
        raise ProviderUnavailable(
            f"{FIELD}: The namespace {api.namespace} has no {kind} {name!r}. Install agent-sandbox "
            "v1beta1 with its extensions, and create what `manage.py kubernetes_template` prints.",
            field=FIELD,
        ) from error


def warm_pool_manifests(
    name: str,
    image: str,
    language: str,
    limits: SandboxLimits,
    preload: Sequence[str] = (),
    *,
    advise: bool = False,
    python: str,
    interpreter: str,
    runtime: str,
    runtime_class: str = "",
    pull_secret: str = "",
    replicas: int = 1,
) -> list[Object]:
    """Return a SandboxTemplate and a SandboxWarmPool of this name, for sandboxes of a language.

    `python` and `interpreter` are the paths of Python and of the language's interpreter in the
    image. `runtime` is `gvisor` or `runc`, and `runtime_class` the RuntimeClass that gives it,
    empty for the cluster's default.
    """
    command = interpreter_command(language, interpreter, node_runner(), limits)
    template = Template(language, language, command, limits, tuple(preload), advise)
    known = Image(image, "", {"python": python}, {}, b"", -1)
    hardening = Hardening.of(runtime)
    user = hardening.user_of(name)
    pod = pod_manifest(
        name,
        image=image,
        command=command_of(known, template, hardening),
        environment=environment_with(known, hardening.container(user)["environment"]),
        limits=limits,
        hardening=hardening,
        user=user,
        runtime_class=runtime_class,
        pull_secret=pull_secret,
        labels={},
        owner={},
    )
    # It may wait for a claim for any time. The claim has the last guard.
    del pod["spec"]["activeDeadlineSeconds"]
    sandboxes = {
        "podTemplate": {"metadata": {"labels": pod["metadata"]["labels"]}, "spec": pod["spec"]},
        "networkPolicyManagement": "Managed",
        # It allows nothing. Without it agent-sandbox lets sandboxes reach the Internet.
        "networkPolicy": {},
    }
    pool = {"replicas": replicas, "sandboxTemplateRef": {"name": name}}
    return [
        {"apiVersion": EXTENSIONS, "kind": kind, "metadata": {"name": name}, "spec": spec}
        for kind, spec in (("SandboxTemplate", sandboxes), ("SandboxWarmPool", pool))
    ]
