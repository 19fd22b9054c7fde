"""How a pool is to be run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from providers.errors import InvalidConfiguration
from providers.schema import ConfigField

Level = Literal["execution", "tenant", "tenant-kernel"]
Isolation = Literal["auto", "execution", "tenant", "tenant-kernel"]

# What every provider over a pool lets its administrator choose.
FIELDS: Mapping[str, ConfigField] = {
    "isolation": ConfigField(
        "string",
        "Isolation level",
        default="execution",
        options=("execution", "tenant", "tenant-kernel", "auto"),
        description="execution: a fresh sandbox for every run. tenant: the runs of one tenant "
        "may share a sandbox, which is scrubbed between them. tenant-kernel: they share a gVisor "
        "kernel that is theirs alone, each in namespaces of its own; only where gVisor is, with "
        "or without Docker. auto: tenant-kernel where that can be, else execution; Enforced by "
        "says which and why.",
    ),
    "preload": ConfigField(
        "string",
        "Preloaded Python modules",
        placeholder="numpy, pandas, matplotlib",
        max=1000,
        address=False,
        description="Imported while a sandbox warms up, so that importing them costs no time.",
    ),
}

_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)


@dataclass(frozen=True)
class PoolSettings:
    """`size` warm sandboxes per template, `capacity` alive in all, `queue` callers waiting.

    A caller waits `patience` seconds at most for a sandbox. A template nobody asked for lately is
    kept warm with `minimum` only, one whose callers had to wait lately with `burst` more.
    `isolation` "tenant" lets one owner's runs follow one another in a sandbox; "tenant-kernel"
    makes them in a gVisor kernel of the owner's. No sandbox stays warm or handed out without use
    for longer than `max_lifetime` seconds.
    """

    size: int = 4
    capacity: int = 16
    queue: int = 64
    patience: float = 10.0
    parallel_starts: int = 4
    minimum: int = 0
    burst: int = 0
    isolation: Level = "execution"
    max_lifetime: float = 300.0


def module_names(text: str | None) -> tuple[str, ...]:
    """The modules that a `preload` field names. Raises InvalidConfiguration."""
    names = tuple(re.findall(r"[^\s,]+", text or ""))
    for name in names:
        if not _MODULE.fullmatch(name):
            raise InvalidConfiguration(f"preload: {name!r} names no module.", field="preload")
    return names
