"""A namespace for sandboxes, and pools whose processes end and start again, on other machines too."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from providers.errors import SandboxError
from providers.runtime.pool.state_store import StateStore
from providers.sandbox import KeptSandbox
from providers.self_managed.provider import SelfManagedProvider
from providers.values import SandboxSpec
from tests.support.kubernetes import Cluster
from tests.support.kubernetes_pods import (
    POD_SETTINGS,
    Pods,
    over_kubernetes,
    pods_of,
    prepared_namespace,
)
from tests.support.pool_service import PoolService, provider_of
from tests.support.processes import free_port

OWNER = "providers.runtime.launchers.kubernetes.owner"
# A pool that was killed is not waited for as long as it would be.
SHORT_LEASE = {f"{OWNER}.LEASE_SECONDS": 10, f"{OWNER}.RENEW_SECONDS": 1.0}
# With it the notes at Pods are sealed.
TOKEN = "token-of-the-pool-service"


class NamedPool:
    """A pool of one name, whose processes run on one machine after the other."""

    def __init__(self, cluster: Cluster, folder: Path, namespace: str, **config: Any) -> None:
        self.cluster, self.namespace = cluster, namespace
        self.port = free_port()
        self.held = ExitStack()
        self.pool: PoolService
        self._folder = folder
        self._machines = itertools.count()
        self.start()
        self.provider: SelfManagedProvider = self.held.enter_context(
            provider_of(
                self.pool.url,
                token=TOKEN,
                pool_size=1,
                max_sandboxes=12,
                **POD_SETTINGS,
                queue_timeout=120,
                **config,
            )
        )

    def start(self, machine: Path | None = None, **extra: str) -> None:
        """Start its process on another machine, which has a data directory of its own, or on one
        where it was before."""
        self.machine = machine or self._folder / f"machine-{next(self._machines)}"
        self.machine.mkdir(exist_ok=True)
        self.pool = self.held.enter_context(
            over_kubernetes(
                self.cluster,
                self.machine,
                namespace=self.namespace,
                port=self.port,
                constants=SHORT_LEASE,
                POOL_NAME="shared",
                POOL_TOKEN=TOKEN,
                SHUTDOWN_GRACE_SECONDS="0",
                **extra,
            )
        )

    def stop(self, number: signal.Signals) -> None:
        process = self.pool.service.process
        process.send_signal(number)
        process.wait(60)

    def lease_at(self, machine: Path) -> float:
        """The seconds that are left of the only lease that a machine knows of."""
        (remembered,) = StateStore(machine / "data", "shared").all()
        return remembered.left

    def holder(self) -> str:
        """Which process has the pool's name."""
        leases = f"/apis/coordination.k8s.io/v1/namespaces/{self.namespace}/leases"
        lease = self.cluster.request("GET", f"{leases}/cofferdam-shared")
        return str(lease["spec"].get("holderIdentity") or "")

    def keep(self, owner: str = "alice", **spec: Any) -> KeptSandbox:
        sandbox = self.provider.open(SandboxSpec(kept=True, **spec), owner)
        assert isinstance(sandbox, KeptSandbox)
        return sandbox

    def pods(self) -> list[dict[str, Any]]:
        path = f"/api/v1/namespaces/{self.namespace}/pods"
        found: list[dict[str, Any]] = self.cluster.request("GET", path)["items"]
        return found

    def pod_of(self, sandbox: KeptSandbox) -> dict[str, Any]:
        """The Pod that a kept sandbox is in: the only one with a record."""
        (found,) = [
            pod
            for pod in self.pods()
            if "cofferdam.record" in pod["metadata"].get("annotations", {})
        ]
        return found

    def delete(self, pod: dict[str, Any]) -> None:
        path = f"/api/v1/namespaces/{self.namespace}/pods/{pod['metadata']['name']}"
        self.cluster.request("DELETE", path, {"gracePeriodSeconds": 0})


@pytest.fixture
def named_pool(cluster: Cluster, tmp_path: Path) -> Iterator[NamedPool]:
    opened = NamedPool(cluster, tmp_path, prepared_namespace(cluster))
    with opened.held:
        yield opened


@pytest.fixture(scope="module")
def pods(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pods]:
    """Sandboxes of a launcher in this process."""
    with pods_of(cluster, tmp_path_factory.mktemp("pods")) as opened:
        yield opened


@pytest.fixture
def closed_afterwards() -> Iterator[list[KeptSandbox]]:
    """The kept sandboxes in it are closed at the end."""
    found: list[KeptSandbox] = []
    yield found
    for each in found:
        with suppress(SandboxError):
            each.close()
