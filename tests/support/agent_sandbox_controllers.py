"""The controllers of agent-sandbox for a test's cluster: `python -m tests.support.agent_sandbox_controllers`.

Its own are Go programs that cannot be built here. These do over the API server what those do (see
their `controllers` and `extensions/controllers`), as far as claims need it: a SandboxWarmPool keeps
Sandboxes, a Sandbox has a Pod of its name, a SandboxClaim adopts a warm Sandbox or creates one.
What is deleted takes what it owns along by the cluster's own garbage collector.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import copy
import hashlib
import json
import logging
import ssl
from collections.abc import Coroutine
from datetime import UTC, datetime
from typing import Any

import aiohttp

from tests.support.node_api import MERGE, RETRY_SECONDS, Api, ApiError

logger = logging.getLogger("agent_sandbox")

CORE, EXTENSIONS = "agents.x-k8s.io/v1beta1", "extensions.agents.x-k8s.io/v1beta1"
# What is watched, and where it is.
GROUPS = {
    "sandboxclaims": f"apis/{EXTENSIONS}",
    "sandboxtemplates": f"apis/{EXTENSIONS}",
    "sandboxwarmpools": f"apis/{EXTENSIONS}",
    "sandboxes": f"apis/{CORE}",
    "pods": "api/v1",
}
# How often shutdown times are looked at, and what has failed is tried again.
TICK_SECONDS = 0.25
_ALLOWED_DOMAIN = "sandbox.users.io"
_SYSTEM = ("agents.x-k8s.io/", "extensions.agents.x-k8s.io/")
_PROPAGATED = "agents.x-k8s.io/propagated-labels"
_POD_NAME = "agents.x-k8s.io/pod-name"
_CLAIM_UID = "agents.x-k8s.io/claim-uid"
_WARM_POOL = "agents.x-k8s.io/warm-pool-sandbox"
_NAME_HASH = "agents.x-k8s.io/sandbox-name-hash"

Object = dict[str, Any]
Key = tuple[str, str]


class Refused(Exception):
    """A claim or Sandbox that cannot be served, for a reason that its condition names."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Store:
    """What the API server has of the watched kinds, by namespace and name."""

    def __init__(self, api: Api) -> None:
        self.api = api
        self.changed = asyncio.Event()
        self.listed: set[str] = set()
        self.objects: dict[str, dict[Key, Object]] = {kind: {} for kind in GROUPS}

    async def follow(self, kind: str) -> None:
        path = f"/{GROUPS[kind]}/{kind}"
        while True:
            try:
                answer = await self.api.request("GET", path)
                self.objects[kind] = {_key(each): each for each in answer["items"]}
                self.listed.add(kind)
                self.changed.set()
                version = answer["metadata"]["resourceVersion"]
                async for event in self.api.watch(f"{path}?watch=1&resourceVersion={version}"):
                    if event["type"] == "ERROR":
                        break
                    self._see(kind, event["object"], is_gone=event["type"] == "DELETED")
            except (aiohttp.ClientError, TimeoutError, json.JSONDecodeError, ApiError) as error:
                logger.info("%s: %s", kind, error)
            await asyncio.sleep(RETRY_SECONDS)

    def _see(self, kind: str, found: Object, *, is_gone: bool = False) -> None:
        known = self.objects[kind].get(_key(found))
        if known and _version(known) > _version(found):
            return
        if is_gone:
            self.objects[kind].pop(_key(found), None)
        else:
            self.objects[kind][_key(found)] = found
        self.changed.set()

    def get(self, kind: str, namespace: str, name: str) -> Object | None:
        return self.objects[kind].get((namespace, name))

    def owned_by(self, kind: str, owner: Object) -> list[Object]:
        uid = owner["metadata"]["uid"]
        return [each for each in self.objects[kind].values() if _owner_uid(each) == uid]

    async def create(self, kind: str, namespace: str, body: Object) -> Object:
        path = f"/{GROUPS[kind]}/namespaces/{namespace}/{kind}"
        found: Object = await self.api.request("POST", path, body)
        self._see(kind, found)
        return found

    async def patch(self, kind: str, found: Object, body: Object, part: str = "") -> Object:
        """Change an object, if it is as it was seen."""
        metadata = {**body.get("metadata", {}), "resourceVersion": str(_version(found))}
        changed: Object = await self.api.request(
            "PATCH", _path(kind, found) + part, {**body, "metadata": metadata}, MERGE
        )
        self._see(kind, changed)
        return changed

    async def delete(self, kind: str, found: Object) -> None:
        uid = {"preconditions": {"uid": found["metadata"]["uid"]}}
        body = {"apiVersion": "v1", "kind": "DeleteOptions", **uid}
        await self.api.request("DELETE", _path(kind, found), body)

    async def set_status(self, kind: str, found: Object, status: Object) -> None:
        """Write a status that differs, with the times at which its conditions have changed."""
        old = found.get("status") or {}
        known = {each["type"]: each for each in old.get("conditions") or ()}
        for each in status.get("conditions", ()):
            each["observedGeneration"] = found["metadata"]["generation"]
            before = known.get(each["type"], {})
            is_same = before.get("status") == each["status"]
            each["lastTransitionTime"] = before["lastTransitionTime"] if is_same else _now()
        if any(old.get(name) != value for name, value in status.items()):
            await self.patch(kind, found, {"status": status}, "/status")


