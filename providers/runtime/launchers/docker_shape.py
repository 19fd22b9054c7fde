"""How a container was made, as the engine tells it: what it is known again by."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from providers.runtime.pool.hardening import Hardening

# What of the engine's HostConfig says how much a container may do.
_HOST = (
    *("Runtime", "NetworkMode", "ReadonlyRootfs", "CapAdd", "CapDrop", "SecurityOpt", "Privileged"),
    *("IpcMode", "PidMode", "UTSMode", "UsernsMode", "CgroupnsMode", "CgroupParent", "GroupAdd"),
    *("Memory", "MemorySwap", "NanoCpus", "PidsLimit", "Ulimits", "ShmSize", "Sysctls", "Tmpfs"),
    *("Binds", "VolumesFrom", "Devices", "DeviceRequests", "DeviceCgroupRules", "PortBindings"),
)
_NEVER = ("Binds", "Devices", "DeviceRequests", "VolumesFrom", "PortBindings")
_CONFIG = ("User", "Env", "OpenStdin", "StdinOnce", "Tty", "WorkingDir", "Labels")


def shape_of(inspected: Mapping[str, Any]) -> dict[str, Any]:
    """As JSON gives it back, and without what is large: that as a digest."""
    config, host = inspected["Config"], inspected["HostConfig"]
    command = json.dumps([config.get("Entrypoint"), config.get("Cmd")]).encode()
    shape = {
        "Image": inspected["Image"],
        "Command": hashlib.sha256(command).hexdigest(),
        **{name: config.get(name) for name in _CONFIG},
        **{name: host.get(name) for name in _HOST},
        "Mounts": inspected.get("Mounts"),
        "Networks": sorted((inspected.get("NetworkSettings") or {}).get("Networks") or {}),
    }
    found: dict[str, Any] = json.loads(json.dumps(shape))
    return found


def differences(shape: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    """The names of what is not as it was."""
    names = sorted({*shape, *expected})
    return [name for name in names if shape.get(name) != expected.get(name)]


def weaknesses(shape: Mapping[str, Any], runtime: str) -> list[str]:
    """The names of what is weaker than every container of ours under `runtime` is."""
    settings = Hardening.of(runtime).settings
    expected = {
        "NetworkMode": settings["network_mode"],
        "Networks": [settings["network_mode"]],
        "ReadonlyRootfs": settings["read_only"],
        "Privileged": settings["privileged"],
        "IpcMode": settings["ipc_mode"],
        "CapDrop": settings["cap_drop"],
        "StdinOnce": False,
        "OpenStdin": True,
        "Mounts": [],
    }
    weak = [name for name, value in expected.items() if shape.get(name) != value]
    added = {name.removeprefix("CAP_") for name in shape.get("CapAdd") or []}
    if added - set(settings["cap_add"]):
        weak.append("CapAdd")
    if not set(settings["security_opt"]) <= set(shape.get("SecurityOpt") or []):
        weak.append("SecurityOpt")
    for name in ("Memory", "PidsLimit"):
        if not shape.get(name) or shape[name] < 0:
            weak.append(name)
    return weak + [name for name in _NEVER if shape.get(name)]
