"""Where a launcher's running Pods come from, and Pods that it creates itself."""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from providers.errors import CreationFailed, RateLimited
from providers.runtime.launchers.kubernetes.api import Api, ApiFailure, Object, error_of
from providers.runtime.launchers.kubernetes.cache import PodCache
from providers.runtime.launchers.kubernetes.guest import end_of, terminated_state
from providers.runtime.launchers.kubernetes.manifest import CONTAINER, differences
from providers.runtime.launchers.kubernetes.owner import Owner

logger = logging.getLogger(__name__)

# How long a Pod may wait for a node: an autoscaler makes one in minutes.
PENDING_SECONDS = 600.0
# How long the end of a Pod may take to be seen.
GONE_SECONDS = 15.0
# What a node says of an image that it will not have in a moment.
_BAD_IMAGE = frozenset(
    {
        *("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"),
        *("CreateContainerConfigError", "CreateContainerError", "RunContainerError"),
    }
)
_MISSING = 404


class PodSource(Protocol):
    """Gives running Pods, and takes them back. Used from one event loop only."""

    async def make(self, manifest: Object) -> Object:
        """Return a running Pod that is as its manifest says, once its container runs.

        The manifest's name is the one to remove the Pod by. Raises SandboxError.
        """

    async def remove(self, name: str, pod: Object | None) -> None:
        """Remove the Pod that was made by this name. Without `pod` it may not have been made.

        What cannot be removed now is left to the search for orphans.
        """


class PlainPods(PodSource):
    """Pods that the launcher creates."""

    def __init__(self, api: Api, cache: PodCache, owner: Owner) -> None:
        self._api, self._cache, self._owner = api, cache, owner

    async def make(self, manifest: Object, seconds: float = PENDING_SECONDS) -> Object:
        self._owner.require_name()
        try:
            pod = await self._api.call("POST", self._api.pods, manifest)
        except ApiFailure as error:
            raise error_of(error, "create Pods") from error
        self._cache.put(pod)
        # Admission may have changed it.
        if found := differences(pod, manifest):
            raise CreationFailed(
                f"Kubernetes: the cluster makes other Pods than the pool asks for. These fields "
                f"differ: {', '.join(found)}. Exclude the namespace {self._api.namespace} from "
                "webhooks that change Pods."
            )
        return await self._wait_until_running(pod["metadata"]["name"], seconds)

    async def remove(self, name: str, pod: Object | None) -> None:
        try:
            pod = pod or self._cache.get(name)
            if pod is None:
                # The server may have made it, and the answer was lost.
                pod = await self._api.call("GET", f"{self._api.pods}/{name}")
            if await self._owner.remove(self._api.pods, pod):
                await wait_until_gone(self._cache, pod)
        except ApiFailure as error:
            if error.status != _MISSING:
                logger.warning("Pod not removed", extra={"reason": str(error)})
        finally:
            self._owner.forget(name)

    async def _wait_until_running(self, name: str, seconds: float) -> Object:
        """Return a Pod whose container runs. Raises SandboxError."""
        try:
            async with asyncio.timeout(seconds):
                pod = await self._cache.wait(name, _is_decided)
        except TimeoutError:
            raise RateLimited(
                f"Kubernetes: {_why_pending(self._cache.get(name))}. The cluster has no room for "
                "another sandbox now. Try again later, or give it more nodes."
            ) from None
        if pod is None:
            raise CreationFailed("Kubernetes: the Pod was deleted before it ran.")
        require_running(pod)
        return pod


async def wait_until_gone(cache: PodCache, pod: Object) -> None:
    """Wait until a Pod that is being deleted is gone, as long as that may take."""
    name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
    try:
        async with asyncio.timeout(GONE_SECONDS):
            await cache.wait(name, lambda seen: seen is None or seen["metadata"]["uid"] != uid)
    except TimeoutError:
        logger.warning("Pod still there after its deletion", extra={"pod": name})


def require_running(pod: Object) -> None:
    """Raise CreationFailed, with the reason, for a Pod whose container does not run."""
    if problem := image_problem(pod):
        raise CreationFailed(f"Kubernetes: {problem}")
    if pod["status"]["phase"] != "Running":
        reason = end_of(pod).lost or _how_it_ended(pod)
        raise CreationFailed(f"Kubernetes: the Pod did not start: {reason}.")


def image_problem(pod: Object) -> str:
    """Return why the node will not start a Pod's container, empty where it may."""
    for each in (pod.get("status") or {}).get("containerStatuses") or ():
        waiting = (each.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") in _BAD_IMAGE:
            message = str(waiting.get("message") or "")[:300]
            return f"the image {each['image']} cannot be used: {waiting['reason']}: {message}"
    return ""


def _is_decided(pod: Object | None) -> bool:
    """Whether it is known if a Pod will run."""
    if pod is None:
        return True
    phase = (pod.get("status") or {}).get("phase")
    if phase == "Running":
        return (
            any(
                each["name"] == CONTAINER and "running" in (each.get("state") or {})
                for each in pod["status"].get("containerStatuses") or ()
            )
            or terminated_state(pod) is not None
        )
    return phase in ("Succeeded", "Failed") or bool(image_problem(pod))


def _how_it_ended(pod: Object) -> str:
    status = pod.get("status") or {}
    ended = terminated_state(pod) or status
    words = [str(ended.get(name) or "") for name in ("reason", "message")]
    code = f"exit code {ended['exitCode']}" if "exitCode" in ended else ""
    return ": ".join(each for each in ("its container ended", code, *words) if each)[:500]


def _why_pending(pod: Object | None) -> str:
    for condition in ((pod or {}).get("status") or {}).get("conditions") or ():
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return f"no node takes the Pod: {condition.get('message')}"
    return "the Pod did not start in time"
