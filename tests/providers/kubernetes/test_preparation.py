"""A cluster that lacks something is refused, with what is missing and its remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from providers.errors import InvalidConfiguration, ProviderUnavailable, SandboxError
from providers.runtime.launchers.kubernetes.manifest import APP, APP_LABEL
from tests.support.kubernetes import Cluster
from tests.support.kubernetes_pods import (
    CLOSED_NETWORK,
    RIGHTS,
    Pods,
    new_pool,
    pods_of,
    pool_account,
    prepared_namespace,
)


@pytest.fixture(scope="module")
def namespace(cluster: Cluster) -> str:
    return prepared_namespace(cluster)


def refusal(cluster: Cluster, folder: Path, **settings: Any) -> SandboxError:
    """How the preparation of a launcher is refused."""
    kubeconfig = settings.pop("kubeconfig", None) or cluster.kubeconfig(folder / "kubeconfig")
    with pytest.raises(SandboxError) as raised:
        Pods(cluster, kubeconfig, **settings)
    return raised.value


@pytest.mark.parametrize("missing", ["attach", "watch", "leases"])
def test_rights_that_are_missing_are_named(cluster: Cluster, tmp_path: Path, missing: str) -> None:
    namespace = prepared_namespace(cluster)
    rights = {
        "attach": [each for each in RIGHTS if each["resources"] != ["pods/attach"]],
        "watch": [
            {**each, "verbs": [verb for verb in each["verbs"] if verb != "watch"]}
            for each in RIGHTS
        ],
        "leases": [each for each in RIGHTS if each["resources"] != ["leases"]],
    }[missing]
    named = {
        "attach": "pods/attach: create, get",
        "watch": "pods: watch",
        "leases": "leases: get, create, patch",
    }[missing]

    error = refusal(
        cluster,
        tmp_path,
        namespace=namespace,
        kubeconfig=pool_account(cluster, namespace, rights),
    )

    assert isinstance(error, ProviderUnavailable)
    assert f"lacks rights in the namespace {namespace}: {named}." in error.message
    assert "rbac.yaml" in error.message


def policy(**spec: Any) -> dict[str, Any]:
    return {**CLOSED_NETWORK, "spec": {**CLOSED_NETWORK["spec"], **spec}}


OPEN_NETWORKS = {
    "no policy": [],
    "one that closes one direction": [policy(policyTypes=["Egress"])],
    "one of other Pods": [policy(podSelector={"matchLabels": {"app": "other"}})],
    "one whose selection is not certain": [
        policy(podSelector={"matchExpressions": [{"key": "other", "operator": "DoesNotExist"}]})
    ],
    "one that allows traffic beside one that closes": [
        policy(),
        {
            **policy(podSelector={}, policyTypes=["Egress"], egress=[{}]),
            "metadata": {"name": "another"},
        },
    ],
}


@pytest.mark.parametrize("policies", OPEN_NETWORKS.values(), ids=OPEN_NETWORKS.keys())
def test_a_network_that_is_not_closed_is_refused(
    cluster: Cluster, tmp_path: Path, policies: list[dict[str, Any]]
) -> None:
    namespace = cluster.namespace()
    for each in policies:
        cluster.request(
            "POST", f"/apis/networking.k8s.io/v1/namespaces/{namespace}/networkpolicies", each
        )

    error = refusal(cluster, tmp_path, namespace=namespace)

    assert isinstance(error, ProviderUnavailable)
    assert "NetworkPolicy" in error.message
    assert "sandboxes-network.yaml" in error.message


def test_a_policy_for_all_pods_of_the_namespace_closes_the_network(
    cluster: Cluster, tmp_path: Path
) -> None:
    namespace = cluster.namespace()
    cluster.request(
        "POST",
        f"/apis/networking.k8s.io/v1/namespaces/{namespace}/networkpolicies",
        policy(podSelector={}),
    )
    with pods_of(cluster, tmp_path, namespace=namespace) as pods:
        assert pods.launcher.languages()


def test_a_runtime_class_that_is_missing_is_named(
    cluster: Cluster, tmp_path: Path, namespace: str
) -> None:
    error = refusal(cluster, tmp_path, namespace=namespace, runtime="kata")
    assert isinstance(error, ProviderUnavailable)
    assert (error.field, "'kata'" in error.message) == ("runtime", True)


def test_gvisor_that_is_required_is_proven_and_not_believed(
    cluster: Cluster, tmp_path: Path, namespace: str
) -> None:
    """The name of a class says nothing: what its Pods see of their kernel does."""
    cluster.runtime_class("pretended", "runc")
    error = refusal(
        cluster, tmp_path, namespace=namespace, runtime="pretended", require_gvisor=True
    )
    assert isinstance(error, ProviderUnavailable)
    assert "not in gVisor" in error.message


def test_the_name_of_a_pool_is_had_by_one_process(
    cluster: Cluster, tmp_path: Path, namespace: str
) -> None:
    pool = new_pool()
    with pods_of(cluster, tmp_path, namespace=namespace, pool=pool) as first:
        sandbox = first.start()
        leases = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/cofferdam-{pool}"
        lease = cluster.request("GET", leases)
        lease["spec"]["holderIdentity"] = "another/1/2"
        cluster.request("PUT", leases, lease)

        error = refusal(cluster, tmp_path, namespace=namespace, pool=pool)

        assert isinstance(error, ProviderUnavailable)
        assert "POOL_NAME: Another pool service, another/1/2, has the name" in error.message
        # What runs is left alone.
        assert first.run_in(sandbox, "print('on')").stdout == "on\n"
        first.loop.call(sandbox.destroy())


def test_a_kubeconfig_that_cannot_be_read_is_named(
    cluster: Cluster, tmp_path: Path, namespace: str
) -> None:
    broken = tmp_path / "broken"
    broken.write_text("clusters: none")
    error = refusal(cluster, tmp_path, namespace=namespace, kubeconfig=broken)
    assert isinstance(error, InvalidConfiguration)
    assert error.message.startswith("KUBECONFIG: The cluster cannot be used")


def test_what_is_left_of_a_pool_that_is_gone_is_removed_by_another(
    cluster: Cluster, tmp_path: Path, namespace: str, absent_for_long: None
) -> None:
    pod = {
        "metadata": {
            "name": "left-behind",
            "labels": {APP_LABEL: APP, "cofferdam.pool": "gone"},
        },
        "spec": {"containers": [{"name": "sandbox", "image": "any", "command": ["sleep", "1000"]}]},
    }
    cluster.request("POST", f"/api/v1/namespaces/{namespace}/pods", pod)
    with pods_of(cluster, tmp_path, namespace=namespace) as pods:
        assert [
            each["metadata"]["name"]
            for each in pods.present()
            if not each["metadata"].get("deletionTimestamp")
        ] == []


@pytest.fixture
def absent_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pool without a Lease is gone for long."""
    monkeypatch.setattr("providers.runtime.launchers.kubernetes.owner.ABSENT_SECONDS", -1.0)
