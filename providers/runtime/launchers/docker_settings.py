"""The Docker launcher's settings, images, programs (passed as arguments and text), and the facts by
which a container is known again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from providers.languages import TABLE
from providers.runtime.launchers.guest_files import INSIDE, PACKAGE, SOURCES
from providers.runtime.pool.hardening import Hardening
from providers.runtime.pool.state_store import StateStore

# How long a warm container, and one that has had its run, waits for a host that may be no more:
# longer than any pool keeps one.
ALONE_SECONDS = 25 * 3600.0

DEFAULT_IMAGES = {each.name: each.image for each in TABLE if each.image}
BUILD_COMMAND = "python manage.py build_images"

GVISOR_REMEDY = (
    "Install gVisor's runsc, register it in the engine's daemon.json as the runtime `runsc` with "
    "the arguments --network=none and --platform=systrap, and restart the engine."
)


@dataclass(frozen=True)
class DockerSettings:
    """Which engine, what it starts, and who the containers belong to.

    `images` maps a language or a template's name to an image. `runtime` is the name of one of the
    engine's runtimes, or "auto": runsc where the engine has it and it works, else runc. Pools
    with different `pool_id`s never touch each other's containers. With a `memory` kept ones outlive
    this process. Without `filter_system_calls`
    only the engine's own seccomp profile holds.
    """

    base_url: str | None = None
    images: Mapping[str, str] = field(default_factory=lambda: dict(DEFAULT_IMAGES))
    runtime: str = "auto"
    require_gvisor: bool = False
    filter_system_calls: bool = True
    pool_id: str = "default"
    memory: StateStore | None = None


@dataclass(frozen=True)
class Image:
    """What is known of an image of the engine's. `digest` is the registry's, or the image's own id.

    `user_processes` is the engine's bound on the processes of one user.
    """

    id: str
    digest: str
    interpreters: Mapping[str, str | None]
    versions: Mapping[str, str]
    modules: bytes
    user_processes: int


_RUNNER = f"{INSIDE}/{PACKAGE}/node_runner.js"

# Node gets its runner as an argument and gives it the name it would have. Without execArgv the
# program's own forks are not started in this way.
_NODE_LOADER = (
    "const Module = require('module'); const source = process.argv.pop(); process.execArgv = []; "
    f"const runner = new Module('{_RUNNER}', null); runner.filename = '{_RUNNER}'; "
    f"runner.paths = []; runner._compile(source, '{_RUNNER}')"
)


def node_runner() -> list[str]:
    """The arguments that give Node.js the text of our runner in place of its path."""
    return ["-e", _NODE_LOADER, text_of("node_runner.js")]


def text_of(name: str) -> str:
    """One of the guest's files."""
    return SOURCES[name].decode()


def sources() -> dict[str, tuple[str, str]]:
    """The guest's modules: what tracebacks call each, and its text."""
    return {
        stem: (f"{INSIDE}/{PACKAGE}/{name}", text_of(name))
        for name in SOURCES
        if (stem := name.removesuffix(".py")) != name
        and stem not in ("__init__", "boot", "probe", "zygote")
    }


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
