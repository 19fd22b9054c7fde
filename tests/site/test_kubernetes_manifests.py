"""deploy/kubernetes names what there is, leaves nothing open, and gives each part what it needs."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import yaml

from providers import draining
from providers.runtime.launchers.kubernetes.manifest import pod_manifest
from providers.runtime.pool.hardening import GVISOR, RUNC, Hardening
from providers.values import SandboxLimits
from sandbox_site import gunicorn_conf
from tests.support.manifests import (
    CONTROL,
    MANIFESTS,
    SANDBOXES,
    Object,
    breaks_of_baseline,
    breaks_of_restricted,
    build,
    containers_of,
    find,
    read,
    templates_of_pods,
)
from tests.support.processes import ROOT

PAGE = (ROOT / "docs/deployment/kubernetes.md").read_text(encoding="utf-8")
SETTINGS = (ROOT / "docs/settings.md").read_text(encoding="utf-8")
# Of the storage, which has a page of its own settings.
STORAGE = {"STORAGE_URL", "STORAGE_ACCESS_KEY", "STORAGE_SECRET_KEY"}
FOLDER = "/run/secrets/cofferdam/"


@pytest.fixture(scope="module")
def objects() -> list[Object]:
    return build()


@pytest.fixture(scope="module")
def pods(objects: list[Object]) -> dict[str, Object]:
    return templates_of_pods(objects)


def _settings(objects: list[Object], name: str) -> dict[str, str]:
    found: dict[str, str] = find(objects, "ConfigMap", name)["data"]
    return found


def test_every_file_is_part_of_the_base_but_the_one_for_claims() -> None:
    base = yaml.safe_load((MANIFESTS / "kustomization.yaml").read_text())
    files = {path.name for path in MANIFESTS.iterdir()} - {"kustomization.yaml"}
    assert files - set(base["resources"]) == {"claims.yaml"}


def test_every_setting_is_one_that_there_is(objects: list[Object], pods: dict[str, Object]) -> None:
    named = {*_settings(objects, "settings"), *_settings(objects, "pool-settings")}
    for template in pods.values():
        for container in containers_of(template):
            named |= {variable["name"] for variable in container.get("env", [])}
    named = {name.removesuffix("_FILE") for name in named} - STORAGE
    assert len(named) > 20
    for name in named:
        assert f"`{name}`" in SETTINGS, name


def test_a_changed_setting_replaces_the_pods(
    objects: list[Object], pods: dict[str, Object]
) -> None:
    generated = {
        name: find(objects, "ConfigMap", name)["metadata"]["name"]
        for name in ("settings", "pool-settings")
    }
    for name, template in pods.items():
        for container in containers_of(template):
            (source,) = container["envFrom"]
            expected = generated["pool-settings" if name == "pool" else "settings"]
            assert source["configMapRef"]["name"] == expected


def test_pods_are_closed_in(pods: dict[str, Object]) -> None:
    assert pods.keys() == {"setup", "web", "worker", "pool"}
    for name, template in pods.items():
        assert template["spec"]["enableServiceLinks"] is False
        for container in containers_of(template):
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
            assert container["image"] == f"cofferdam/{'pool' if name == 'pool' else 'service'}"
            assert container["resources"]["requests"].keys() == {"cpu", "memory"}
            assert "memory" in container["resources"]["limits"]


def _enforced(objects: list[Object], namespace: str) -> str:
    (found,) = (
        each["metadata"]
        for each in objects
        if each["kind"] == "Namespace" and each["metadata"]["name"] == namespace
    )
    level: str = found["labels"]["pod-security.kubernetes.io/enforce"]
    return level


def test_each_namespace_enforces_the_standard_that_its_pods_meet(
    objects: list[Object], pods: dict[str, Object]
) -> None:
    assert _enforced(objects, CONTROL) == "restricted"
    for name, template in pods.items():
        assert breaks_of_restricted(template["spec"]) == [], name
    assert _enforced(objects, SANDBOXES) == "baseline"
    assert breaks_of_restricted(_sandbox(RUNC)) == []
    assert breaks_of_baseline(_sandbox(GVISOR)) == []
    assert breaks_of_restricted(_sandbox(GVISOR)) != []


def _sandbox(runtime: str) -> dict[str, Any]:
    """The spec of a sandbox's Pod."""
    hardening = Hardening.of(runtime)
    spec: dict[str, Any] = pod_manifest(
        "one",
        image="one",
        command=["one"],
        environment=[],
        limits=SandboxLimits(),
        hardening=hardening,
        user=hardening.choose_user(maps_users=False),
        runtime_class="",
        pull_secret="",
        labels={},
        owner={},
    )["spec"]
    return spec


