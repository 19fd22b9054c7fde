"""The containers' hardening, read from hardening.toml and made into what the engine understands."""

from __future__ import annotations

import hashlib
import secrets
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from providers.runtime.guest.child import NO_CORE
from providers.runtime.pool.template import WORKSPACE
from providers.values import SandboxLimits

RUNC, GVISOR = "runc", "gvisor"


@cache
def _declared() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("hardening.toml").read_text())


@dataclass(frozen=True)
class Hardening:
    """The declaration for one runtime class, `runc` or `gvisor`."""

    settings: dict[str, Any]

    @classmethod
    def of(cls, runtime_class: str) -> Hardening:
        declared = _declared()
        return cls({**declared["container"], **declared[runtime_class]})

    @property
    def program_uid(self) -> int | None:
        """The user that user code becomes, None when the whole container is that user."""
        uid: int | None = self.settings.get("program_uid")
        return uid

    def choose_user(self, *, maps_users: bool) -> int:
        """Who a new container's first process is.

        `maps_users` says that the engine gives containers a range of users (userns-remap, or
        rootless), of which there are few.
        """
        settings = self.settings
        if "user" in settings:
            return int(settings["user"])
        if maps_users:
            return int(settings["first_mapped_uid"]) + secrets.randbelow(settings["mapped_uids"])
        return int(settings["first_uid"]) + secrets.randbelow(settings["uids"])

    def user_of(self, name: str) -> int:
        """Return the first process's user in all containers that share a declaration's name."""
        settings = self.settings
        if "user" in settings:
            return int(settings["user"])
        number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
        return int(settings["first_uid"]) + number % int(settings["uids"])

    def container(self, user: int) -> dict[str, Any]:
        """What the engine takes as the configuration of a container for `user`."""
        environment = self.settings["environment"]
        return {
            "user": f"{user}:{user}",
            "hostname": self.settings["hostname"],
            "working_dir": WORKSPACE,
            "environment": [f"{name}={value}" for name, value in environment.items()],
        }

    def host(self, limits: SandboxLimits, user: int) -> dict[str, Any]:
        """What the engine takes as the host configuration of a container with these limits."""
        settings = self.settings
        memory = limits.memory_bytes + settings["extra_memory"]
        owner = user if self.program_uid is None else self.program_uid
        tmpfs = f"{settings['tmpfs_options']},uid={owner},gid={owner},size={limits.workspace_bytes}"
        if "inodes" in settings:
            tmpfs += f",nr_inodes={settings['inodes']}"
        ulimits = {
            "nofile": limits.open_files,
            "fsize": limits.file_bytes,
            "core": NO_CORE,
        }
        return {
            "NetworkMode": settings["network_mode"],
            "ReadonlyRootfs": settings["read_only"],
            "Dns": settings["dns"],
            "CapDrop": settings["cap_drop"],
            "CapAdd": settings["cap_add"],
            "SecurityOpt": settings["security_opt"],
            "IpcMode": settings["ipc_mode"],
            "Privileged": settings["privileged"],
            "OomScoreAdj": settings["oom_score_adj"],
            "Memory": memory,
            "MemorySwap": memory,  # memory and swap together: no swap
            "NanoCpus": int(settings["cpus"] * 1e9),
            "PidsLimit": limits.processes + settings["extra_processes"],
            "Ulimits": [
                {"Name": name, "Soft": bound, "Hard": bound} for name, bound in ulimits.items()
            ],
            "Tmpfs": {WORKSPACE: tmpfs, "/tmp": tmpfs},  # noqa: S108 (inside the container)
            "ShmSize": limits.workspace_bytes,
            "Sysctls": dict(settings.get("sysctls", {})),
            # Nothing a program prints is kept by the engine.
            "LogConfig": {"Type": "none"},
        }
