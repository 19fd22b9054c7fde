"""An installation from deploy/kubernetes runs code on a cluster, records it, and ends."""

from __future__ import annotations

import copy
import http.client
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import require
from tests.support.kubernetes import Cluster
from tests.support.manifests import (
    CONTROL,
    SANDBOXES,
    Object,
    applied,
    build,
    find,
    for_version_1_20,
    kubectl,
    templates_of_pods,
)
from tests.support.processes import ROOT, free_port
from tests.support.service_images import ServiceImage
from tests.support.servers import Servers
from tests.support.waiting import wait_until

# A busy machine has two cores for three services, their first start and their sandboxes.
SECONDS = 300


@dataclass(frozen=True)
class Installation:
    """The running service: who asks the API server, where the web server listens, and a key."""

    cluster: Cluster
    admin: Path
    port: int
    key: str

    def call(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Status and answer of a request, as a proxy passes it on."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=SECONDS)
        headers = {"Host": "127.0.0.1", "X-Forwarded-Proto": "https", "X-API-Key": self.key}
        content = None if body is None else json.dumps(body)
        if content:
            headers["Content-Type"] = "application/json"
        connection.request(method, path, content, headers)
        answer = connection.getresponse()
        found = answer.status, json.loads(answer.read() or b"null")
        connection.close()
        return found

    def pods(self, namespace: str, component: str = "") -> list[Object]:
        path = f"/api/v1/namespaces/{namespace}/pods"
        if component:
            path += f"?labelSelector=app.kubernetes.io%2Fcomponent%3D{component}"
        found: list[Object] = self.cluster.request("GET", path)["items"]
        return found

    def run(self, component: str, *command: str) -> str:
        """What a command prints in the first Pod of a component."""
        from kubernetes.client import CoreV1Api
        from kubernetes.stream import stream

        (pod, *_) = self.pods(CONTROL, component)
        core = self.cluster.objects(CoreV1Api)
        output: str = stream(
            core.connect_get_namespaced_pod_exec,
            pod["metadata"]["name"],
            CONTROL,
            command=list(command),
            stdout=True,
            stderr=True,
        )
        return output


def _on_this_machine(objects: list[Object], port: int, pool_port: int, storage: Path) -> list[Object]:
    """The same without what the virtual nodes do not have, which is a network of Pods: all Pods
    share the machine's, so each port is there once. The storage is a folder of the machine."""
    changed = copy.deepcopy(objects)
    settings = find(changed, "ConfigMap", "settings")["data"]
    pool_settings = find(changed, "ConfigMap", "pool-settings")["data"]
    address = f"pool-0.pool:{pool_port}"
    settings |= {
        "PORT": str(port),
        "POOL_PORT": str(pool_port),
        "PROVIDER_ALLOWED_NETWORKS": address,
        "PROVIDER_PLAIN_HTTP": address,
        "TRUSTED_PROXIES": "127.0.0.1",
        "STORAGE_URL": str(storage),
        "DISK_RESERVE_MIB": "0",
    }
    del settings["STORAGE_ACCESS_KEY_FILE"], settings["STORAGE_SECRET_KEY_FILE"]
    pool_settings["POOL_PORT"] = str(pool_port)
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


def _secret(folder: Path, servers: Servers, database_url: str) -> Object:
    """The Secret that the page's command makes, with the addresses of this test."""
    subprocess.run(
        [ROOT / "deploy/make-secrets", folder, str(os.getgid())], check=True, cwd=folder.parent
    )
    (folder / "database_url").write_text(database_url)
    (folder / "redis_url").write_text(servers.environment["REDIS_URL"])
    names = re.findall(
        r"--from-file=secrets/(\w+)", (ROOT / "docs/deployment/kubernetes.md").read_text()
    )
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": CONTROL, "namespace": CONTROL},
        "stringData": {name: (folder / name).read_text() for name in names},
    }


@pytest.fixture(scope="module")
def storage() -> Iterator[Path]:
    """A folder that the user of the images may write to."""
    folder = Path("/var/tmp") / f"cofferdam-storage-{os.getpid()}"
    folder.mkdir(mode=0o700)
    shutil.chown(folder, 10001, 10001)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def installation(
    cluster: Cluster,
    service_images: dict[str, ServiceImage],
    servers: Servers,
    postgres_url: str,
    storage: Path,
    tmp_path: Path,
) -> Iterator[Installation]:
    """Web, worker and pool of the manifests, set up and ready."""
    require("openssl")
    for name, image in service_images.items():
        cluster.provide_image(name, image.root, image.config)
    admin = cluster.kubeconfig(tmp_path / "admin.yaml")
    port, pool_port = free_port(), free_port()
    objects = _on_this_machine(for_version_1_20(build()), port, pool_port, storage)
    secret = _secret(tmp_path / "secrets", servers, postgres_url)
    spaces = [each for each in objects if each["kind"] == "Namespace"]
    others = [each for each in objects if each["kind"] != "Namespace"]
    with applied(admin, spaces), applied(admin, [secret, *others]):
        installed = Installation(cluster, admin, port, "")
        wait_until(lambda: _is_set_up(installed), SECONDS)
        (job,) = installed.pods(CONTROL, "setup")
        said = kubectl(admin, "logs", "--namespace", CONTROL, job["metadata"]["name"])
        (key,) = re.findall(r"API_KEY=(\S+)", said)
        for component in ("pool", "web", "worker"):
            wait_until(lambda each=component: _are_ready(installed, each), SECONDS)
        yield Installation(cluster, admin, port, key)


def _is_set_up(installed: Installation) -> bool:
    job = installed.cluster.request("GET", f"/apis/batch/v1/namespaces/{CONTROL}/jobs/setup")
    return bool(job["status"].get("succeeded"))


def _are_ready(installed: Installation, component: str) -> bool:
    pods = installed.pods(CONTROL, component)
    return bool(pods) and all(_is_ready(pod) for pod in pods)


def _is_ready(pod: Object) -> bool:
    conditions = {each["type"]: each["status"] for each in pod["status"].get("conditions", [])}
    return conditions.get("Ready") == "True"


def _sandboxes(installed: Installation) -> set[str]:
    return {pod["metadata"]["name"] for pod in installed.pods(SANDBOXES)}


def test_an_installation_runs_code_in_pods_and_records_it(installation: Installation) -> None:
    status, ran = installation.call("POST", "/api/v1/executions", {"code": "print(6 * 7)"})
    assert (status, ran.get("stdout")) == (200, "42\n"), ran
    assert ran["provider"] == "self_managed"
    assert _sandboxes(installation)

    status, queued = installation.call(
        "POST", "/api/v1/executions", {"code": "print(1)", "mode": "async"}
    )
    assert status == 202, queued
    path = f"/api/v1/executions/{queued['id']}"
    wait_until(lambda: installation.call("GET", path)[1]["status"] == "succeeded", SECONDS)

    status, session = installation.call("POST", "/api/v1/sessions", {})
    assert status == 201, session
    cells = f"/api/v1/sessions/{session['id']}/executions"
    for code, printed in (("x = 41", ""), ("print(x + 1)", "42\n")):
        status, ran = installation.call("POST", cells, {"code": code})
        assert (status, ran.get("stdout")) == (200, printed), ran

    assert "Intact: " in installation.run("worker", "/usr/local/bin/cofferdam", "verify_ledger")
