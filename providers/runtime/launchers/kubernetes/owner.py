"""Whose a Pod is: the pool's Lease, and the search for Pods that are no longer needed.

The Lease `cofferdam-POOL` is the lock of the pool's name, over all machines, and the owner of its
Pods and SandboxClaims: with it, or with their namespace, the cluster removes them. The Lease of a
pool that has ended stays, so that kept sandboxes are found again; what is left of a pool whose
Lease was not renewed for long is removed by the other pools of the namespace.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import secrets
import socket
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from providers import process_liveness
from providers.errors import ProviderUnavailable
from providers.runtime.launchers.kubernetes.api import (
    MERGE,
    Api,
    ApiFailure,
    Object,
    error_of,
)
from providers.runtime.launchers.kubernetes.cache import ClaimCache, PodCache
from providers.runtime.launchers.kubernetes.checks import require_closed_network
from providers.runtime.launchers.kubernetes.manifest import POOL_LABEL
from providers.runtime.launchers.kubernetes.notes import Notes, container_of
from providers.runtime.pool.state_store import StateStore

logger = logging.getLogger(__name__)

# As in client-go's leader election: how long a Lease holds, and how often it is renewed.
LEASE_SECONDS, RENEW_SECONDS = 30, 10.0
# How often orphans are looked for, and for how long a pool that is gone may be started again.
REAP_SECONDS = 15.0
ABSENT_SECONDS = 900.0
_CONFLICT, _MISSING = 409, 404

# The names of the Pods of this process by namespace and pool: a process has several launchers
# while settings change.
_known: dict[tuple[str, str], set[str]] = {}
# What another process has written into a Lease last, and when that was seen here: as in client-go,
# no clock of another machine counts.
_seen: dict[tuple[str, str], tuple[tuple[str, str], float]] = {}
# Until when this process has the name of a pool, in seconds since the machine's boot: it stands
# still where the machine does, and the Lease does not.
_held_until: defaultdict[tuple[str, str], float] = defaultdict(float)
# How many launchers of this process need the name of a pool.
_open: Counter[tuple[str, str]] = Counter()
# This process counts a Lease as over after this part of its time.
_SAFE_PART = 0.8


class Owner:
    """One launcher's hold on the name of its pool, and on its Pods."""

    def __init__(
        self,
        api: Api,
        pool: str,
        cache: PodCache,
        claims: ClaimCache,
        memory: StateStore | None,
        notes: Notes,
    ) -> None:
        self._api, self.pool, self._memory, self._notes = api, pool, memory, notes
        self._cache, self._claims = cache, claims
        self._holder = _identity()
        self._mine: set[str] = set()
        self._prefix = f"cofferdam-{secrets.token_hex(4)}"
        self._numbers = itertools.count(1)
        self._lease: Object = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._is_open = False
        # Why no sandbox may be started now, empty where they may.
        self.obstacle = ""
        # Called when another process has got the name.
        self.at_loss: Callable[[], None] = lambda: None

    @property
    def is_holder(self) -> bool:
        """Whether no other process can have the name, whatever is wrong with the API server: a
        Lease that cannot be renewed is over for this process before it is for others."""
        return _now() < _held_until[self._key]

    @property
    def labels(self) -> dict[str, str]:
        """The labels by which the pool's Pods are found."""
        return {POOL_LABEL: self.pool}

    @property
    def reference(self) -> Mapping[str, Any]:
        """The reference to the object with which the Pods are removed."""
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "name": self._name,
            "uid": self._lease["metadata"]["uid"],
        }

    async def take(self) -> None:
        """Take the pool's name. Raises ProviderUnavailable while another process has it."""
        try:
            await self._take()
        except ApiFailure as error:
            raise error_of(error, "use leases") from error
        if not self._is_open:
            self._is_open = True
            _open[self._key] += 1
            self._tasks = [
                asyncio.ensure_future(self._renew()),
                asyncio.ensure_future(self._reap_again()),
            ]

    def new_name(self) -> str:
        """Return the name of a Pod or a claim that is about to be made."""
        name = f"{self._prefix}-{next(self._numbers)}"
        self.know(name)
        return name

    def know(self, name: str) -> None:
        """A Pod or a claim of this name is in use."""
        self._mine.add(name)
        self._names.add(name)

    def forget(self, name: str) -> None:
        """A Pod or a claim of this name is an orphan if it is still there."""
        self._mine.discard(name)
        self._names.discard(name)

    def require_name(self) -> None:
        """Raise ProviderUnavailable where another process has the pool's name by now."""
        if not self.is_holder:
            raise ProviderUnavailable(
                f"POOL_NAME: This pool service does not hold the Lease of the name {self.pool!r}: "
                "another one has it, or the API server does not answer."
            )
        if self.obstacle:
            raise ProviderUnavailable(self.obstacle)

    async def remove(self, path: str, found: Object) -> bool:
        """Remove an object. Return whether it is to be gone.

        One that is gone, or another one of its name, is no error.
        A process that has lost the name removes nothing: what it has made is the next one's, which
        keeps or removes it. Raises ApiFailure.
        """
        metadata = found["metadata"]
        if not self.is_holder:
            return False
        body = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "gracePeriodSeconds": 0,
            "preconditions": {"uid": metadata["uid"]},
        }
        try:
            await self._api.call("DELETE", f"{path}/{metadata['name']}", body)
        except ApiFailure as error:
            if error.status not in (_MISSING, _CONFLICT):
                raise
        return True

    async def reap(self) -> int:
        """Remove the Pods and claims that are no longer needed. Return how many. Raises
        ApiFailure."""
        absent = await self._absent_pools()
        # The Pod of a claim ends with the claim; one that is not claimed yet is the warm pool's.
        pods = [pod for pod in self._cache if not sandbox_of(pod)]
        orphans = [(self._api.pods, pod) for pod in pods if self._is_orphan(pod, pod, absent)]
        for claim in self._claims:
            if self._is_orphan(claim, self._cache.get(bound_sandbox(claim)), absent):
                orphans.append((self._api.claims, claim))
        for path, orphan in orphans:
            logger.warning("removing an orphan", extra={"orphan": orphan["metadata"]["name"]})
            try:
                await self.remove(path, orphan)
            except ApiFailure as error:
                # One that cannot be removed now must not keep the others; it is tried again.
                logger.warning("orphan not removed", extra={"reason": str(error)})
        return len(orphans)

    def close(self) -> None:
        """Let go of the name. What is left of this launcher's Pods is an orphan."""
        for task in self._tasks:
            task.cancel()
        self._names.difference_update(self._mine)
        self._mine.clear()
        if self._is_open:
            self._is_open = False
            _open[self._key] -= 1

    async def release(self) -> None:
        """Let another process have the pool's name at once, where no launcher here needs it."""
        if self.is_holder and not _open[self._key]:
            _held_until[self._key] = 0.0
            with contextlib.suppress(ApiFailure):
                await self._write({"holderIdentity": ""})

    @property
    def _name(self) -> str:
        return f"cofferdam-{self.pool}"

    @property
    def _key(self) -> tuple[str, str]:
        return self._api.namespace, self.pool

    @property
    def _names(self) -> set[str]:
        return _known.setdefault(self._key, set())

    @property
    def _leases(self) -> str:
        return f"/apis/coordination.k8s.io/v1/namespaces/{self._api.namespace}/leases"

    async def _take(self) -> None:
        began = _now()
        found = await self._read(self._name)
        if found is None:
            body = {
                "apiVersion": "coordination.k8s.io/v1",
                "kind": "Lease",
                "metadata": {"name": self._name},
                "spec": self._spec(),
            }
            try:
                self._lease = await self._api.call("POST", self._leases, body)
                _held_until[self._key] = began + LEASE_SECONDS * _SAFE_PART
                return
            except ApiFailure as error:
                if error.status != _CONFLICT:
                    raise
            found = await self._read(self._name) or {"metadata": {}, "spec": {}}
        self._lease = found
        spec = found.get("spec") or {}
        holder = spec.get("holderIdentity") or ""
        if holder not in ("", self._holder):
            _held_until[self._key] = 0.0
        elif holder and began < self._renewed_at + RENEW_SECONDS / 2:
            # Another launcher of this process has renewed it just now.
            return
        if holder not in ("", self._holder) and self._is_renewed(spec):
            self.at_loss()
            raise ProviderUnavailable(
                f"POOL_NAME: Another pool service, {holder}, has the name {self.pool!r} in the "
                f"namespace {self._api.namespace}. Give each pool service its own name, or wait "
                f"{LEASE_SECONDS} s after its end.",
            )
        await self._write(self._spec())
        _held_until[self._key] = began + LEASE_SECONDS * _SAFE_PART

    @property
    def _renewed_at(self) -> float:
        """When this process renewed the Lease last, in seconds since the machine's boot."""
        return _held_until[self._key] - LEASE_SECONDS * _SAFE_PART

    def _is_renewed(self, spec: Mapping[str, Any]) -> bool:
        """Whether another process may have renewed the Lease less than LEASE_SECONDS ago."""
        return self._unchanged_seconds(self.pool, spec) < LEASE_SECONDS

    def _unchanged_seconds(self, pool: str, spec: Mapping[str, Any]) -> float:
        """Return for how long a Lease is as it was seen here at first."""
        written = str(spec.get("holderIdentity")), str(spec.get("renewTime"))
        known, since = _seen.get((self._api.namespace, pool), (("", ""), 0.0))
        if known != written:
            since = time.monotonic()
            _seen[self._api.namespace, pool] = written, since
        return time.monotonic() - since

    async def _read(self, name: str) -> Object | None:
        try:
            return await self._api.call("GET", f"{self._leases}/{name}")
        except ApiFailure as error:
            if error.status == _MISSING:
                return None
            raise

    async def _write(self, spec: Mapping[str, Any]) -> None:
        """Change the Lease, if it is as it was read. Raises ApiFailure."""
        version = self._lease["metadata"].get("resourceVersion", "")
        body = {"metadata": {"resourceVersion": version}, "spec": dict(spec)}
        self._lease = await self._api.call(
            "PATCH", f"{self._leases}/{self._name}", body, content_type=MERGE
        )

    def _spec(self) -> dict[str, Any]:
        return {
            "holderIdentity": self._holder,
            "leaseDurationSeconds": LEASE_SECONDS,
            "renewTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        }

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(RENEW_SECONDS)
            try:
                await self._take()
            except Exception as error:
                # Whatever is wrong now, the next time it may not be.
                logger.warning("the pool's Lease was not renewed: %s", error)

    async def _reap_again(self) -> None:
        while True:
            await asyncio.sleep(REAP_SECONDS)
            try:
                self.obstacle = await self._find_obstacle()
                await self.reap()
            except Exception as error:
                logger.warning("cannot look for orphans: %s", error)

    async def _find_obstacle(self) -> str:
        try:
            await require_closed_network(self._api, self.labels)
        except ProviderUnavailable as error:
            return error.message
        return ""

    async def _absent_pools(self) -> set[str]:
        """Return the other pools that have Pods or claims here, and are gone for long."""
        pools = {_pool_of(each) for each in (*self._cache, *self._claims)} - {"", self.pool}
        absent = set()
        for pool in pools:
            try:
                lease = await self._read(f"cofferdam-{pool}") or {}
            except ApiFailure as error:
                logger.warning("cannot read the Lease of %s: %s", pool, error)
                continue
            if self._unchanged_seconds(pool, lease.get("spec") or {}) > ABSENT_SECONDS:
                absent.add(pool)
        return absent

    def _is_orphan(self, found: Object, pod: Object | None, absent: set[str]) -> bool:
        """Whether a Pod or a claim is no longer needed; `pod` is its Pod, where it has one."""
        metadata = found["metadata"]
        if metadata.get("deletionTimestamp"):
            return False
        if _pool_of(found) == self.pool:
            return self.is_holder and metadata["name"] not in self._names and not self._is_kept(pod)
        return _pool_of(found) in absent

    def _is_kept(self, pod: Object | None) -> bool:
        """Whether a predecessor has left it, to be found again."""
        if self._memory is None or pod is None or pod["status"].get("phase") != "Running":
            return False
        known = [self._memory.of_container(container_of(pod))]
        if not self._memory.is_restored:
            known.append(self._notes.read(pod))
        return any(each is not None and not each.is_over for each in known)


def sandbox_of(pod: Object) -> str:
    """Return the name of agent-sandbox's Sandbox that has made a Pod, empty for a plain Pod."""
    for each in pod["metadata"].get("ownerReferences") or ():
        if each["kind"] == "Sandbox" and each.get("controller"):
            return str(each["name"])
    return ""


def bound_sandbox(claim: Object) -> str:
    """Return the name of the Sandbox that a claim has got, empty before."""
    sandbox = (claim.get("status") or {}).get("sandbox") or {}
    return str(sandbox.get("name") or "")


def _pool_of(found: Object) -> str:
    pool: str = found["metadata"].get("labels", {}).get(POOL_LABEL, "")
    return pool


def _now() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _identity() -> str:
    birth = process_liveness.birth(os.getpid())
    return f"{socket.gethostname()}/{os.getpid()}/{birth}"
