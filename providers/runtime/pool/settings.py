"""How a pool is to be run."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from providers.errors import InvalidConfiguration
from providers.schema import ConfigField

Level = Literal["execution", "tenant", "tenant-kernel"]
Isolation = Literal["auto", "execution", "tenant", "tenant-kernel"]

# What the provider `local` may have, and the platforms of gVisor.
LAUNCHERS = ("bubblewrap", "gvisor")
PLATFORMS = ("systrap", "ptrace", "kvm")

# The headings of the forms.
CONNECTION, POOL, SANDBOX, ISOLATION, IMAGES = (
    *("Connection", "Pool", "Sandbox", "Isolation", "Images"),
)

# What web server, workers and pool service take without a sandbox (docs/deployment/capacity.md).
SERVICE_BYTES = 712 << 20
# Below so much for sandboxes each has less, so that there can be more than one.
_SCARCE_BYTES, _SMALL_BYTES, _USUAL_BYTES = 256 << 20, 128 << 20, 256 << 20

_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)

Renews = Literal["nothing", "sandboxes", "launcher"]


@dataclass(frozen=True, kw_only=True)
class PoolField(ConfigField):
    """One setting of a pool.

    `renews` says what a changed value takes: nothing, so that idle sandboxes stay; other sandboxes;
    or another launcher, which makes other sandboxes. `read` makes of the entered value the one in
    force. Of that, `compared` returns the part whose change counts.
    """

    renews: Renews
    read: Callable[[Any], Any] = lambda value: value
    compared: Callable[[Any], object] = lambda value: value


def module_names(text: str | None) -> tuple[str, ...]:
    """The modules that a `preload` field names. Raises InvalidConfiguration."""
    names = tuple(re.findall(r"[^\s,]+", text or ""))
    for name in names:
        if not _MODULE.fullmatch(name):
            raise InvalidConfiguration(
                f"preload: {name!r} is not the name of a module.", field="preload"
            )
    return names


# What every provider over a pool lets its administrator choose.
FIELDS: Mapping[str, PoolField] = {
    "isolation": PoolField(
        "string",
        "Sandbox sharing",
        default="execution",
        options=("execution", "tenant", "tenant-kernel", "auto"),
        description="execution: a new sandbox for every run. tenant: runs of one tenant share a "
        "sandbox, which is cleaned between runs. tenant-kernel: runs of one tenant share a gVisor "
        "kernel, each in its own namespaces. auto: tenant-kernel if possible, otherwise execution.",
        group=ISOLATION,
        renews="launcher",
        # The same sandboxes serve execution and tenant.
        compared=lambda level: level if level in ("tenant-kernel", "auto") else "",
    ),
    "preload": PoolField(
        "string",
        "Preloaded Python modules",
        placeholder="numpy, pandas, matplotlib",
        max=1000,
        address=False,
        description="Imported in advance, so that the import in a run is fast.",
        group=SANDBOX,
        renews="sandboxes",
        read=module_names,
    ),
}


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


def default_memory(total_bytes: int) -> int:
    """Bytes of a sandbox on a machine with so much memory."""
    return _SMALL_BYTES if total_bytes - SERVICE_BYTES < _SCARCE_BYTES else _USUAL_BYTES


def default_capacity(total_bytes: int, memory_bytes: int, *, most: int, pools: int = 1) -> int:
    """How many sandboxes of `memory_bytes` a pool may have beside `pools` - 1 others, on a machine
    with so much memory: all that is left by the service, one at least."""
    room = (total_bytes - SERVICE_BYTES) // memory_bytes // pools
    return max(1, min(most, room))