class Controllers:
    """All controllers. Each object is looked at whenever any has changed: there are few."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def run(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._store.changed.wait(), TICK_SECONDS)
            self._store.changed.clear()
            if self._store.listed != GROUPS.keys():
                continue
            for kind, work in (
                ("sandboxes", self._sandbox),
                ("sandboxclaims", self._claim),
                ("sandboxwarmpools", self._warm_pool),
            ):
                for found in list(self._store.objects[kind].values()):
                    if not found["metadata"].get("deletionTimestamp"):
                        await self._try(kind, found, work(found))

    async def _try(self, kind: str, found: Object, work: Coroutine[Any, Any, None]) -> None:
        """What has failed is tried again at the next turn."""
        try:
            await work
        except (ApiError, aiohttp.ClientError, TimeoutError, json.JSONDecodeError) as error:
            logger.info("%s %s: %s", kind, found["metadata"]["name"], error)

    # A Sandbox.

    async def _sandbox(self, sandbox: Object) -> None:
        try:
            pod = await self._pod_of(sandbox)
            ready = _readiness(pod)
        except Refused as error:
            pod, ready = None, _condition("Ready", error.reason, f"Error seen: {error}")
        conditions, status = [ready], (pod or {}).get("status", {})
        if status.get("phase") in ("Succeeded", "Failed"):
            conditions.append(_condition("Finished", f"Pod{status['phase']}", "", is_so=True))
        addresses = [each["ip"] for each in status.get("podIPs") or ()]
        await self._store.set_status(
            "sandboxes", sandbox, {"conditions": conditions, "podIPs": addresses}
        )

    async def _pod_of(self, sandbox: Object) -> Object:
        """The Pod of a Sandbox, which is created, with the labels of its template."""
        metadata, template = sandbox["metadata"], sandbox["spec"]["podTemplate"]
        namespace, name = _key(sandbox)
        labels = _own(template.get("metadata", {}).get("labels"))
        pod = self._store.get("pods", namespace, name)
        if pod is None:
            hashed = hashlib.sha256(name.encode()).hexdigest()[:8]
            body = {
                "metadata": {
                    "name": name,
                    "labels": {**labels, _NAME_HASH: hashed},
                    "annotations": {
                        **_own(template.get("metadata", {}).get("annotations")),
                        _PROPAGATED: ",".join(sorted(labels)),
                    },
                    "ownerReferences": [_reference(sandbox, CORE, "Sandbox")],
                },
                "spec": template["spec"],
            }
            try:
                pod = await self._store.create("pods", namespace, body)
            except ApiError as error:
                raise Refused("ReconcilerError", str(error)) from error
        if _owner_uid(pod) != metadata["uid"]:
            raise Refused("ReconcilerError", f"the Pod {name} is another one's")
        changed: dict[str, str | None] = {
            key: value
            for key, value in labels.items()
            if pod["metadata"].get("labels", {}).get(key) != value
        }
        known = pod["metadata"].get("annotations", {}).get(_PROPAGATED, "")
        changed |= {key: None for key in known.split(",") if key and key not in labels}
        if changed:
            annotations = {_PROPAGATED: ",".join(sorted(labels))}
            body = {"metadata": {"labels": changed, "annotations": annotations}}
            pod = await self._store.patch("pods", pod, body)
        if metadata.get("annotations", {}).get(_POD_NAME) != name:
            note = {"metadata": {"annotations": {_POD_NAME: name}}}
            sandbox.update(await self._store.patch("sandboxes", sandbox, note))
        return pod

    # A SandboxClaim.

    async def _claim(self, claim: Object) -> None:
        lifecycle = claim["spec"].get("lifecycle") or {}
        end = lifecycle.get("shutdownTime")
        if end and datetime.fromisoformat(end) <= datetime.now(UTC):
            if lifecycle["shutdownPolicy"] != "Retain":
                await self._store.delete("sandboxclaims", claim)
                return
            for sandbox in self._store.owned_by("sandboxes", claim):
                await self._store.delete("sandboxes", sandbox)
            ready = _condition("Ready", "ClaimExpired", "Claim expired. Sandbox cleanup initiated.")
            status = {"conditions": [ready], "sandbox": {}}
            await self._store.set_status("sandboxclaims", claim, status)
            return
        bound: Object = {}
        try:
            sandbox = await self._sandbox_of(claim)
            conditions = copy.deepcopy(sandbox.get("status", {}).get("conditions") or [])
            if not any(each["type"] == "Ready" for each in conditions):
                not_ready = _condition("Ready", "SandboxNotReady", "Sandbox is not ready")
                conditions.append(not_ready)
            addresses = sandbox.get("status", {}).get("podIPs") or []
            bound = {"sandbox": {"name": sandbox["metadata"]["name"], "podIPs": addresses}}
        except Refused as error:
            conditions = [_condition("Ready", error.reason, str(error))]
        await self._store.set_status("sandboxclaims", claim, {"conditions": conditions, **bound})

    async def _sandbox_of(self, claim: Object) -> Object:
        """The Sandbox of a claim: the one that it has, a warm one, or a new one."""
        namespace, name = _key(claim)
        labels = claim["spec"].get("additionalPodMetadata", {}).get("labels") or {}
        for label in labels:
            if label.partition("/")[0] != _ALLOWED_DOMAIN:
                raise Refused("InvalidMetadata", f"label domain of {label!r} is not allowed")
        own = [
            each
            for each in self._store.owned_by("sandboxes", claim)
            if not each["metadata"].get("deletionTimestamp")
        ]
        if own:
            return own[0]
        pool_name = claim["spec"]["warmPoolRef"]["name"]
        pool = self._store.get("sandboxwarmpools", namespace, pool_name)
        if pool is None:
            raise Refused("WarmPoolNotFound", f'SandboxWarmPool "{pool_name}" not found')
        spec = self._blueprint(pool)
        pod_labels = spec["podTemplate"].setdefault("metadata", {}).setdefault("labels", {})
        pod_labels |= {**labels, _CLAIM_UID: claim["metadata"]["uid"]}
        metadata = {
            "labels": {_CLAIM_UID: claim["metadata"]["uid"], _WARM_POOL: None},
            "ownerReferences": [_reference(claim, EXTENSIONS, "SandboxClaim")],
        }
        warm = [] if claim["spec"].get("env") else self._store.owned_by("sandboxes", pool)
        warm = [each for each in warm if not each["metadata"].get("deletionTimestamp")]
        for sandbox in sorted(warm, key=_is_ready, reverse=True):
            body = {
                "metadata": metadata,
                "spec": {"podTemplate": {"metadata": {"labels": pod_labels}}},
            }
            return await self._store.patch("sandboxes", sandbox, body)
        metadata["labels"] = {_CLAIM_UID: claim["metadata"]["uid"]}
        return await self._create_sandbox(namespace, {"name": name, **metadata}, spec)

    # A SandboxWarmPool.

    async def _warm_pool(self, pool: Object) -> None:
        namespace, name = _key(pool)
        members = [
            each
            for each in self._store.owned_by("sandboxes", pool)
            if not each["metadata"].get("deletionTimestamp")
        ]
        wanted = pool["spec"]["replicas"]
        try:
            spec = self._blueprint(pool)
        except Refused:
            return
        label = {_WARM_POOL: hashlib.sha256(name.encode()).hexdigest()[:8]}
        metadata = {
            "generateName": f"{name}-",
            "labels": label,
            "ownerReferences": [_reference(pool, EXTENSIONS, "SandboxWarmPool")],
        }
        for _ in range(wanted - len(members)):
            members.append(await self._create_sandbox(namespace, metadata, copy.deepcopy(spec)))
        for each in members[wanted:]:
            await self._store.delete("sandboxes", each)
        status = {
            "replicas": len(members[:wanted]),
            "readyReplicas": sum(map(_is_ready, members[:wanted])),
            "selector": f"{_WARM_POOL}={label[_WARM_POOL]}",
            "observedGeneration": pool["metadata"]["generation"],
        }
        await self._store.set_status("sandboxwarmpools", pool, status)

    def _blueprint(self, pool: Object) -> Object:
        """What the Sandboxes of a pool are made from."""
        name = pool["spec"]["sandboxTemplateRef"]["name"]
        template = self._store.get("sandboxtemplates", _key(pool)[0], name)
        if template is None:
            raise Refused("TemplateNotFound", f'SandboxTemplate "{name}" not found')
        made: Object = copy.deepcopy({"podTemplate": template["spec"]["podTemplate"]})
        made["podTemplate"]["spec"].setdefault("automountServiceAccountToken", False)
        return made

    async def _create_sandbox(self, namespace: str, metadata: Object, spec: Object) -> Object:
        body = {"apiVersion": CORE, "kind": "Sandbox", "metadata": metadata, "spec": spec}
        return await self._store.create("sandboxes", namespace, body)


def _readiness(pod: Object) -> Object:
    """Whether a Sandbox with this Pod is ready."""
    status = pod.get("status", {})
    phase = status.get("phase", "Pending")
    if phase in ("Succeeded", "Failed"):
        return _condition("Ready", f"Pod{phase}", f"Pod {phase.lower()}")
    is_ready = any(
        each["type"] == "Ready" and each["status"] == "True"
        for each in status.get("conditions") or ()
    )
    if phase == "Running" and is_ready and status.get("podIPs"):
        return _condition("Ready", "DependenciesReady", "Pod is Ready", is_so=True)
    return _condition("Ready", "DependenciesNotReady", f"Pod exists with phase: {phase}")


def _condition(kind: str, reason: str, message: str, *, is_so: bool = False) -> Object:
    return {"type": kind, "status": str(is_so), "reason": reason, "message": message}


def _is_ready(sandbox: Object) -> bool:
    return any(
        each["type"] == "Ready" and each["status"] == "True"
        for each in sandbox.get("status", {}).get("conditions") or ()
    )


def _own(labels: dict[str, str] | None) -> dict[str, str]:
    """Those labels or annotations of a template that a Pod gets."""
    return {key: value for key, value in (labels or {}).items() if not key.startswith(_SYSTEM)}


def _reference(owner: Object, version: str, kind: str) -> Object:
    metadata = owner["metadata"]
    return {
        "apiVersion": version,
        "kind": kind,
        "name": metadata["name"],
        "uid": metadata["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }


def _owner_uid(found: Object) -> str:
    for each in found["metadata"].get("ownerReferences") or ():
        if each.get("controller"):
            return str(each["uid"])
    return ""


def _key(found: Object) -> Key:
    return found["metadata"]["namespace"], found["metadata"]["name"]


def _version(found: Object) -> int:
    return int(found["metadata"]["resourceVersion"])


def _path(kind: str, found: Object) -> str:
    namespace, name = _key(found)
    return f"/{GROUPS[kind]}/namespaces/{namespace}/{kind}/{name}"


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


async def run(options: argparse.Namespace) -> None:
    context = ssl.create_default_context(cafile=options.authority)
    context.load_cert_chain(options.identity)
    api = Api(options.api, context)
    store = Store(api)
    try:
        async with asyncio.TaskGroup() as group:
            for kind in GROUPS:
                group.create_task(store.follow(kind))
            group.create_task(Controllers(store).run())
    finally:
        await api.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    for name in ("api", "authority", "identity"):
        parser.add_argument(f"--{name}", required=True)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
