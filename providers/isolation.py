"""How strongly a sandbox is isolated, whom it is shared with, and the floor nothing runs below.

`microvm` is a virtual machine of its own, `gvisor` a kernel in user space between program and
host, `namespaces` the host's own kernel with a view of its own (runc, bubblewrap), `none` a plain
process.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from providers.base import SandboxProvider
from providers.errors import ProviderUnavailable
from providers.launcher_names import RUNTIMES
from providers.sandbox import Sandbox

NONE, NAMESPACES, GVISOR, MICROVM = "none", "namespaces", "gvisor", "microvm"

# The weakest first.
LEVELS = (NONE, NAMESPACES, GVISOR, MICROVM)

CHOICES = (
    (MICROVM, "microvm: a virtual machine per sandbox"),
    (GVISOR, "gvisor: user-space kernel, or stronger"),
    (NAMESPACES, "namespaces: runc or bubblewrap, or stronger"),
    (NONE, "none: no minimum"),
)

# A sandbox for every run; one tenant's runs in turn; one tenant's runs on a kernel of their own;
# kept for one session.
SHARINGS = ("execution", "tenant", "tenant-kernel", "session")

FIELD = "minimum_isolation"


class IsolationUnmet(ProviderUnavailable):
    """A sandbox, or a provider, is isolated less than is demanded. Nothing ran in it."""

    def __init__(self, message: str) -> None:
        super().__init__(message, field=FIELD)


def of_runtime(runtime: str) -> str:
    """What one of our own pools' runtimes comes to; `none` for one that is not known."""
    return RUNTIMES.get(runtime, NONE)


def strictest(*demanded: str) -> str:
    """The highest of these levels; empty ones demand nothing, and unknown ones the most."""
    known = (level if level in LEVELS else MICROVM for level in demanded if level)
    return max(known, key=_rank, default=NONE)


def meets(offered: str, demanded: str) -> bool:
    """Whether a sandbox with the one may run what demands the other."""
    return _rank(offered) >= _rank(strictest(demanded))


def of_sandbox(provider: SandboxProvider, sandbox: Sandbox) -> tuple[str, str]:
    """Isolation and sharing of one sandbox, as it says, or else as its provider does.

    What nobody declares is `none`. Sharing that is not known is empty.
    """
    told: Mapping[str, Any] = sandbox.metadata
    isolation = told.get("isolation", provider.isolation)
    sharing = told.get("sharing", provider.sharing)
    return (
        isolation if isolation in LEVELS else NONE,
        sharing if sharing in SHARINGS else "",
    )


def _rank(level: str) -> int:
    return LEVELS.index(level) if level in LEVELS else 0
