"""The Pod of a sandbox, and what of a Pod says that it is as we made it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from providers.runtime.pool.hardening import Hardening
from providers.runtime.pool.template import WORKSPACE
from providers.values import SandboxLimits

CONTAINER = "sandbox"
APP_LABEL = "app.kubernetes.io/name"
APP = "cofferdam-sandbox"
POOL_LABEL = "cofferdam.pool"
TENANT_LABEL = "cofferdam.tenant"
LEASE_LABEL = "cofferdam.lease"
RECORD_ANNOTATION = "cofferdam.record"

# For the supervisor itself. It counts the program's memory, and ends it at the template's limit:
# the kernel's limit, which may end the whole container, comes after it.
EXTRA_MEMORY = 64 << 20
# The writable files of a Pod outside its volumes, such as the message of its end.
EPHEMERAL_BYTES = 64 << 20
# Nothing of ours lasts as long: the last guard, where neither pool nor guest ends it.
GUARD_SECONDS = 31 * 24 * 3600


def pod_manifest(
    name: str,
    *,
    image: str,
    command: list[str],
    environment: list[str],
    limits: SandboxLimits,
    hardening: Hardening,
    user: int,
    runtime_class: str,
    pull_secret: str,
    labels: Mapping[str, str],
    owner: Mapping[str, Any],
    stays_open: bool = True,
) -> dict[str, Any]:
    """Return the manifest of a sandbox's Pod.

    `owner` is a reference to the object with which the Pod is removed. `environment` has lines
    `NAME=value`. Without `stays_open` the container's input ends with the first connection to it.
    """
    settings = hardening.settings
    memory = limits.memory_bytes + settings["extra_memory"] + EXTRA_MEMORY
    resources = {
        "cpu": str(int(settings["cpus"] * 1000)) + "m",
        "memory": str(memory),
        "ephemeral-storage": str(EPHEMERAL_BYTES),
    }
    places = {"workspace": WORKSPACE, "tmp": "/tmp", "shm": "/dev/shm"}
    container = {
        "name": CONTAINER,
        "image": image,
        "command": command,
        "workingDir": WORKSPACE,
        "env": [
            dict(zip(("name", "value"), line.split("=", 1), strict=True)) for line in environment
        ],
        "stdin": True,
        "stdinOnce": not stays_open,
        "resources": {"limits": resources, "requests": resources},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "privileged": settings["privileged"],
            "readOnlyRootFilesystem": settings["read_only"],
            "runAsUser": user,
            "runAsGroup": user,
            "runAsNonRoot": user != 0,
            "capabilities": {"drop": settings["cap_drop"], "add": settings["cap_add"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "volumeMounts": [{"name": volume, "mountPath": path} for volume, path in places.items()],
    }
    spec = {
        "containers": [container],
        "volumes": [
            {
                "name": volume,
                "emptyDir": {"medium": "Memory", "sizeLimit": str(limits.workspace_bytes)},
            }
            for volume in places
        ],
        "restartPolicy": "Never",
        "activeDeadlineSeconds": GUARD_SECONDS,
        "terminationGracePeriodSeconds": 0,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "hostname": settings["hostname"],
        # Without it the cluster's name servers show inside.
        "dnsPolicy": "None",
        "dnsConfig": {"nameservers": settings["dns"]},
        "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
        **({"runtimeClassName": runtime_class} if runtime_class else {}),
        **({"imagePullSecrets": [{"name": pull_secret}]} if pull_secret else {}),
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "labels": {APP_LABEL: APP, **labels},
            "ownerReferences": [dict(owner)],
        },
        "spec": spec,
    }


# What of a container and of a Pod says how much it may do, and what runs in it.
_CONTAINER = (
    *("command", "args", "env", "envFrom", "image", "lifecycle", "livenessProbe", "ports"),
    *("resources", "securityContext", "stdin", "stdinOnce", "tty", "volumeDevices", "workingDir"),
)
_POD = (
    *("automountServiceAccountToken", "hostIPC", "hostNetwork", "hostPID", "hostUsers", "volumes"),
    *("initContainers", "ephemeralContainers", "runtimeClassName", "securityContext"),
    *("serviceAccountName", "shareProcessNamespace"),
)


def shape_of(pod: Mapping[str, Any]) -> str:
    """Return a digest of what a Pod may do and of what runs in it, as the API server has it."""
    spec = pod["spec"]
    shape = {
        "uid": pod["metadata"]["uid"],
        "pod": {name: spec.get(name) for name in _POD},
        "containers": [
            {
                **{name: each.get(name) for name in _CONTAINER},
                "mounts": each.get("volumeMounts"),
            }
            for each in spec["containers"]
        ],
    }
    return hashlib.sha256(json.dumps(shape, sort_keys=True).encode()).hexdigest()
