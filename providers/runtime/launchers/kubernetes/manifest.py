"""The Pod of a sandbox, and what of a Pod says that it is as we made it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

from kubernetes.utils.quantity import parse_quantity

from providers.runtime.launchers.container_guest import ALONE_SECONDS, Image, guest_command
from providers.runtime.pool.hardening import Hardening
from providers.runtime.pool.template import WORKSPACE, Template
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
EPHEMERAL_BYTES = 1 << 30
# Nothing of ours lasts as long: the last guard, where neither pool nor guest ends it.
GUARD_SECONDS = 31 * 24 * 3600


def command_of(image: Image, template: Template, hardening: Hardening) -> list[str]:
    """Return the command of the first process of a sandbox's Pod."""
    argument = template.guest_argument(
        workspace=WORKSPACE,
        # The limit of a container may end the whole of it, and says so late.
        watch_memory=True,
        uid=hardening.program_uid,
        alone_seconds=ALONE_SECONDS,
    )
    return guest_command(image, argument)


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


# What of a Pod and of its container must be as in the manifest, and what no sandbox has.
_EQUAL = (
    *("automountServiceAccountToken", "dnsConfig", "dnsPolicy", "enableServiceLinks", "hostname"),
    *("restartPolicy", "runtimeClassName", "securityContext", "terminationGracePeriodSeconds"),
)
_ABSENT = (
    *("ephemeralContainers", "hostAliases", "hostIPC", "hostNetwork", "hostPID", "initContainers"),
    *("setHostnameAsFQDN", "shareProcessNamespace", "subdomain"),
)
_EQUAL_IN_CONTAINER = ("image", "name", "stdin", "workingDir")
_ABSENT_IN_CONTAINER = (
    *("args", "envFrom", "lifecycle", "livenessProbe", "readinessProbe", "startupProbe"),
    *("tty", "volumeDevices"),
)
_USER = ("runAsUser", "runAsGroup")


def differences(pod: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """Return the fields in which a Pod is not as a manifest of `pod_manifest` wants it.

    It may have another user than the manifest, if neither is root.
    """
    spec, wanted_spec = pod["spec"], wanted["spec"]
    found = [f"spec.{name}" for name in _EQUAL if spec.get(name) != wanted_spec.get(name)]
    found += [f"spec.{name}" for name in _ABSENT if spec.get(name)]
    if len(spec["containers"]) != 1:
        return [*found, "spec.containers"]
    container, wanted_container = spec["containers"][0], wanted_spec["containers"][0]
    of_container = [
        *(n for n in _EQUAL_IN_CONTAINER if container.get(n) != wanted_container.get(n)),
        *(n for n in _ABSENT_IN_CONTAINER if container.get(n)),
        # What is false is left out by the API server.
        *(n for n in ("stdinOnce",) if bool(container.get(n)) != bool(wanted_container.get(n))),
        *_differences_of_command(container.get("command") or [], wanted_container["command"]),
        *_differences_of_security(
            container.get("securityContext") or {}, wanted_container["securityContext"]
        ),
    ]
    variables, wanted_variables = (
        {each["name"]: {**each, "name": ""} for each in one.get("env") or ()}
        for one in (container, wanted_container)
    )
    if variables != wanted_variables:
        of_container.append("env")
    if _amounts(container.get("resources") or {}) != _amounts(wanted_container["resources"]):
        of_container.append("resources")
    if _folders(spec) != _folders(wanted_spec):
        found.append("spec.volumes")
    return [*found, *(f"spec.containers[0].{name}" for name in of_container)]


def _differences_of_command(command: list[str], wanted: list[str]) -> list[str]:
    """Name the parts of the guest's argument, which is long and the last one."""
    if command == wanted:
        return []
    if len(command) != len(wanted) or command[:-1] != wanted[:-1]:
        return ["command"]
    try:
        argument, wanted_argument = json.loads(command[-1]), json.loads(wanted[-1])
        names = sorted({*argument, *wanted_argument})
        return [
            f"command.{name}" for name in names if argument.get(name) != wanted_argument.get(name)
        ]
    except (ValueError, TypeError, AttributeError):
        return ["command"]


def _differences_of_security(
    security: Mapping[str, Any], wanted: Mapping[str, Any]
) -> Iterator[str]:
    for name in sorted({*security, *wanted}):
        has, needs = security.get(name), wanted.get(name)
        if name == "capabilities":
            has = {key: sorted((has or {}).get(key) or ()) for key in ("add", "drop")}
            needs = {key: sorted(wanted[name][key]) for key in ("add", "drop")}
        is_another_user = name in _USER and (has or 0) > 0 and (needs or 0) > 0
        if has != needs and not is_another_user:
            yield f"securityContext.{name}"


def _amounts(resources: Mapping[str, Any]) -> dict[str, dict[str, Decimal]]:
    """Return requests and limits as numbers: the API server may write them in another way."""
    return {
        kind: {name: _quantity(each) for name, each in (resources.get(kind) or {}).items()}
        for kind in ("limits", "requests")
    }


def _quantity(text: str) -> Decimal:
    quantity: Decimal = parse_quantity(text)  # type: ignore[no-untyped-call]
    return quantity


def _folders(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return the volumes by the path of their mounts, and those without a mount by their names."""
    volumes = {each["name"]: {**each, "name": ""} for each in spec.get("volumes") or ()}
    for each in volumes.values():
        if size := (each.get("emptyDir") or {}).get("sizeLimit"):
            each["emptyDir"] = {**each["emptyDir"], "sizeLimit": _quantity(size)}
    mounts = spec["containers"][0].get("volumeMounts") or ()
    mounted = {each["name"] for each in mounts}
    return {
        **{name: each for name, each in volumes.items() if name not in mounted},
        **{each["mountPath"]: ({**each, "name": ""}, volumes.get(each["name"])) for each in mounts},
    }
