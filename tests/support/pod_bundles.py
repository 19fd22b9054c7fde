"""The bundle of the Open Container Initiative for a container of a Pod, as a kubelet makes it.

An image is a root that was unpacked; a name that is not known stands for this machine's programs.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from providers.runtime.launchers.seccomp import build_profile

# What containers have unless they drop it.
_CAPABILITIES = (
    *("CHOWN", "DAC_OVERRIDE", "FSETID", "FOWNER", "MKNOD", "NET_RAW", "SETGID", "SETUID"),
    *("SETFCAP", "SETPCAP", "NET_BIND_SERVICE", "SYS_CHROOT", "KILL", "AUDIT_WRITE"),
)
_ALL = (
    *(*_CAPABILITIES, "LINUX_IMMUTABLE", "NET_BROADCAST", "NET_ADMIN", "IPC_LOCK", "IPC_OWNER"),
    *("SYS_MODULE", "SYS_RAWIO", "SYS_PTRACE", "SYS_PACCT", "SYS_ADMIN", "SYS_BOOT", "SYS_NICE"),
    *("SYS_RESOURCE", "SYS_TIME", "SYS_TTY_CONFIG", "LEASE", "AUDIT_CONTROL", "SYSLOG"),
)
_MASKED = ("acpi", "asound", "kcore", "keys", "latency_stats", "sched_debug", "scsi", "timer_list")
_READ_ONLY = ("bus", "fs", "irq", "sys", "sysrq-trigger")

# Of this machine's /etc: what its programs need.
_SEEN_OF_ETC = ("alternatives", "ld.so.cache", "matplotlibrc", "python3", "python3.11", "ssl")
_NODE_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_NOBODY = 65534
PIDS = 1024

_UNITS = {
    "": 1,
    "k": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "Ki": 1 << 10,
    "Mi": 1 << 20,
    "Gi": 1 << 30,
    "Ti": 1 << 40,
}
_QUANTITY = re.compile(r"([0-9.]+)([a-zA-Z]*)")
_REFERENCE = re.compile(r"\$\$|\$\(([A-Za-z0-9_.-]+)\)")


class BadContainer(Exception):
    """A container that cannot be made: the reason in one word, as its status has it, and why."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class ImageRoot:
    """An unpacked image. `root` is None where it stands for this machine's programs."""

    root: Path | None = None
    config: Mapping[str, Any] = field(default_factory=dict)


def root_of(image: str, images: Path) -> ImageRoot:
    """Look an image up in the file `images`, an object of {"root": ..., "config": ...} by name.

    Raises BadContainer for an image of a registry that cannot be there.
    """
    known = json.loads(images.read_text()) if images.exists() else {}
    if image in known:
        return ImageRoot(Path(known[image]["root"]), known[image]["config"])
    if image.partition("/")[0].partition(":")[0].endswith(".invalid"):
        raise BadContainer("ErrImagePull", f"{image}: no such host")
    return ImageRoot()


def quantity(text: str | float) -> float:
    """Read a quantity of Kubernetes, such as "250m", "1.5", "64Mi"."""
    match = _QUANTITY.fullmatch(str(text))
    assert match, f"no quantity: {text}"
    if match[2] == "m":
        return float(match[1]) / 1000
    return float(match[1]) * _UNITS[match[2]]


@dataclass(frozen=True)
class Place:
    """Where the containers of a Pod are: its folder, the folder of each volume that is not in
    memory, its address, and the variables that it finds the API server by."""

    folder: Path
    volumes: Mapping[str, Path]
    images: Path
    variables: Mapping[str, str]


def write_bundle(
    folder: Path,
    pod: Mapping[str, Any],
    container: Mapping[str, Any],
    environment: Mapping[str, str],
    place: Place,
    cgroup: str,
) -> dict[str, Any]:
    """Write the bundle of a container into a new folder, and return the process in it.

    Raises BadContainer, OSError.
    """
    image = root_of(container["image"], place.images)
    security = dict(pod["spec"].get("securityContext") or {})
    security |= {
        key: value
        for key, value in (container.get("securityContext") or {}).items()
        if value is not None
    }
    hostname = pod["spec"].get("hostname") or pod["metadata"]["name"]
    process = _process(container, image, security, {**environment, "HOSTNAME": hostname})
    folder.mkdir(mode=0o711)
    root = image.root or _root_of_machine(folder)
    mounts = [*_usual_mounts(), *_machine_mounts(root) * (image.root is None)]
    mounts += _etc(folder, pod["spec"], hostname, process["user"]["uid"], image)
    mounts += _volumes(pod, container, place, security)
    if image.root is None:
        for each in mounts:
            _make_point(root, each)
    limits = (container.get("resources") or {}).get("limits") or {}
    namespaces = ["pid", "ipc", "uts", "mount", "cgroup"]
    if not pod["spec"].get("hostNetwork"):
        namespaces.append("network")
    linux: dict[str, Any] = {
        "namespaces": [{"type": kind} for kind in namespaces],
        "cgroupsPath": cgroup,
        "resources": {
            "devices": [{"allow": False, "access": "rwm"}],
            "pids": {"limit": PIDS},
            **({"cpu": _cpu(limits["cpu"])} if "cpu" in limits else {}),
        },
        "maskedPaths": [*(f"/proc/{name}" for name in _MASKED), "/sys/firmware"],
        "readonlyPaths": [f"/proc/{name}" for name in _READ_ONLY],
    }
    if (security.get("seccompProfile") or {}).get("type") == "RuntimeDefault":
        linux["seccomp"] = build_profile()
    described = {
        "ociVersion": "1.0.0",
        "hostname": hostname,
        "root": {"path": str(root), "readonly": bool(security.get("readOnlyRootFilesystem"))},
        "mounts": mounts,
        "process": process,
        "linux": linux,
    }
    (folder / "config.json").write_text(json.dumps(described))
    return process


