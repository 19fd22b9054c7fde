"""The containers' hardening, read from hardening.toml and made into what the engine understands."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from providers.base import Limits
from providers.guest.child import NO_CORE
from providers.pool.template import WORKSPACE

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

    def container(self) -> dict[str, Any]:
        """What the engine takes as the container's configuration."""
        environment = self.settings["environment"]
        return {
            "user": self.settings["user"],
            "hostname": self.settings["hostname"],
            "working_dir": WORKSPACE,
            "environment": [f"{name}={value}" for name, value in environment.items()],
        }

    def host(self, limits: Limits) -> dict[str, Any]:
        """What the engine takes as the host configuration of a container with these limits."""
        settings = self.settings
        memory = limits.memory_bytes + settings["extra_memory"]
        tmpfs = f"{settings['tmpfs_options']},size={limits.workspace_bytes}"
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
            # Nothing a program prints is kept by the engine.
            "LogConfig": {"Type": "none"},
        }
