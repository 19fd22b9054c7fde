"""The API server takes deploy/kubernetes as it is, and gives the pool what it needs and no more."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from providers.runtime.launchers.kubernetes import checks
from tests.support.kubernetes import Cluster
from tests.support.manifests import (
    CONTROL,
    MANIFESTS,
    SANDBOXES,
    Object,
    applied,
    build,
    for_version_1_20,
    kubectl,
    read,
)
from tests.support.processes import ROOT

PAGE = (ROOT / "docs/deployment/kubernetes.md").read_text(encoding="utf-8")
# What the page has kubectl apply from its own text.
IN_PAGE = re.compile(r"^ *kubectl apply --filename - << 'YAML'\n(.*?)^ *YAML$", re.M | re.S)
RIGHTS = {"Namespace", "ServiceAccount", "Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding"}
# What every user may ask about itself.
OWN = {
    ("create", "authorization.k8s.io", f"selfsubject{kind}reviews") for kind in ("access", "rules")
}


@pytest.fixture(scope="module")
def objects() -> list[Object]:
    return for_version_1_20(build())


@pytest.fixture(scope="module")
def admin(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cluster.kubeconfig(tmp_path_factory.mktemp("admin") / "admin.yaml")


@pytest.fixture(scope="module")
def rights(admin: Path, objects: list[Object]) -> Iterator[None]:
    """Namespaces, accounts and roles of the manifests are there."""
    with applied(admin, [each for each in objects if each["kind"] in RIGHTS]):
        yield


@pytest.fixture(scope="module")
def pool(cluster: Cluster, rights: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kubeconfig of the pool's service account."""
    folder = tmp_path_factory.mktemp("pool")
    return cluster.kubeconfig_of(folder / "pool.yaml", "pool", CONTROL)


def test_the_api_server_takes_every_object(
    admin: Path, rights: None, objects: list[Object]
) -> None:
    others = [read((MANIFESTS / "claims.yaml").read_text()), *map(read, IN_PAGE.findall(PAGE))]
    more = [each for found in others for each in found]
    assert {"RuntimeClass", "Ingress"} <= {each["kind"] for each in more}
    taken = kubectl(
        admin, "apply", "--dry-run=server", "--validate=true", "--filename", "-",
        objects=[*objects, *more],
    ).splitlines()  # fmt: skip
    assert len(taken) == len(objects) + len(more)
    assert all(line.endswith("(server dry run)") for line in taken)


def _rights_in(kubeconfig: Path, namespace: str) -> set[tuple[str, str, str]]:
    """Verb, group and resource of all that a user may do there."""
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectRulesReview",
        "spec": {"namespace": namespace},
    }
    answer = kubectl(kubeconfig, "create", "--output", "json", "--filename", "-", objects=[review])
    status = json.loads(answer)["status"]
    assert not status["incomplete"]
    return {
        (verb, group, resource)
        for rule in status["resourceRules"]
        for verb in rule["verbs"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }


def test_the_pool_may_do_what_it_needs_and_no_more(pool: Path) -> None:
    needed = {
        (verb, group, f"{resource}/{subresource}" if subresource else resource)
        for group, resource, subresource, verbs in checks._RIGHTS
        for verb in verbs
    }
    everywhere = {("list", "node.k8s.io", "runtimeclasses"), *OWN}
    assert _rights_in(pool, SANDBOXES) == needed | everywhere
    for namespace in (CONTROL, "default", "kube-system"):
        assert _rights_in(pool, namespace) == everywhere


def test_web_and_worker_may_do_nothing(cluster: Cluster, rights: None, tmp_path: Path) -> None:
    service = cluster.kubeconfig_of(tmp_path / "service.yaml", "service", CONTROL)
    for namespace in (CONTROL, SANDBOXES, "kube-system"):
        assert _rights_in(service, namespace) == OWN


# The client takes an object as JSON has it, whatever it declares.
POD: Any = {
    "metadata": {"name": "one"},
    "spec": {"containers": [{"name": "one", "image": "one"}]},
}
TOKEN: Any = {"spec": {}}


def test_calls_of_the_pool_are_answered_where_it_has_the_right(
    cluster: Cluster, pool: Path, rights: None
) -> None:
    from kubernetes.client import CoreV1Api, NodeV1Api
    from kubernetes.client.exceptions import ApiException

    core = cluster.objects(CoreV1Api, pool)
    core.create_namespaced_pod(SANDBOXES, POD, dry_run="All")
    core.list_namespaced_pod(SANDBOXES)
    cluster.objects(NodeV1Api, pool).list_runtime_class()

    refused: dict[str, Any] = {
        "secrets of the service": lambda: core.read_namespaced_secret(CONTROL, CONTROL),
        "secrets beside the sandboxes": lambda: core.list_namespaced_secret(SANDBOXES),
        "settings": lambda: core.list_namespaced_config_map(CONTROL),
        "Pods of the service": lambda: core.create_namespaced_pod(CONTROL, POD, dry_run="All"),
        "its own Pod": lambda: core.delete_namespaced_pod("pool-0", CONTROL),
        "Pods of others": lambda: core.list_pod_for_all_namespaces(),
        "nodes": lambda: core.list_node(),
        "commands in sandboxes": lambda: core.connect_get_namespaced_pod_exec("one", SANDBOXES),
        "ways into sandboxes": lambda: core.connect_get_namespaced_pod_portforward(
            "one", SANDBOXES
        ),
        "the quota": lambda: core.delete_namespaced_resource_quota("sandboxes", SANDBOXES),
        "the namespace": lambda: core.delete_namespace(SANDBOXES),
        "tokens": lambda: core.create_namespaced_service_account_token("default", SANDBOXES, TOKEN),
    }
    for name, call in refused.items():
        with pytest.raises(ApiException) as raised:
            call()
        assert raised.value.status == 403, name