def _process(
    container: Mapping[str, Any],
    image: ImageRoot,
    security: Mapping[str, Any],
    environment: Mapping[str, str],
) -> dict[str, Any]:
    command = container.get("command")
    arguments = container.get("args")
    if command is None:
        command = image.config.get("Entrypoint") or []
        if arguments is None:
            arguments = image.config.get("Cmd") or []
    own = dict(each.split("=", 1) for each in image.config.get("Env") or [])
    variables = {"PATH": _NODE_PATH, **own, **environment}
    words = [expand(word, environment) for word in [*command, *(arguments or [])]]
    if not words:
        raise BadContainer("CreateContainerError", "no command specified")
    uid = security.get("runAsUser")
    given = str(image.config.get("User") or "0").split(":")
    if uid is None:
        if not given[0].isdigit():
            if security.get("runAsNonRoot"):
                raise BadContainer(
                    "CreateContainerConfigError",
                    f"container has runAsNonRoot and image has non-numeric user ({given[0]})",
                )
            given = [str(_uid_of(given[0], image))]
        uid = int(given[0])
    if uid == 0 and security.get("runAsNonRoot"):
        raise BadContainer(
            "CreateContainerConfigError",
            "container has runAsNonRoot and image will run as root",
        )
    gid = security.get("runAsGroup")
    if gid is None:
        gid = int(given[1]) if len(given) > 1 and given[1].isdigit() else 0
    groups = [*(security.get("supplementalGroups") or [])]
    if security.get("fsGroup") is not None:
        groups.append(security["fsGroup"])
    kept = _kept_capabilities(security.get("capabilities") or {})
    return {
        "terminal": False,
        "cwd": container.get("workingDir") or image.config.get("WorkingDir") or "/",
        "user": {"uid": uid, "gid": gid, "additionalGids": groups},
        "args": words,
        "env": [f"{name}={value}" for name, value in variables.items()],
        "noNewPrivileges": security.get("allowPrivilegeEscalation") is False,
        "oomScoreAdj": 1000,
        "capabilities": {"bounding": kept, "effective": kept, "permitted": kept},
    }


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Replace $(NAME) by the variable where there is one, and $$ by one dollar."""

    def value(match: re.Match[str]) -> str:
        return "$" if match[1] is None else variables.get(match[1], match[0])

    return _REFERENCE.sub(value, text)


def _uid_of(name: str, image: ImageRoot) -> int:
    for line in ((image.root or Path("/")) / "etc/passwd").read_text().splitlines():
        fields = line.split(":")
        if fields[0] == name:
            return int(fields[2])
    raise BadContainer("CreateContainerError", f"no user {name} in the image")


def _kept_capabilities(wish: Mapping[str, Any]) -> list[str]:
    drop, add = wish.get("drop") or [], wish.get("add") or []
    kept = [] if "ALL" in drop else [each for each in _CAPABILITIES if each not in drop]
    kept += [each for each in (_ALL if "ALL" in add else add) if each not in kept]
    return [f"CAP_{each}" for each in kept]


def _cpu(limit: str) -> dict[str, int]:
    cores = quantity(limit)
    return {"quota": max(1000, int(cores * 100_000)), "period": 100_000}


def _usual_mounts() -> list[dict[str, Any]]:
    return [
        _mount("/proc", "proc", "nosuid", "noexec", "nodev"),
        _mount("/dev", "tmpfs", "nosuid", "mode=755", "size=65536k"),
        _mount(
            "/dev/pts", "devpts", "nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620"
        ),
        _mount("/dev/shm", "tmpfs", "nosuid", "noexec", "nodev", "mode=1777", "size=65536k"),
        _mount("/dev/mqueue", "mqueue", "nosuid", "noexec", "nodev"),
    ]


def _root_of_machine(folder: Path) -> Path:
    root = folder / "rootfs"
    root.mkdir(mode=0o755)
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        outside = Path("/") / name
        if outside.is_symlink():
            (root / name).symlink_to(os.readlink(outside))
    for name in ("tmp", "run", "var/tmp", "home", "root", "etc"):
        (root / name).mkdir(parents=True)
    for name in ("tmp", "var/tmp"):
        (root / name).chmod(0o1777)
    return root


def _machine_mounts(root: Path) -> list[dict[str, Any]]:
    mounts = [_bind("/usr", "/usr", is_read_only=True)]
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        if Path("/", name).is_dir() and not (root / name).is_symlink():
            mounts.append(_bind(f"/{name}", f"/{name}", is_read_only=True))
    for name in _SEEN_OF_ETC:
        if Path("/etc", name).exists():
            mounts.append(_bind(f"/etc/{name}", f"/etc/{name}", is_read_only=True))
    return mounts


def _etc(
    folder: Path, spec: Mapping[str, Any], hostname: str, uid: int, image: ImageRoot
) -> list[dict[str, Any]]:
    hosts = f"127.0.0.1 localhost\n::1 localhost\n127.0.0.1 {hostname}\n"
    for alias in spec.get("hostAliases") or []:
        hosts += f"{alias['ip']} {' '.join(alias['hostnames'])}\n"
    files = {
        "hostname": f"{hostname}\n",
        "hosts": hosts,
        "resolv.conf": "",
    }
    if image.root is None:
        users = {0: "root", _NOBODY: "nobody"}
        users.setdefault(uid, "user")
        files["passwd"] = "".join(f"{name}:x:{n}:{n}::/:/bin/sh\n" for n, name in users.items())
        files["group"] = "".join(f"{name}:x:{n}:\n" for n, name in users.items())
    mounts = []
    (folder / "etc").mkdir(mode=0o755)
    for name, text in files.items():
        path = folder / "etc" / name
        path.write_text(text)
        path.chmod(0o644)
        mounts.append(_bind(str(path), f"/etc/{name}", is_read_only=True))
    return mounts


def _volumes(
    pod: Mapping[str, Any],
    container: Mapping[str, Any],
    place: Place,
    security: Mapping[str, Any],
) -> list[dict[str, Any]]:
    described = {each["name"]: each for each in pod["spec"].get("volumes") or []}
    mounts = []
    for each in container.get("volumeMounts") or []:
        volume = described[each["name"]]
        path = each["mountPath"]
        if each["name"] in place.volumes:
            source = place.volumes[each["name"]]
            if each.get("subPath"):
                source = source / each["subPath"]
                if not source.exists():
                    source.mkdir(parents=True)
            mounts.append(_bind(str(source), path, is_read_only=bool(each.get("readOnly"))))
            continue
        empty = volume["emptyDir"]
        options = ["nosuid", "nodev", "mode=1777"]
        if empty.get("sizeLimit"):
            options.append(f"size={int(quantity(empty['sizeLimit']))}")
        if security.get("fsGroup") is not None:
            options.append(f"gid={security['fsGroup']}")
        mounts.append(_mount(path, "tmpfs", *options))
    return mounts


def is_in_memory(volume: Mapping[str, Any], containers: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a volume is a file system in memory of one container. Where several containers have
    it, it is a folder without a bound."""
    empty = volume.get("emptyDir")
    if empty is None or empty.get("medium") != "Memory":
        return False
    users = [
        each
        for container in containers
        for each in container.get("volumeMounts") or []
        if each["name"] == volume["name"]
    ]
    return len(users) == 1


def _mount(destination: str, kind: str, *options: str) -> dict[str, Any]:
    return {"destination": destination, "type": kind, "source": kind, "options": list(options)}


def _bind(source: str, destination: str, *, is_read_only: bool) -> dict[str, Any]:
    return {
        "destination": destination,
        "type": "bind",
        "source": source,
        "options": ["rbind", "ro" if is_read_only else "rw", "nosuid", "nodev"],
    }


def _make_point(root: Path, mounted: Mapping[str, Any]) -> None:
    """Make what something is mounted over, which a runtime cannot where the root is read only.

    What lies below another mount is made in that.
    """
    destination = mounted["destination"]
    if destination.startswith(("/dev/", "/proc/", "/usr/")):
        return
    point = root / destination.lstrip("/")
    if mounted["type"] == "bind" and Path(mounted["source"]).is_file():
        point.parent.mkdir(parents=True, exist_ok=True)
        point.touch()
    else:
        point.mkdir(parents=True, exist_ok=True)
        if mounted["type"] == "tmpfs" and "mode=1777" in mounted["options"]:
            # runc gives a file system the mode of the folder that it lies over.
            point.chmod(0o1777)
