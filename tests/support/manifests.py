"""deploy/kubernetes as kubectl builds it, and as the API server of the tests takes it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.support.processes import ROOT
from tests.support.required import require

MANIFESTS = ROOT / "deploy" / "kubernetes"
CONTROL = "cofferdam"
SANDBOXES = "cofferdam-sandboxes"

Object = dict[str, Any]


def build(folder: Path = MANIFESTS) -> list[Object]:
    """The objects of a kustomization, in the order in which they are applied."""
    if _minor_of_kubectl() < 21:
        _name_bases(folder / "kustomization.yaml")
    done = subprocess.run(
        [require("kubectl"), "kustomize", str(folder)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return read(done.stdout)


def _minor_of_kubectl() -> int:
    version = [require("kubectl"), "version", "--client", "--output", "json"]
    done = subprocess.run(version, capture_output=True, text=True, check=True)
    return int(json.loads(done.stdout)["clientVersion"]["minor"].rstrip("+"))


def _name_bases(path: Path) -> None:
    """The kustomize of kubectl 1.20 takes folders as `bases` alone, where a later one takes them as
    `resources`."""
    described = yaml.safe_load(path.read_text())
    folders = [each for each in described["resources"] if (path.parent / each).is_dir()]
    if folders:
        files = [each for each in described["resources"] if each not in folders]
        path.write_text(yaml.safe_dump(described | {"resources": files, "bases": folders}))


def read(text: str) -> list[Object]:
    return [found for found in yaml.safe_load_all(text) if found]


def written(objects: Iterable[Object]) -> str:
    """The same as YAML, for kubectl."""
    return yaml.safe_dump_all(objects, sort_keys=False)


def for_version_1_20(objects: Iterable[Object]) -> list[Object]:
    """The same for the API server of the tests: policy/v1 came with 1.21, and 1.25 has no v1beta1.
    The fields are the same."""
    return [
        found | {"apiVersion": "policy/v1beta1"} if found["apiVersion"] == "policy/v1" else found
        for found in objects
    ]


def find(objects: Iterable[Object], kind: str, name: str, namespace: str = CONTROL) -> Object:
    """One object. A name that was generated is found by what it begins with."""
    (found,) = (
        each
        for each in objects
        if each["kind"] == kind
        and each["metadata"].get("namespace", namespace) == namespace
        and (each["metadata"]["name"] == name or _is_generated(each, name))
    )
    return found


def _is_generated(found: Object, name: str) -> bool:
    prefix, _, digest = found["metadata"]["name"].rpartition("-")
    return found["kind"] == "ConfigMap" and prefix == name and len(digest) == 10


def templates_of_pods(objects: Iterable[Object]) -> dict[str, Object]:
    """What Pods are made from, by the name of the Deployment, StatefulSet or Job."""
    return {
        each["metadata"]["name"]: each["spec"]["template"]
        for each in objects
        if each["kind"] in ("Deployment", "StatefulSet", "Job")
    }


def containers_of(template: Mapping[str, Any]) -> Iterator[Object]:
    yield from template["spec"].get("initContainers", [])
    yield from template["spec"]["containers"]


# What a container may have in addition to its user's rights, by the Pod security standard `baseline`.
_BASELINE = {
    *("AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "MKNOD", "SETFCAP"),
    *("NET_BIND_SERVICE", "SETGID", "SETPCAP", "SETUID", "SYS_CHROOT"),
}
_VOLUMES = {
    *("configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim"),
    *("projected", "secret"),
}


def breaks_of_baseline(spec: Mapping[str, Any]) -> list[str]:
    """What the Pod security standard `baseline` refuses in a Pod's spec. The API server of the tests
    is older than the admission of these standards."""
    found = [name for name in ("hostNetwork", "hostPID", "hostIPC") if spec.get(name)]
    found += [each["name"] for each in spec.get("volumes", []) if "hostPath" in each]
    if spec.get("securityContext", {}).get("sysctls"):
        found.append("sysctls")
    for container in [*spec.get("initContainers", []), *spec["containers"]]:
        own, name = container.get("securityContext", {}), container["name"]
        if own.get("privileged"):
            found.append(f"{name}: privileged")
        if set(own.get("capabilities", {}).get("add") or ()) - _BASELINE:
            found.append(f"{name}: capabilities.add")
        if (own.get("seccompProfile") or {}).get("type") == "Unconfined":
            found.append(f"{name}: seccompProfile")
        if own.get("procMount", "Default") != "Default":
            found.append(f"{name}: procMount")
        if any(port.get("hostPort") for port in container.get("ports", [])):
            found.append(f"{name}: hostPort")
    return found


def breaks_of_restricted(spec: Mapping[str, Any]) -> list[str]:
    """What the Pod security standard `restricted` refuses in a Pod's spec."""
    found = breaks_of_baseline(spec)
    pod = spec.get("securityContext", {})
    for volume in spec.get("volumes", []):
        found += [f"volume {kind}" for kind in volume.keys() - {"name"} - _VOLUMES]
    for container in [*spec.get("initContainers", []), *spec["containers"]]:
        own, name = container.get("securityContext", {}), container["name"]
        both = {**pod, **own}
        if own.get("allowPrivilegeEscalation") is not False:
            found.append(f"{name}: allowPrivilegeEscalation")
        if own.get("capabilities", {}).get("drop") != ["ALL"]:
            found.append(f"{name}: capabilities.drop")
        if set(own.get("capabilities", {}).get("add") or ()) - {"NET_BIND_SERVICE"}:
            found.append(f"{name}: capabilities.add of restricted")
        if both.get("runAsNonRoot") is not True or both.get("runAsUser") == 0:
            found.append(f"{name}: runAsNonRoot")
        if both.get("seccompProfile", {}).get("type") not in ("RuntimeDefault", "Localhost"):
            found.append(f"{name}: seccompProfile of restricted")
    return found


def kubectl(kubeconfig: Path, *arguments: str, objects: Iterable[Object] = ()) -> str:
    """What kubectl prints as this user, with the objects as its input. A failure fails the test."""
    done = subprocess.run(
        [require("kubectl"), "--kubeconfig", str(kubeconfig), *arguments],
        capture_output=True,
        text=True,
        input=written(objects),
    )
    assert done.returncode == 0, f"kubectl {' '.join(arguments)}: {done.stdout}{done.stderr}"
    return done.stdout


@contextmanager
def applied(kubeconfig: Path, objects: Sequence[Object]) -> Iterator[None]:
    """Create the objects, and delete them at the end, with all that lies in their namespaces."""
    try:
        kubectl(kubeconfig, "apply", "--filename", "-", objects=objects)
        yield
    finally:
        delete(kubeconfig, objects)


def delete(kubeconfig: Path, objects: Sequence[Object]) -> None:
    """Delete the objects that are there, and wait for their end."""
    options = ("--ignore-not-found", "--timeout=300s", "--filename", "-")
    kubectl(kubeconfig, "delete", *options, objects=objects)
