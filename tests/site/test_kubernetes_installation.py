"""An installation by the commands of docs/deployment/kubernetes.md runs code on a cluster."""

from __future__ import annotations

import copy
import http.client
import json
import os
import re
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import require
from tests.support.deployment_pages import PAGES, blocks_of
from tests.support.kubernetes import Cluster
from tests.support.manifests import (
    CONTROL,
    SANDBOXES,
    Object,
    breaks_of_restricted,
    build,
    delete,
    find,
    for_version_1_20,
    templates_of_pods,
    written,
)
from tests.support.processes import ROOT, free_port
from tests.support.servers import Servers
from tests.support.service_images import ServiceImage
from tests.support.waiting import wait_until

# Three services start on two cores, which other tests use too.
SECONDS = 300
APPLY = "kubectl apply --kustomize overlay"


@dataclass(frozen=True)
class Installation:
    """A running service: its cluster, the port of its web server, and an API key."""

    cluster: Cluster
    port: int
    key: str

    def call(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Status and answer of a request, as a proxy passes it on."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=SECONDS)
        headers = {"X-Forwarded-Proto": "https", "X-API-Key": self.key}
        content = None if body is None else json.dumps(body)
        if content:
            headers["Content-Type"] = "application/json"
        connection.request(method, path, content, headers)
        answer = connection.getresponse()
        found = answer.status, json.loads(answer.read() or b"null")
        connection.close()
        return found

    def run(self, component: str, *command: str) -> str:
        """What a command prints in a Pod of a component."""
        from kubernetes.client import CoreV1Api
        from kubernetes.stream import stream

        (pod, *_) = pods_of(self.cluster, CONTROL, component)
        output: str = stream(
            self.cluster.objects(CoreV1Api).connect_get_namespaced_pod_exec,
            pod["metadata"]["name"],
            CONTROL,
            command=list(command),
            stdout=True,
            stderr=True,
        )
        return output


def pods_of(cluster: Cluster, namespace: str, component: str = "") -> list[Object]:
    path = f"/api/v1/namespaces/{namespace}/pods"
    if component:
        path += f"?labelSelector=app.kubernetes.io%2Fcomponent%3D{component}"
    found: list[Object] = cluster.request("GET", path)["items"]
    return found


def blocks() -> list[str]:
    """The blocks of the page that are run: secrets, overlay, and what applies it."""
    found = [each.text for each in blocks_of(PAGES / "kubernetes.md") if not each.reason]
    assert len(found) == 3
    assert APPLY in found[2]
    return found


def on_this_machine(
    objects: list[Object], port: int, pool_port: int, storage: Path
) -> list[Object]:
    """The same without what the virtual nodes do not have, which is a network of Pods: all Pods
    share the machine's, so each port is there once. The storage is a folder of the machine."""
    changed = copy.deepcopy(objects)
    settings = find(changed, "ConfigMap", "settings")["data"]
    address = f"pool-0.pool:{pool_port}"
    settings |= {
        "PORT": str(port),
        "POOL_PORT": str(pool_port),
        "PROVIDER_ALLOWED_NETWORKS": address,
        "PROVIDER_PLAIN_HTTP": address,
        "TRUSTED_PROXIES": "127.0.0.1",
        "STORAGE_URL": str(storage),
    }
    del settings["STORAGE_ACCESS_KEY_FILE"], settings["STORAGE_SECRET_KEY_FILE"]
    find(changed, "ConfigMap", "pool-settings")["data"]["POOL_PORT"] = str(pool_port)
    find(changed, "Deployment", "web")["spec"]["replicas"] = 1
    names = {"ip": "127.0.0.1", "hostnames": ["pool-0.pool"]}
    for name, template in templates_of_pods(changed).items():
        spec = template["spec"]
        spec |= {"hostNetwork": True, "hostAliases": [names]}
        spec["volumes"].append({"name": "storage", "hostPath": {"path": str(storage)}})
        for container in (*spec.get("initContainers", []), *spec["containers"]):
            container["volumeMounts"].append({"name": "storage", "mountPath": str(storage)})
            for each in container.get("ports", []):
                each["containerPort"] = pool_port if name == "pool" else port
    return changed


@pytest.fixture(scope="module")
def storage() -> Iterator[Path]:
    """A folder of the user that the images have."""
    folder = Path("/var/tmp") / f"cofferdam-storage-{os.getpid()}"
    folder.mkdir(mode=0o700)
    shutil.chown(folder, 10001, 10001)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def database_url(servers: Servers) -> Iterator[str]:
    """An empty database, which is dropped with the installation."""
    name = f"t{uuid.uuid4().hex[:16]}"
    servers.run_sql(f"CREATE DATABASE {name}")
    yield servers.database_url(name)
    servers.run_sql(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture(scope="module")
def installation(
    cluster: Cluster,
    service_images: dict[str, ServiceImage],
    servers: Servers,
    database_url: str,
    storage: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Installation]:
    """What the commands of the page make: web, worker and pool, set up and ready."""
    require("openssl")
    folder = tmp_path_factory.mktemp("installation")
    kubeconfig = cluster.kubeconfig(folder / "admin.yaml")
    for name, image in service_images.items():
        cluster.provide_image(f"registry.example/{name}:1", image.root, image.config)
    (folder / "deploy").symlink_to(ROOT / "deploy")
    secrets, overlay, apply = blocks()
    for there, here in (
        ("postgres://cofferdam:PASSWORD@postgres.example:5432/cofferdam", database_url),
        ("redis://:PASSWORD@redis.example:6379/0", servers.environment["REDIS_URL"]),
    ):
        assert there in secrets
        secrets = secrets.replace(there, here)
    port, pool_port = free_port(), free_port()
    try:
        run(f"{secrets}\n{overlay}", folder, kubeconfig)
        objects = for_version_1_20(build(folder / "overlay"))
        objects = on_this_machine(objects, port, pool_port, storage)
        (folder / "objects.yaml").write_text(written(objects))
        try:
            said = run(
                apply.replace(APPLY, "kubectl apply --filename objects.yaml"), folder, kubeconfig
            )
        except AssertionError as error:
            raise AssertionError(f"{error}\n{state_of(cluster, kubeconfig)}") from None
        (key,) = re.findall(r"API_KEY=(\S+)", said)
        yield Installation(cluster, port, key)
    finally:
        end(cluster, kubeconfig)


def end(cluster: Cluster, kubeconfig: Path) -> None:
    """Delete the namespaces after their Pods: for Pods with a long grace they would wait minutes."""
    objects = for_version_1_20(build())
    delete(kubeconfig, [each for each in objects if each["kind"] != "Namespace"])
    wait_until(lambda: not pods_of(cluster, CONTROL), SECONDS)
    delete(kubeconfig, [each for each in objects if each["kind"] == "Namespace"])


def run(script: str, folder: Path, kubeconfig: Path) -> str:
    """What the commands print. One that fails fails the test."""
    done = subprocess.run(
        ["bash", "-ec", script],
        cwd=folder,
        env={"PATH": os.environ["PATH"], "HOME": str(folder), "KUBECONFIG": str(kubeconfig)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def state_of(cluster: Cluster, kubeconfig: Path) -> str:
    """What a reader needs of an installation that does not start."""
    found = []
    for pod in pods_of(cluster, CONTROL):
        name, status = pod["metadata"]["name"], pod["status"]
        found.append(f"== {name}: {json.dumps(status)}")
        for each in pod["spec"].get("initContainers", []) + pod["spec"]["containers"]:
            logs = ["logs", "--namespace", CONTROL, name, "--container", each["name"]]
            done = subprocess.run(
                [require("kubectl"), "--kubeconfig", str(kubeconfig), *logs],
                capture_output=True,
                text=True,
            )
            found.append(f"-- {each['name']}: {(done.stdout + done.stderr)[-3000:]}")
    return "\n".join(found)


# The images are built for the first test, and the installation is made for the second: each test has
# ten minutes, which a busy machine needs.


def test_both_images_are_built_for_an_unprivileged_user(
    service_images: dict[str, ServiceImage],
) -> None:
    assert {image.config["User"] for image in service_images.values()} == {"10001:10001"}
    packages = {
        name: {path.name for path in image.root.glob("opt/cofferdam/.venv/lib/*/site-packages/*")}
        for name, image in service_images.items()
    }
    assert "django" in packages["cofferdam/service"]
    assert "django" not in packages["cofferdam/pool"]
    assert "kubernetes" in packages["cofferdam/pool"]
    for image in service_images.values():
        assert not list(image.root.glob("opt/cofferdam/wheels/*"))


def test_code_runs_in_pods_at_once_and_from_the_queue(installation: Installation) -> None:
    status, ran = installation.call("POST", "/api/v1/executions", {"code": "print(6 * 7)"})
    assert (status, ran.get("stdout")) == (200, "42\n"), ran
    assert ran["provider"] == "self_managed"
    sandboxes = pods_of(installation.cluster, SANDBOXES)
    assert sandboxes
    for pod in sandboxes:
        assert breaks_of_restricted(pod["spec"]) == []
        assert pod["spec"]["containers"][0]["image"].startswith("registry.example/cofferdam/")

    asked = {"code": "print(1)", "mode": "async"}
    status, queued = installation.call("POST", "/api/v1/executions", asked)
    assert status == 202, queued
    path = f"/api/v1/executions/{queued['id']}"
    going = ("queued", "running")
    wait_until(lambda: installation.call("GET", path)[1]["status"] not in going, SECONDS)
    _, ended = installation.call("GET", path)
    assert (ended["status"], ended["stdout"]) == ("succeeded", "1\n"), ended


def test_a_session_continues_after_a_restart_of_the_pool(installation: Installation) -> None:
    status, session = installation.call("POST", "/api/v1/sessions", {})
    assert status == 201, session
    cells = f"/api/v1/sessions/{session['id']}/executions"
    status, ran = installation.call("POST", cells, {"code": "x = 41"})
    assert status == 200, ran
    restart_pool(installation)
    status, ran = installation.call("POST", cells, {"code": "print(x + 1)"})
    assert (status, ran.get("stdout")) == (200, "42\n"), ran


def test_what_was_recorded_is_intact(installation: Installation) -> None:
    status, ran = installation.call("POST", "/api/v1/executions", {"code": "print(1)"})
    assert status == 200, ran
    assert "Intact: " in installation.run("worker", "/usr/local/bin/cofferdam", "verify_ledger")


def restart_pool(installation: Installation) -> None:
    """Delete the pool's Pod, and wait for the one in its place."""
    cluster = installation.cluster
    path = f"/api/v1/namespaces/{CONTROL}/pods/pool-0"
    former = cluster.request("DELETE", path)["metadata"]["uid"]

    def is_another() -> bool:
        pods = pods_of(cluster, CONTROL, "pool")
        return any(pod["metadata"]["uid"] != former and is_ready(pod) for pod in pods)

    wait_until(is_another, SECONDS)


def is_ready(pod: Object) -> bool:
    conditions = {each["type"]: each["status"] for each in pod["status"].get("conditions", [])}
    return conditions.get("Ready") == "True"
