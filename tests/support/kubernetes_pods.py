"""Sandboxes in the Pods of the cluster of the tests: a launcher in a loop of its own."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from providers.runtime.launchers.kubernetes import KubernetesLauncher, KubernetesSettings
from providers.runtime.launchers.kubernetes.manifest import APP, APP_LABEL
from providers.runtime.pool.background import BackgroundLoop
from tests.support.kubernetes import Cluster
from tests.support.launcher_loop import LauncherLoop
from tests.support.pool_service import PoolService, manage
from tests.support.processes import ROOT, clean_environment, free_port, started

# The nodes of the tests show a Pod of any image this machine's programs.
IMAGES = {"python": "sandbox"}
# Whichever RuntimeClasses other tests have made in the cluster.
RUNTIME = "runc"
POD_SETTINGS = {
    "base_python_image": "sandbox",
    "base_nodejs_image": "sandbox",
    "runtime": RUNTIME,
}
CLOSED_NETWORK = {
    "apiVersion": "networking.k8s.io/v1",
    "kind": "NetworkPolicy",
    "metadata": {"name": "sandboxes"},
    "spec": {
        "podSelector": {"matchLabels": {APP_LABEL: APP}},
        "policyTypes": ["Ingress", "Egress"],
    },
}

RIGHTS = [
    {
        "apiGroups": [""],
        "resources": ["pods"],
        "verbs": ["get", "list", "watch", "create", "patch", "delete"],
    },
    {"apiGroups": [""], "resources": ["pods/attach"], "verbs": ["create", "get"]},
    {
        "apiGroups": ["coordination.k8s.io"],
        "resources": ["leases"],
        "verbs": ["get", "create", "patch"],
    },
    {"apiGroups": ["networking.k8s.io"], "resources": ["networkpolicies"], "verbs": ["list"]},
]
CLUSTER_RIGHTS = [
    {"apiGroups": ["node.k8s.io"], "resources": ["runtimeclasses"], "verbs": ["list"]}
]

_pools = itertools.count()


def new_pool() -> str:
    return f"pool-{os.getpid()}-{next(_pools)}"


def prepared_namespace(cluster: Cluster) -> str:
    """A namespace for sandboxes, whose network is closed."""
    name = cluster.namespace()
    policies = f"/apis/networking.k8s.io/v1/namespaces/{name}/networkpolicies"
    cluster.request("POST", policies, CLOSED_NETWORK)
    return name


class Pods(LauncherLoop):
    """A KubernetesLauncher in a loop of its own, and what it has in its namespace."""

    launcher: KubernetesLauncher
    seconds = 60.0

    def __init__(self, cluster: Cluster, kubeconfig: Path, **settings: Any) -> None:
        self.cluster = cluster
        self.settings = KubernetesSettings(
            **{
                "images": IMAGES,
                "runtime": RUNTIME,
                "pool": new_pool(),
                "kubeconfig": kubeconfig,
                **settings,
            }
        )
        self.loop = BackgroundLoop("kubernetes-tests")
        self.launcher = KubernetesLauncher(self.settings)
        try:
            self.loop.call(self.launcher.prepare())
        except BaseException:
            self.close()
            raise

    def present(self) -> list[dict[str, Any]]:
        """This namespace's Pods, whatever their state."""
        path = f"/api/v1/namespaces/{self.settings.namespace}/pods"
        found: list[dict[str, Any]] = self.cluster.request("GET", path)["items"]
        return found

    def close(self) -> None:
        async def close() -> None:
            self.launcher.close()
            await self.launcher.disconnect()

        self.loop.call(close())
        self.loop.stop()


@contextmanager
def pods_of(cluster: Cluster, folder: Path, **settings: Any) -> Iterator[Pods]:
    """Pods in a namespace of their own."""
    settings.setdefault("namespace", prepared_namespace(cluster))
    opened = Pods(cluster, cluster.kubeconfig(folder / "kubeconfig"), **settings)
    try:
        yield opened
    finally:
        opened.close()


@contextmanager
def over_kubernetes(
    cluster: Cluster,
    folder: Path,
    *,
    namespace: str,
    port: int | None = None,
    constants: Mapping[str, object] | None = None,
    **extra: str,
) -> Iterator[PoolService]:
    """`manage.py pool` with Pods in a namespace, healthy. It has the rights that it is to have."""
    port = port or free_port()
    environment = clean_environment(
        folder / "data",
        PORT=str(port),
        KUBERNETES_NAMESPACE=namespace,
        SANDBOX_BASE_PYTHON_IMAGE="sandbox",
        SANDBOX_BASE_NODEJS_IMAGE="sandbox",
        SANDBOX_EXECUTOR_MANAGER_POOL_SIZE="1",
        **{"KUBECONFIG": str(pool_account(cluster, namespace)), **extra},
    )
    command = [*manage(constants), "pool", "--launcher", "kubernetes", "--port", str(port)]
    with started(command, environment, ROOT, folder / f"log-{port}") as service:
        pool = PoolService(service, extra.get("POOL_TOKEN", ""), folder / "data")
        pool.wait_until_healthy()
        yield pool


def pool_account(
    cluster: Cluster, namespace: str, rights: list[dict[str, list[str]]] = RIGHTS
) -> Path:
    """The kubeconfig of a service account with the rights of a pool service, or with others."""
    path = cluster.folder / f"{namespace}-pool"
    if path.exists():
        return path
    account = {"metadata": {"name": "pool"}}
    roles = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}"
    cluster.request("POST", f"/api/v1/namespaces/{namespace}/serviceaccounts", account)
    subject = {"kind": "ServiceAccount", "name": "pool", "namespace": namespace}
    for where, kind, name, rules in (
        (roles, "Role", "pool", rights),
        ("/apis/rbac.authorization.k8s.io/v1", "ClusterRole", f"pool-{namespace}", CLUSTER_RIGHTS),
    ):
        role, binding = f"{kind.lower()}s", f"{kind.lower()}bindings"
        cluster.request("POST", f"{where}/{role}", {"metadata": {"name": name}, "rules": rules})
        cluster.request(
            "POST",
            f"{where}/{binding}",
            {
                "metadata": {"name": name},
                "subjects": [subject],
                "roleRef": {
                    "apiGroup": "rbac.authorization.k8s.io",
                    "kind": kind,
                    "name": name,
                },
            },
        )
    return cluster.kubeconfig_of(path, "pool", namespace)