def test_the_pool_alone_has_a_token_of_the_api_server(
    objects: list[Object], pods: dict[str, Object]
) -> None:
    asking = {
        name for name, pod in pods.items() if pod["spec"]["automountServiceAccountToken"] is True
    }
    assert asking == {"pool"}
    accounts = [each for each in objects if each["kind"] == "ServiceAccount"]
    assert {each["metadata"]["name"] for each in accounts} == {"service", "pool"}
    assert all(each["automountServiceAccountToken"] is False for each in accounts)
    bound = [each for each in objects if each["kind"] in ("RoleBinding", "ClusterRoleBinding")]
    pool = {"kind": "ServiceAccount", "name": "pool", "namespace": CONTROL}
    assert [each["subjects"] for each in bound] == [[pool]] * 2


def _keys_of_secret(template: Object) -> set[str] | None:
    """Those that a Pod sees of the Secret, None for all."""
    (volume,) = (each for each in template["spec"]["volumes"] if "secret" in each)
    assert volume["secret"]["secretName"] == CONTROL
    items = volume["secret"].get("items")
    return None if items is None else {item["key"] for item in items}


def test_the_pool_sees_its_token_and_no_other_secret(pods: dict[str, Object]) -> None:
    seen = {name: _keys_of_secret(template) for name, template in pods.items()}
    assert seen == {"setup": None, "web": None, "worker": None, "pool": {"pool_token"}}


def test_the_command_of_the_page_makes_every_secret(
    objects: list[Object], pods: dict[str, Object]
) -> None:
    made = set(re.findall(r"--from-file=secrets/(\w+)", PAGE))
    read_from = {
        value.removeprefix(FOLDER)
        for name in ("settings", "pool-settings")
        for variable, value in _settings(objects, name).items()
        if variable.endswith("_FILE")
    }
    assert made == read_from
    for template in pods.values():
        for container in containers_of(template):
            (mount,) = (each for each in container["volumeMounts"] if each["name"] == "secrets")
            assert f"{mount['mountPath']}/" == FOLDER


def test_nothing_is_killed_before_its_time(objects: list[Object], pods: dict[str, Object]) -> None:
    end = math.ceil(draining.ENDING_SECONDS) + gunicorn_conf.EXIT_SECONDS
    for name in ("web", "worker", "pool"):
        given = _settings(objects, "pool-settings" if name == "pool" else "settings")
        delay = int(given.get("SHUTDOWN_DELAY_SECONDS", 0))
        needed = delay + int(given["SHUTDOWN_GRACE_SECONDS"]) + end
        assert pods[name]["spec"]["terminationGracePeriodSeconds"] > needed, name
        # A probe would end what is still to finish: the ports are closed by then.
        assert not any("livenessProbe" in each for each in containers_of(pods[name]))


def test_web_and_worker_wait_for_the_tables(pods: dict[str, Object]) -> None:
    for name in ("web", "worker"):
        (first,) = pods[name]["spec"]["initContainers"]
        assert first["command"][-1].endswith("exec cofferdam migrate --check")
    assert [each["args"] for each in containers_of(pods["setup"])] == [["bootstrap"]]


