"""Why the kernel lets an ordinary user make no user namespaces, and the remedy for it."""

from __future__ import annotations

import re
from pathlib import Path

SETTINGS = Path("/proc/sys")

# Each setting, the value that forbids user namespaces, and what to do.
_CAUSES = (
    (
        "user.max_user_namespaces",
        "0",
        "Allow some: sudo sysctl -w user.max_user_namespaces=10000.",
    ),
    (
        "kernel.unprivileged_userns_clone",
        "0",
        "Allow them: sudo sysctl -w kernel.unprivileged_userns_clone=1.",
    ),
    (
        "kernel.apparmor_restrict_unprivileged_userns",
        "1",
        "AppArmor allows them only to programs with a profile. Install the profile for bubblewrap: "
        "sudo install -m 0644 deploy/apparmor/cofferdam-bwrap /etc/apparmor.d/ && sudo "
        "apparmor_parser --replace /etc/apparmor.d/cofferdam-bwrap "
        "(docs/deployment/requirements.md#user-namespaces).",
    ),
)

# What bubblewrap, unshare and the zygote say where a namespace or a right in it is refused.
_REFUSALS = re.compile(
    r"permission denied|not permitted|no permissions|creating new namespace failed"
    r"|max_\*_namespaces|no space left",
    re.IGNORECASE,
)


def remedy_for(complaint: str, folder: Path | None = None) -> str:
    """Return the complaint with its cause and remedy, where a kernel setting explains it.

    `folder` has the kernel's settings as files, as /proc/sys has them. Root needs no namespace,
    so do not call this for root.
    """
    if _REFUSALS.search(complaint):
        for name, forbids, remedy in _CAUSES:
            if _value(folder or SETTINGS, name) == forbids:
                return (
                    f"{complaint.rstrip('.')}. Ordinary users may not make user namespaces on this "
                    f"machine ({name} is {forbids}). {remedy}"
                )
    return complaint


def _value(folder: Path, name: str) -> str:
    try:
        return folder.joinpath(*name.split(".")).read_text().strip()
    except OSError:
        return ""