def test_the_pool_is_where_web_and_worker_look_for_it(
    objects: list[Object], pods: dict[str, Object]
) -> None:
    pool, service = find(objects, "StatefulSet", "pool"), find(objects, "Service", "pool")
    assert pool["spec"]["serviceName"] == service["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None"
    settings = _settings(objects, "settings")
    address = f"{settings['POOL_HOST']}:9385"
    assert address == f"{pool['metadata']['name']}-0.{service['metadata']['name']}:9385"
    assert settings["PROVIDER_ALLOWED_NETWORKS"] == settings["PROVIDER_PLAIN_HTTP"] == address
    assert _settings(objects, "pool-settings")["KUBERNETES_NAMESPACE"] == SANDBOXES
    for each in objects:
        if each["kind"] == "Service":
            _assert_selects(each["spec"]["selector"], pods)
        if each["kind"] == "PodDisruptionBudget":
            _assert_selects(each["spec"]["selector"]["matchLabels"], pods)


def _assert_selects(labels: dict[str, str], pods: dict[str, Object]) -> None:
    selected = [
        name
        for name, template in pods.items()
        if labels.items() <= template["metadata"]["labels"].items()
    ]
    assert selected == [labels["app.kubernetes.io/component"]]


def test_every_disruption_leaves_room_for_one(objects: list[Object]) -> None:
    """A budget that asks for one of one would hold every drain of a node."""
    budgets = {
        each["metadata"]["name"]: each["spec"]["maxUnavailable"]
        for each in objects
        if each["kind"] == "PodDisruptionBudget"
    }
    assert budgets == {"web": 1, "worker": 1, "pool": 1}


def _policy(objects: list[Object], name: str, namespace: str = CONTROL) -> dict[str, Any]:
    found: dict[str, Any] = find(objects, "NetworkPolicy", name, namespace)["spec"]
    return found


def test_sandboxes_have_no_network(objects: list[Object]) -> None:
    closed = {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    assert _policy(objects, "nothing", SANDBOXES) == closed
    assert _policy(objects, "nothing", CONTROL) == closed
    policies = [each for each in objects if each["kind"] == "NetworkPolicy"]
    assert [
        each["metadata"]["name"] for each in policies if each["metadata"]["namespace"] == SANDBOXES
    ] == ["nothing"]


def test_the_pool_is_reached_by_its_clients_alone(
    objects: list[Object], pods: dict[str, Object]
) -> None:
    (rule,) = _policy(objects, "pool")["ingress"]
    (source,) = rule["from"]
    assert source.keys() == {"podSelector"}
    (wanted,) = source["podSelector"]["matchExpressions"]
    assert set(wanted["values"]) == pods.keys() - {"pool"}
    assert [port["port"] for port in rule["ports"]] == [9385]
    web = _policy(objects, "web")["ingress"]
    assert [list(each) for each in web[0]["from"]] == [["namespaceSelector"]]


def test_no_pod_reaches_where_a_cloud_hands_out_credentials(objects: list[Object]) -> None:
    blocks = [
        target["ipBlock"]
        for name in ("service", "pool")
        for rule in _policy(objects, name)["egress"]
        for target in rule["to"]
        if "ipBlock" in target
    ]
    assert len(blocks) == 2
    assert all(block["except"] == ["169.254.0.0/16"] for block in blocks)


def test_rights_for_claims_are_in_a_file_of_their_own(objects: list[Object]) -> None:
    groups = {
        group
        for each in objects
        if each["kind"] in ("Role", "ClusterRole")
        for rule in each["rules"]
        for group in rule["apiGroups"]
    }
    assert groups == {"", "coordination.k8s.io", "networking.k8s.io", "node.k8s.io"}
    role, binding = read((MANIFESTS / "claims.yaml").read_text())
    assert {group for rule in role["rules"] for group in rule["apiGroups"]} == {
        "extensions.agents.x-k8s.io"
    }
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
